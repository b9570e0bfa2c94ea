"""The whole way on a machine without a GPU: pack, unpack, and the same stages on simulated devices."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from gpu_check import archive, contents, record
from gpu_check.check import terminable
from gpu_check.stage import choose
from gpu_check.stages import EXTRA, STAGES
from llamafork.build import toolchain
from llamafork.errors import Exit, LlamaforkError
from llamafork.paths import Paths
from llamafork.proc import guardian, shut_down


def pack(paths: Paths, target: Path, *, offline: bool = False) -> str:
    """Write the archive and say what it is."""
    started = time.monotonic()
    size = archive.write(target, contents.collect(paths, offline=offline))
    manifest = archive.read(target).manifest
    seconds = time.monotonic() - started
    series = f"series {manifest['series'][:12]} on {manifest['pin']['version']}"
    return f"{target}: {size / 1e6:.1f} MB, {series} ({seconds:.1f} s)"


def rehearse(
    paths: Paths, *, minutes: float, jobs: int, out: Path | None, names: Sequence[str] = (), more: Sequence[str] = ()
) -> int:
    """Exit code of the check. A rehearsal that left out what it is there to rehearse has failed."""
    wanted = choose(STAGES, names)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        scratch = Path(name)
        packed = scratch / "gpu-check.tar.xz"
        print(pack(paths, packed), flush=True)
        archive.sync(scratch / "repo", archive.read(packed).below("repo"))
        left = minutes - (time.monotonic() - started) / 60
        result = (out or scratch / "out").absolute()
        words: list[str | Path] = ["--archive", packed, "--out", result, "--work", scratch / "work", "--backend", "sim"]
        words += ["--jobs", str(jobs), "--minutes", f"{left:.2f}"]
        words += ["--stages", ",".join(stage.name for stage in wanted), *more]
        script = scratch / "repo" / "scripts" / "gpu-check"
        code = _run([sys.executable, "-S", "-B", script, "run", *words], _bare(paths, scratch), scratch)
        print(f"rehearsed in {time.monotonic() - started:.0f} s, exit {code}", flush=True)
        if code == Exit.OK:
            _ensure_whole(result, [stage.name for stage in wanted if stage.priority < EXTRA])
    return code


def _run(words: Sequence[str | Path], env: dict[str, str], cwd: Path) -> int:
    """In a group of its own, so that Ctrl-C reaches it once, from us; it writes its record and ends what it started."""
    with terminable(), guardian() as name_group:
        child = subprocess.Popen(words, env=env, cwd=cwd, stdin=subprocess.DEVNULL, start_new_session=True)
        try:
            name_group(child.pid)
            return child.wait()
        except BaseException:
            shut_down(child, grace=10.0)
            raise


def _bare(paths: Paths, scratch: Path) -> dict[str, str]:
    """The environment of a Python that has numpy and nothing else, with the compiler cache of all our builds."""
    site = scratch / "numpy-only"
    site.mkdir()
    spec = importlib.util.find_spec("numpy")
    for folder in (spec and spec.submodule_search_locations) or ():
        for part in (Path(folder), Path(folder).with_name("numpy.libs")):
            if part.is_dir():
                (site / part.name).symlink_to(part)
    env = os.environ | {"PYTHONPATH": str(site), "PYTHONNOUSERSITE": "1"}
    found = toolchain.ccache()
    if found is None:
        return env
    (scratch / "work").mkdir(mode=0o700)
    env.setdefault("CMAKE_C_COMPILER_LAUNCHER", found.path)
    env.setdefault("CMAKE_CXX_COMPILER_LAUNCHER", found.path)
    env.setdefault("CCACHE_DIR", str(paths.cache / "ccache"))
    env.setdefault("CCACHE_MAXSIZE", "10G")
    # As in llamafork/build/make.py, whose objects are then found: src and build lie side by side there as well.
    return env | {
        "CCACHE_BASEDIR": str(scratch / "work" / "tree"),
        "CCACHE_NOHASHDIR": "1",
        "CCACHE_COMPILERCHECK": "content",
    }


def _ensure_whole(result: Path, names: Sequence[str]) -> None:
    found = json.loads((result / "record.json").read_text(encoding="utf-8"))
    for one in found["stages"]:
        if one["name"] in names and one["state"] != record.DONE:
            raise LlamaforkError(f"the rehearsal left out {one['name']}", why=one["why"], do="give it more --minutes")
