"""Stages build and stock: both trees in one folder, one after the other, so that what is the same is compiled once."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from gpu_check import archive, toolkit
from gpu_check.programs import Done, checked
from gpu_check.stage import Context, Outcome
from llamafork.errors import BuildError, EnvironmentFault

TARGETS = ("llama-bench", "llama-perplexity", "llama-server", "llama-results", "test-backend-ops")
IF_THERE = {"test-expert-cache": "tests/test-expert-cache.cpp"}  # target, and the file that shows it is in the tree
FIRST_ERROR = re.compile(
    r"^(.*: (?:fatal )?error[: ].*|.*\(\d+\): error[: ].*|CMake Error.*|nvcc fatal.*|.*undefined reference to.*)$",
    re.MULTILINE,
)
LAUNCHER = "CMAKE_CXX_COMPILER_LAUNCHER"  # CMake reads it; with a compiler cache, only what is new is compiled
# Core seconds to compile everything (docs/measurements), and what differs in the twin; configuring and linking besides.
WHOLE = {"cuda": 5300.0, "sim": 1300.0}
TWIN = {"cuda": 240.0, "sim": 60.0}


def fork(ctx: Context) -> Outcome:
    return _build(ctx, "fork")


def stock(ctx: Context) -> Outcome:
    return _build(ctx, "stock")


def fork_cost(ctx: Context) -> float:
    if _kept(ctx, "fork"):
        return 1.0
    warm = os.environ.get(LAUNCHER) or (ctx.work / "tree" / "build" / "bin").is_dir()
    return 30 + (60 if warm else WHOLE[_backend(ctx)] / _jobs(ctx))


def stock_cost(ctx: Context) -> float:
    return 1.0 if _kept(ctx, "stock") else 15 + TWIN[_backend(ctx)] / _jobs(ctx)


def _backend(ctx: Context) -> str:
    return ctx.options.backend


def _jobs(ctx: Context) -> int:
    return ctx.options.jobs


def _build(ctx: Context, kind: str) -> Outcome:
    if _kept(ctx, kind):
        numbers = json.loads(_stamp(ctx, kind).read_text(encoding="utf-8"))
        return Outcome("kept from an earlier run: nothing changed", numbers | {"kept": True})
    kit = toolkit.find() if _backend(ctx) == "cuda" else None
    source, build = ctx.work / "tree" / "src", ctx.work / "tree" / "build"
    source.mkdir(parents=True, exist_ok=True)
    files = ctx.archive.source(kind, _backend(ctx))
    changed = archive.sync(source, files)
    targets = [*TARGETS, *(name for name, file in IF_THERE.items() if file in files)]
    configured = _configure(ctx, kind, build, arguments(ctx, kit))
    shutil.rmtree(build / "bin", ignore_errors=True)  # else libraries of the other tree would be taken along
    words = [word for name in targets for word in ("--target", name)]
    command: list[str | Path] = [_cmake(), "--build", build, "--parallel", str(_jobs(ctx)), *words]
    compiled = ctx.run(command, env=_compiling(ctx))
    _explain("compiling", compiled)
    _take(build / "bin", ctx.programs(kind), targets, _backend(ctx))
    numbers = {
        "files_changed": changed,
        "targets": targets,
        "configure_s": round(configured.seconds, 1),
        "compile_s": round(compiled.seconds, 1),
        "cmake": [word for word in configured.args if word.startswith("-D") and "/" not in word],
        "jobs": _jobs(ctx),
        **(kit.facts if kit else {}),
    }
    text = json.dumps(numbers | {"identity": _identity(ctx, kind)})
    archive.replace(_stamp(ctx, kind), text.encode())
    return Outcome(f"{len(targets)} programs for {_backend(ctx)}, {changed} files changed", numbers)


def _identity(ctx: Context, kind: str) -> list[object]:
    source = archive.digest(ctx.archive.source(kind, _backend(ctx)))
    return [source, _backend(ctx), ctx.options.arch, list(ctx.options.cmake)]


def _stamp(ctx: Context, kind: str) -> Path:
    return ctx.programs(kind) / "build.json"


def _kept(ctx: Context, kind: str) -> bool:
    """A machine that is still warm has the build of the run before."""
    try:
        found = json.loads(_stamp(ctx, kind).read_text(encoding="utf-8"))
        return bool(found["identity"] == _identity(ctx, kind))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _cmake() -> str:
    found = shutil.which("cmake")
    if found is None:
        raise EnvironmentFault("no cmake is here", why="it is not on PATH", do="install it")
    return found


def _configure(ctx: Context, kind: str, build: Path, args: Sequence[str]) -> Done:
    stamp = ctx.work / "tree" / "configured.json"
    text = json.dumps(args)
    if build.exists() and (not stamp.is_file() or stamp.read_text(encoding="utf-8") != text):
        shutil.rmtree(build)
    archive.replace(stamp, text.encode())
    series = [f"-DLLAMA_FORK_SERIES={ctx.archive.manifest['series']}"] if kind == "fork" else []
    ninja = ["-G", "Ninja"] if shutil.which("ninja") else []
    command: list[str | Path] = [_cmake(), "-S", build.with_name("src"), "-B", build, *ninja, *args, *series]
    done = ctx.run(command, most=180, env=_compiling(ctx))
    _explain("configuring", done)
    return done


def arguments(ctx: Context, kit: toolkit.Toolkit | None) -> list[str]:
    """What CMake is told for both trees: as `llamafork build --backend rpc --backend …`, and the tests."""
    pin = ctx.archive.manifest["pin"]["build"]
    words = [
        *("-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON", "-DBUILD_SHARED_LIBS=ON"),
        *(f"-DLLAMA_BUILD_NUMBER={pin}", f"-DLLAMA_BUILD_COMMIT=b{pin}", "-DLLAMA_BUILD_TESTS=ON"),
        *("-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),
        *("-DGGML_NATIVE=ON", "-DGGML_CCACHE=OFF", "-DGGML_RPC=ON"),
    ]
    words += kit.args(ctx.options.arch) if kit else ["-DGGML_CUDA=OFF", "-DGGML_SIM=ON"]
    rpath = ";".join(["$ORIGIN", *map(str, kit.libraries if kit else ())])
    return [*words, f"-DCMAKE_INSTALL_RPATH={rpath}", *ctx.options.cmake]


def _compiling(ctx: Context) -> dict[str, str]:
    """The user's environment, so that a compiler cache named there is used. It keeps objects apart by locale, and
    we look for errors in English.
    """
    plain = {name: value for name, value in os.environ.items() if name not in ("LANG", "LC_CTYPE", "LC_MESSAGES")}
    return plain | {"LC_ALL": "C", "NINJA_STATUS": "[%f/%t %e s] "}


def _explain(what: str, done: Done) -> None:
    if not done.ok and not done.late:
        said = FIRST_ERROR.search(done.out + done.err)
        raise BuildError(f"{what} failed (exit {done.code})", why=(said[0].strip()[:400] if said else done.last))
    checked(done)


def _take(made: Path, target: Path, targets: Sequence[str], backend: str) -> None:
    """Programs and libraries into a folder of their own. What was asked for and is not there is a failed build."""
    missing = [name for name in targets if not (made / name).is_file()]
    if not any(made.glob(f"libggml-{backend}.*")):
        missing.append(f"libggml-{backend}")
    if missing:
        raise BuildError(f"the build did not make {', '.join(missing)}", why="CMake and the compiler reported no error")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(made, target, symlinks=True)
