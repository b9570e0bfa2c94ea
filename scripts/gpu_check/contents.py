"""What goes into the archive: the patched tree, how its stock twin differs, our package, and what that imports."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from gpu_check.archive import MANIFEST, SCHEMA
from llamafork.errors import EnvironmentFault
from llamafork.paths import PACKAGE, Paths
from llamafork.source import prepare
from llamafork.source.git import Git

BACKENDS = ("cuda", "sim")
SCRIPTS = Path(__file__).resolve().parent.parent
SITE = ("platformdirs", "yaml")  # pure Python; gguf's own files come from the tree
BINDINGS = "gguf-py/gguf/"
# Nothing here is read when the targets of the check are configured and compiled for CUDA or for simulated devices.
OTHER_BACKENDS = ("blas", "cann", "et", "hexagon", "hip", "metal", "musa", "opencl", "openvino", "sycl", "virtgpu",
                  "vulkan", "webgpu", "zdnn", "zendnn")  # fmt: skip
DROPPED = (
    *(f"ggml/src/ggml-{name}/" for name in OTHER_BACKENDS),
    *("conversion/", "convert_", "gguf-py/", "scripts/", "tests/snapshots/"),
    *("tools/mtmd/tests/", "tools/server/tests/"),
    *(f"tools/ui/{name}" for name in ("src/", "static/", "tests/", "scripts/", ".")),
)
KEPT = ("scripts/ui-assets.cmake",)
DROPPED_SUFFIXES = (".md", ".py", ".sh", ".json", ".lock", ".nix", ".ini", ".png", ".jpg", ".jpeg", ".mp3", ".mp4",
                    ".wav", ".gguf", ".pdf")  # fmt: skip


def keeps(name: str) -> bool:
    return name in KEPT or not (name.startswith(DROPPED) or name.endswith(DROPPED_SUFFIXES))


def collect(paths: Paths, *, offline: bool = False) -> dict[str, bytes]:
    """Path in the archive to content."""
    fork = prepare.stack(paths, offline=offline)
    ours = fork.repo.files(fork.tree)
    wanted = {f"src/{name}": blob for name, (_, blob) in ours.items() if keeps(name)}
    wanted |= {f"site/gguf/{name[len(BINDINGS):]}": blob for name, (_, blob) in ours.items()
               if name.startswith(BINDINGS) and name.endswith(".py")}  # fmt: skip
    twins: dict[str, dict[str, object]] = {}
    for backend in BACKENDS:
        stock = prepare.stock(paths, (backend,), offline=offline)
        theirs = stock.repo.files(stock.tree)
        removed = sorted(name for name in ours if name not in theirs and keeps(name))
        twins[backend] = {"tree": stock.tree, "removed": removed}
        wanted |= {f"stock/{backend}/{name}": blob for name, (_, blob) in theirs.items()
                   if keeps(name) and (name not in ours or ours[name][1] != blob)}  # fmt: skip
    pin = {"build": fork.base.pin.build, "version": fork.base.pin.version, "tree": fork.base.tree}
    manifest = {"schema": SCHEMA, "series": fork.tree, "changes": list(fork.trees), "pin": pin, "stock": twins}
    text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
    return {MANIFEST: text.encode(), **_blobs(fork.repo, wanted), **_package(), **_site()}


def _blobs(repo: Git, wanted: Mapping[str, str]) -> dict[str, bytes]:
    """Contents by one git, since a process for each of some thousand files takes half a minute."""
    names = list(dict.fromkeys(wanted.values()))
    raw = repo.run("cat-file", "--batch", stdin="".join(f"{name}\n" for name in names)).raw
    contents: dict[str, bytes] = {}
    at = 0
    for name in names:
        end = raw.index(b"\n", at)
        size = int(raw[at:end].split()[2])
        contents[name] = raw[end + 1 : end + 1 + size]
        at = end + 1 + size + 1
    return {path: contents[blob] for path, blob in wanted.items()}


def _package() -> dict[str, bytes]:
    found = _folder(PACKAGE, "repo/llamafork", (".py", ".toml"))
    found |= _folder(SCRIPTS / "gpu_check", "repo/scripts/gpu_check", (".py",))
    return found | {"repo/scripts/gpu-check": (SCRIPTS / "gpu-check").read_bytes()}


def _site() -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name in SITE:
        spec = importlib.util.find_spec(name)
        folders = list(spec.submodule_search_locations or ()) if spec else []
        if not folders:
            raise EnvironmentFault(
                f"the Python package {name} is not installed here", why="the archive takes it along", do="scripts/test"
            )
        found |= _folder(Path(folders[0]), f"site/{name}", (".py",))
    return found


def _folder(folder: Path, top: str, suffixes: Sequence[str]) -> dict[str, bytes]:
    return {
        f"{top}/{file.relative_to(folder).as_posix()}": file.read_bytes()
        for file in sorted(folder.rglob("*"))
        if file.suffix in suffixes and "_data" not in file.parts
    }
