"""The test bed: every architecture of make-model loads in stock upstream, and computes the same on other devices."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import pytest
from real_builds import FORK_SIM, SIM, complete, find

from llamafork import cli
from llamafork.build.store import Build
from llamafork.compare import target
from llamafork.synth.archs import LAYOUTS

SMALL = ("--layers", "3", "--embd", "64", "--heads", "2", "--kv-heads", "1", "--head-dim", "32", "--ff", "32")
SMALL += ("--experts", "16", "--used", "4", "--vocab", "300")
WANTED = {"olmoe": ("--kv-heads", "2"), "llama4": ("--layers", "4")}
CPU = ("-ngl", "0", "-nr", "-t", "1")
MTP_FILE = "mtp.gguf"
DEVICE = {"GGML_SIM_DEVICES": "1", "GGML_SIM_CHECK": "1", "GGML_NO_BACKTRACE": "1"}


@dataclass(frozen=True)
class Case:
    arch: str
    words: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        return " ".join((self.arch, *self.words)).replace("--", "")


WIDE = ("--embd", "256", "--ff", "256", "--layers", "2")
CASES = [
    *(Case(arch) for arch in LAYOUTS),
    Case("qwen35moe", ("--gate-up", "merged", "--shared", "2")),
    Case("qwen4exp", ("--gate-up", "merged")),
    Case("deepseek2", ("--gate-up", "merged", "--split", "3")),
    Case("gpt-oss", ("--type", "MXFP4", "--split", "2")),
    Case("llama4", ("--dense", "0")),
    Case("mimo2", ("--dense", "0", "--type", "Q4_0")),
    Case("glm4moe", ("--dense", "2", "--shared", "0")),
    Case("qwen3moe", (*WIDE, "--type", "Q4_K", "--layer-types", "Q6_K,IQ4_XS")),
    Case("qwen3moe", (*WIDE, "--type", "Q3_K", "--layer-types", "IQ2_XXS,MXFP4")),
    Case("qwen3moe", (*WIDE, "--type", "TQ1_0", "--layer-types", "TQ2_0,NVFP4")),
    Case("qwen3moe", (*WIDE, "--type", "Q1_0", "--layer-types", "Q2_0,Q5_K")),
    Case("glm4moe", ("--type", "Q2_K", "--layer-types", "IQ1_M,Q5_K")),  # all of them substituted: rows of 64
]


def tokens(answer: str) -> list[int]:
    found: list[int] = json.loads(answer)["tokens"]
    return found


Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The file to load of a case, made when first asked for; a given --mtp-file gets its folder."""
    made: dict[tuple[str, ...], Path] = {}

    def found(case: Case, *more: str) -> Path:
        words = ("--arch", case.arch, *SMALL, *WANTED.get(case.arch, ()), *case.words, *more)
        if words not in made:
            folder = tmp_path_factory.mktemp("model")
            asked = [str(folder / word) if word == MTP_FILE else word for word in words]
            assert cli.main(["--quiet", "make-model", str(folder / "m.gguf"), *asked]) == 0
            first = [*folder.glob("m-00001-of-*.gguf"), folder / "m.gguf"][0]
            made[words] = first
        return made[words]

    return found


@pytest.fixture(scope="module")
def tool() -> Build:
    return find(*FORK_SIM)


@pytest.fixture(scope="module")
def stock_sim() -> Build:
    return find("--stock", *SIM)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_stock_upstream_loads_it_and_generates(case: Case, stock: Build, make: Make) -> None:
    plain = complete(stock, make(case), *CPU)
    assert len(set(tokens(plain.answer))) > 4


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_other_devices_answer_as_the_cpu(case: Case, stock_sim: Build, make: Make) -> None:
    """Stock upstream on a simulated GPU and on two RPC servers: the same kernels, the same answer to the last bit."""
    path = make(case)
    plain = complete(stock_sim, path, *CPU, env={"GGML_SIM_DEVICES": ""})
    for words in (("-ngl", "99"), ("-ngl", "99", "--cpu-moe")):
        assert complete(stock_sim, path, *words, "-nr", "-t", "1", env=DEVICE).answer == plain.answer
    with target.at(target.PLACES["rpc2"], target.Target(stock_sim.key, stock_sim.root / "bin")) as words:
        assert complete(stock_sim, path, *words, "-nr", "-t", "1", env={"GGML_SIM_DEVICES": ""}).answer == plain.answer


def drafted(log: str) -> tuple[int, int]:
    """Accepted and made drafts."""
    found = re.search(r"\(\s*(\d+) accepted /\s*(\d+) generated", log)
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)


class TestMtp:
    """The block is loaded and drafts, and what comes out is the model's own choice."""

    @pytest.mark.parametrize("arch", [name for name, one in LAYOUTS.items() if one.mtp])
    def test_built_in(self, arch: str, stock: Build, make: Make) -> None:
        path = make(Case(arch), "--mtp")
        plain = complete(stock, path, *CPU)
        if arch == "glm5-next":
            return  # loaded; upstream has no graph for the block
        there = complete(stock, path, *CPU, "--spec-type", "draft-mtp")
        assert tokens(there.answer) == tokens(plain.answer)
        assert drafted(there.log)[1] > 20

    @pytest.mark.parametrize("arch", [name for name, one in LAYOUTS.items() if one.mtp_file])
    def test_in_a_file_of_its_own(self, arch: str, stock: Build, make: Make) -> None:
        path = make(Case(arch), "--mtp-file", MTP_FILE)
        plain = complete(stock, path, *CPU)
        there = complete(stock, path, *CPU, "--spec-type", "draft-mtp", "-md", str(path.with_name(MTP_FILE)))
        assert tokens(there.answer) == tokens(plain.answer)
        assert drafted(there.log)[1] > 20

    def test_a_bench_models_drafts_are_accepted(self, stock: Build, make: Make) -> None:
        there = complete(stock, make(Case("deepseek2"), "--bench", "--mtp"), *CPU, "--spec-type", "draft-mtp")
        accepted, all_made = drafted(there.log)
        assert accepted > all_made / 2 > 5

    @pytest.mark.parametrize("arch", ["qwen35moe", "deepseek2", "qwen4exp", "glm4moe", "mimo2"])
    def test_on_a_simulated_gpu(self, arch: str, tool: Build, make: Make) -> None:
        path = make(Case(arch), "--mtp")
        plain = complete(tool, path, *CPU, env={"GGML_SIM_DEVICES": ""})
        there = complete(tool, path, "-ngl", "99", "-nr", "-t", "1", "--spec-type", "draft-mtp", env=DEVICE)
        assert tokens(there.answer) == tokens(plain.answer)


@pytest.mark.parametrize("arch", LAYOUTS)
def test_bench_models_generate(arch: str, stock: Build, make: Make) -> None:
    complete(stock, make(Case(arch), "--bench", "--type", "Q4_K"), *CPU)


def test_upstreams_tool_merges_the_parts(stock: Build, make: Make, tmp_path: Path) -> None:
    whole = make(Case("deepseek2"))
    first = make(Case("deepseek2"), "--split", "4")
    assert first.name == "m-00001-of-00004.gguf"
    merged = tmp_path / "merged.gguf"
    subprocess.run([stock.program("llama-gguf-split"), "--merge", first, merged], check=True, capture_output=True)
    ours, theirs = (
        {one.name: (one.tensor_type, one.data) for one in gguf.GGUFReader(path).tensors} for path in (whole, merged)
    )
    assert ours.keys() == theirs.keys()
    for name, (kind, data) in ours.items():
        assert kind == theirs[name][0]
        assert np.array_equal(data, theirs[name][1])
