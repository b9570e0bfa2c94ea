"""The checks that build and run make, listed: what was found, and what would be wrong later."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llamafork import console
from llamafork.build import check, cuda, make, store, toolchain
from llamafork.build.request import bounded_jobs
from llamafork.errors import Exit, LlamaforkError
from llamafork.paths import Paths, show
from llamafork.source import fetch, git, pin, prepare

OK, NOTE, BAD = "ok", "note", "bad"
# Variables that change what upstream's programs or CMake do without showing up on a command line.
TELLING = (
    "LLAMA_CACHE",
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "CUDAARCHS",
    "CUDACXX",
    "CC",
    "CXX",
    "CFLAGS",
    "CXXFLAGS",
    "LD_LIBRARY_PATH",
)
PREFIXES = ("LLAMA_ARG_", "GGML_", "CMAKE_", "CCACHE_", "LLAMAFORK_")
SECRET = ("KEY", "TOKEN", "PASSWORD", "SECRET")


@dataclass(frozen=True)
class Finding:
    subject: str
    state: str
    text: str


def run(ns: argparse.Namespace, paths: Paths) -> int:
    """Print every finding; exit 3 when one of them would stop a build or a run."""
    found = [f for checker in CHECKS for f in _safe(checker, paths)]
    console.table(("what", "state", "found"), [(f.subject, f.state, f.text) for f in found])
    console.emit("doctor", {"findings": [vars(f) for f in found]})
    return Exit.ENVIRONMENT if any(f.state == BAD for f in found) else Exit.OK


def _safe(checker: Callable[[Paths], Iterator[Finding]], paths: Paths) -> Iterator[Finding]:
    try:
        yield from checker(paths)
    except LlamaforkError as error:
        text = "; ".join(part for part in (error.what, error.why, error.do) if part)
        yield Finding(checker.__name__.strip("_"), BAD, text)


def _git(_: Paths) -> Iterator[Finding]:
    yield Finding("git", OK, ".".join(map(str, git.check_version())))


def _cmake(_: Paths) -> Iterator[Finding]:
    yield Finding("cmake", OK, str(toolchain.best("cmake", "cmake")))
    name, program = toolchain.generator()
    yield Finding("generator", OK, f"{name} ({program})")


def _compiler(_: Paths) -> Iterator[Finding]:
    cc, cxx, identity = toolchain.compilers()
    yield Finding("compiler", OK, f"{cxx}: {identity.split(' | ')[0]}")
    if not toolchain.openssl(cc):
        yield Finding("openssl", NOTE, "headers are missing: builds cannot download over https (-hf)")


def _ccache(_: Paths) -> Iterator[Finding]:
    found = toolchain.ccache()
    yield Finding("ccache", OK if found else NOTE, str(found) if found else "none: each build compiles everything")


def _cuda(_: Paths) -> Iterator[Finding]:
    nvcc = cuda.find_nvcc()
    seen = cuda.visible_architectures()
    yield Finding("nvcc", OK if nvcc else NOTE, f"{nvcc.path} ({nvcc.version})" if nvcc else "none on PATH")
    yield Finding("NVIDIA GPU", OK if seen else NOTE, f"architectures {', '.join(seen)}" if seen else "none visible")
    if seen and not cuda.driver_library():
        yield Finding("libcuda", BAD, "a GPU is listed but the driver library is not found by the loader")


def _jobs(_: Paths) -> Iterator[Finding]:
    cores, ram = make.cores(), make.ram_gib()
    asked, named = make.asked_jobs(), os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL")
    jobs, cuda_jobs = (bounded_jobs(cores, ram, cuda=cuda, asked=asked) for cuda in (False, True))
    why = f"{cores} cores, {ram:.1f} GiB available" if asked is None else f"CMAKE_BUILD_PARALLEL_LEVEL={asked}"
    yield Finding("jobs", OK, f"{jobs} C++, {cuda_jobs} nvcc ({why})")
    if named and asked is None:
        yield Finding("jobs", NOTE, f"CMAKE_BUILD_PARALLEL_LEVEL={named} is not a number of jobs and is ignored")


def _disk(paths: Paths) -> Iterator[Finding]:
    for name, folder in (("cache", paths.cache), ("data", paths.data)):
        at = folder
        while not os.path.lexists(at):
            at = at.parent
        if not at.is_dir() or not os.access(at, os.W_OK):
            yield Finding(f"{name} folder", BAD, f"{show(folder)} cannot be written: {show(at)}")
            continue
        free = shutil.disk_usage(at).free / 1e9
        yield Finding(f"{name} folder", OK if free > 3 else BAD, f"{show(folder)}, {free:.1f} GB free")


def _source(paths: Paths) -> Iterator[Finding]:
    chosen = pin.load(paths.pin)
    if fetch.cached(paths, chosen) is None:
        yield Finding("upstream", NOTE, f"{chosen.version} is not fetched yet (llamafork source fetch)")
        return
    made = prepare.stack(paths, offline=True)
    yield Finding("series", OK, f"{len(made.applied)} changes on {chosen.version}, tree {made.tree[:12]}")


def _builds(paths: Paths) -> Iterator[Finding]:
    now = store.current(paths)
    if now is None:
        yield Finding("build", NOTE, "none yet (llamafork build)")
        return
    missing = check.unresolved(now.root / "bin")
    devices = ", ".join(d["name"] for d in now.info.get("devices", [])) or "no GPU device"
    yield Finding("build", OK, f"{now.key}: {devices}")
    stale = store.stale(paths, now)
    if stale:
        yield Finding("build", NOTE, stale)
    if missing:
        yield Finding("libraries", BAD, f"{now.key} does not find {', '.join(missing)}")


def _environment(_: Paths) -> Iterator[Finding]:
    for name in sorted(os.environ):
        if name in TELLING or name.startswith(PREFIXES):
            value = "***" if any(word in name for word in SECRET) else os.environ[name]
            yield Finding("environment", NOTE, f"{name}={value}")


CHECKS: tuple[Callable[[Paths], Iterator[Finding]], ...] = (
    _git,
    _cmake,
    _compiler,
    _ccache,
    _cuda,
    _jobs,
    _disk,
    _source,
    _builds,
    _environment,
)
