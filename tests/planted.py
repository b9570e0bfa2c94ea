"""A build that is the fork but for one planted fault, chosen by the variable PLANTED when it runs.

Without the variable it does what the fork does, so that what a test sees comes from the fault and nothing else.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from real_builds import ROOT, llamafork

from llamafork import paths
from llamafork.build import store
from llamafork.build.store import Build

_IS = 'getenv("PLANTED") != NULL && strcmp(getenv("PLANTED"), "{}") == 0'
# File, the line after which it goes (once in the file), the code.
FAULTS = {
    # the lowest bit of the first logit of each row that is read
    "bit": (
        "src/llama-context.cpp",
        "        const int64_t j = output_resolve_row(i);\n        return logits.data",
        "        const int64_t j = output_resolve_row(i);\n"
        "        if (PLANTED) {\n"
        "            uint32_t bits;\n"
        "            memcpy(&bits, logits.data + j*model.vocab.n_tokens(), sizeof(bits));\n"
        "            bits |= 1;\n"
        "            memcpy(logits.data + j*model.vocab.n_tokens(), &bits, sizeof(bits));\n"
        "        }\n"
        "        return logits.data",
    ),
    # a split that nothing asks for, in the middle of each graph
    "split": (
        "ggml/src/ggml-backend.cpp",
        "            bool need_new_split = false;\n",
        "            bool need_new_split = i == graph->n_nodes / 2 && PLANTED;\n",
    ),
    # a batch takes a tenth longer
    "slow": (
        "src/llama-context.cpp",
        "        case LLAMA_PROCESS_TYPE_DECODE: return ctx->decode(*batch);\n",
        "        case LLAMA_PROCESS_TYPE_DECODE: {\n"
        "            const int64_t t_start = ggml_time_us();\n"
        "            const int ret = ctx->decode(*batch);\n"
        "            const int64_t t_end = ggml_time_us();\n"
        "            while (PLANTED && ggml_time_us() < t_end + (t_end - t_start)/10) {}\n"
        "            return ret;\n"
        "        }\n",
    ),
}


def build(folder: Path, *options: str) -> Build:
    """The fork with all faults, built with *options* from a repository in *folder*."""
    repo = folder / "repo"
    shutil.copytree(ROOT / "patches", repo / "patches")
    (repo / "vendor").mkdir()
    shutil.copy(ROOT / "vendor/upstream.toml", repo / "vendor")
    env = {"LLAMAFORK_REPO": str(repo)}
    llamafork("patch", "apply", env=env)
    for name, (file, before, after) in FAULTS.items():
        at = repo / "vendor/llama.cpp" / file
        text = at.read_text(encoding="utf-8")
        assert text.count(before) == 1, f"{name}: upstream changed; find another place in {file}"
        code = "#include <cstring>\n#include <cstdlib>\n" + text.replace(
            before, after.replace("PLANTED", _IS.format(name))
        )
        at.write_text(code, encoding="utf-8")
    root = llamafork("build", "--work-tree", *options, env=env).stdout.strip().splitlines()[-1]
    found = store.find(paths.find(), Path(root).name)
    assert found is not None
    return found


def planted(fault: str) -> dict[str, str]:
    """The environment that turns *fault* on."""
    assert fault in FAULTS
    return {"PLANTED": fault, "PATH": os.environ["PATH"]}
