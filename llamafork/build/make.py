"""The build itself: snapshot, configure, compile, ask, publish. Each part can be interrupted and run again."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamafork import console, proc
from llamafork.build import bundle, check, store
from llamafork.build.request import Plan, bounded_jobs, decides_nothing
from llamafork.build.store import Build
from llamafork.errors import BuildError, EnvironmentFault
from llamafork.facts import memory
from llamafork.paths import Paths, write_atomic
from llamafork.source.git import Git

FIRST_ERROR = re.compile(
    r"(^.*?:\d+(?::\d+)?: (?:fatal )?error[: ].*|^.*\(\d+\): error[: ].*|^CMake Error.*|^nvcc fatal.*"
    r"|^c\+\+: fatal error.*|^.*undefined reference to.*|^ninja: (?:fatal|error).*)"
)
PROGRESS = re.compile(r"^\[(\d+)/(\d+)\]")


@dataclass(frozen=True)
class Places:
    """The folders of one configuration; they are a cache and may be deleted at any time."""

    root: Path
    log: Path

    @property
    def source(self) -> Path:
        return self.root / "src"

    @property
    def build(self) -> Path:
        return self.root / "build"


def make(plan: Plan, repo: Git, paths: Paths, *, again: bool = False) -> tuple[Build, bool]:
    """The finished build of *plan*, and whether it had to be made now. *again*: make it even if it is there."""
    ready = store.find(paths, plan.key)
    if ready is not None and not again:
        return ready, False
    where = _places(plan, paths)
    where.root.mkdir(parents=True, exist_ok=True)
    with proc.lock(where.root.parent / f"{where.root.name}.lock"):
        ready = store.find(paths, plan.key)
        if ready is not None and not again:
            return ready, False
        started = time.monotonic()
        where.log.unlink(missing_ok=True)
        snapshot(repo, plan.tree, where)
        configure(plan, where, paths)
        compile_(plan, where, paths)
        return publish(plan, where, paths, time.monotonic() - started), True


def _places(plan: Plan, paths: Paths) -> Places:
    # A fork and its twin never share a build folder: switching between them would recompile both.
    name = f"{plan.request.kind}-{plan.request.profile}-{plan.config_id}"
    return Places(paths.cache / "work" / name, paths.state / "logs" / f"build-{plan.key}.log")


def snapshot(repo: Git, tree: str, where: Places) -> None:
    """Bring the source folder to *tree*, touching only files that differ so that timestamps stay true."""
    index = where.root / "index"
    (where.root / "index.lock").unlink(missing_ok=True)
    where.source.mkdir(exist_ok=True)
    Git(repo.git_dir, where.source, index).run("read-tree", "--reset", "-u", tree)


def configure(plan: Plan, where: Places, paths: Paths) -> None:
    """Run CMake unless the folder is configured just so; a stamp with other arguments means a fresh folder."""
    stamp = where.root / "configured.json"
    text = json.dumps({"args": plan.args, "cmake": plan.tools.cmake, "generator": plan.tools.generator}, indent=1)
    if stamp.is_file() and (where.build / "CMakeCache.txt").is_file():
        if stamp.read_text(encoding="utf-8") == text:
            return
        if not _same_result(stamp, plan):
            console.say("the options changed: configuring from scratch")
            shutil.rmtree(where.build)
    elif where.build.exists():
        shutil.rmtree(where.build)
    stamp.unlink(missing_ok=True)
    command: list[str | Path] = [plan.tools.cmake, "-S", where.source, "-B", where.build, "-G", plan.tools.generator]
    if plan.tools.generator == "Ninja":
        command.append(f"-DCMAKE_MAKE_PROGRAM={plan.tools.ninja}")
    _tool("configure", [*command, *plan.args], where, environment(plan, where, paths))
    write_atomic(stamp, text)


def _same_result(stamp: Path, plan: Plan) -> bool:
    """Whether only the series hash, a launcher or the like differs: CMake handles that in the same folder."""

    def plain(args: Sequence[str]) -> list[str]:
        return [a for a in args if not decides_nothing(a) and not a.startswith("-DLLAMA_FORK_SERIES=")]

    try:
        old = json.loads(stamp.read_text(encoding="utf-8"))
        same = (old["cmake"], old["generator"]) == (plan.tools.cmake, plan.tools.generator)
        return same and plain(old["args"]) == plain(plan.args)
    except (ValueError, KeyError, TypeError):
        return False


def compile_(plan: Plan, where: Places, paths: Paths) -> None:
    asked = plan.request.jobs or asked_jobs()
    jobs = bounded_jobs(cores(), ram_gib(), cuda="cuda" in plan.request.backends, asked=asked)
    targets = [word for name in plan.request.targets for word in ("--target", name)]
    command: list[str | Path] = [plan.tools.cmake, "--build", where.build, "--parallel", str(jobs), *targets]
    _tool(f"compile ({jobs} jobs)", command, where, environment(plan, where, paths))


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def ram_gib() -> float:
    return memory.available() / (1 << 30)


def asked_jobs() -> int | None:
    """CMAKE_BUILD_PARALLEL_LEVEL, when it is a number of jobs."""
    named = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "").strip()
    return int(named) if re.fullmatch(r"0*[1-9][0-9]{0,5}", named, re.ASCII) else None


def environment(plan: Plan, where: Places, paths: Paths) -> dict[str, str]:
    """For CMake and the compilers: one compiler cache for all builds, with paths taken relative to this folder."""
    env = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(
            (
                "CMAKE_C_COMPILER_LAUNCHER",
                "CMAKE_CXX_COMPILER_LAUNCHER",
                "CMAKE_CUDA_COMPILER_LAUNCHER",
                "CMAKE_GENERATOR",
                "GIT_",
            )
        )
    }
    env["CCACHE_BASEDIR"] = str(where.root)
    env["CCACHE_NOHASHDIR"] = "1"
    env["CCACHE_COMPILERCHECK"] = "content"
    env.setdefault("CCACHE_DIR", str(paths.cache / "ccache"))
    env.setdefault("CCACHE_MAXSIZE", "10G")
    env["NINJA_STATUS"] = "[%f/%t] "
    for name in ("LANG", "LC_CTYPE", "LC_MESSAGES"):
        env.pop(name, None)
    env["LC_ALL"] = "C"  # the compiler cache keeps objects apart by locale, and error lines are read in English
    if "cuda" in plan.request.backends and plan.request.cuda_arch:
        env.pop("CUDAARCHS", None)
    return env


def _tool(name: str, command: list[str | Path], where: Places, env: dict[str, str]) -> None:
    with console.step(name) as step:

        def line(text: str) -> None:
            found = PROGRESS.match(text)
            if found:
                step.update(f"{found[1]}/{found[2]}")

        code = proc.stream(command, log=where.log, env=env, line=line)
        if code != 0:
            raise _explain(name, code, where.log)


def _explain(name: str, code: int, log: Path) -> Exception:
    text = log.read_text(encoding="utf-8", errors="replace")
    if _error_says(text, "No space left on device"):
        return EnvironmentFault(
            "no space left while building",
            why=f"see {log}",
            do="free some space (a build folder needs about 1 GiB), then run it again",
        )
    if _error_says(text, "Killed signal terminated program") or _error_says(text, "out of memory"):
        return EnvironmentFault(
            "the compiler ran out of memory",
            why=first_error(text) or f"see {log}",
            do="run again with fewer jobs: -j 1",
        )
    return BuildError(
        f"{name.split(' (')[0]} failed (exit {code})",
        why=first_error(text) or "no error line found",
        do=f"the whole log is {log}",
    )


def _error_says(text: str, phrase: str) -> bool:
    """Whether a line that reports an error has *phrase*; source lines that a compiler quotes do not count."""
    lines = (x for x in text.splitlines() if "error" in x.lower() and not re.match(r"\s*\d*\s*\|", x))
    return any(phrase.lower() in line.lower() for line in lines)


def first_error(text: str) -> str:
    """The first compiler, linker or CMake error of a log, with its file; for CMake the message that follows it."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if FIRST_ERROR.match(line):
            if line.startswith("CMake Error"):
                rest = [x.strip() for x in lines[number + 1 : number + 6] if x.strip()]
                return " ".join([line, *rest])[:500]
            return line.strip()[:500]
    return ""


def publish(plan: Plan, where: Places, paths: Paths, seconds: float) -> Build:
    """Copy programs and libraries, ask them what they can do, and rename the folder into place."""
    target = store.folder(paths) / plan.key
    staging = target.with_name(f".part-{plan.key}")
    if staging.exists():
        shutil.rmtree(staging)
    (staging / "bin").mkdir(parents=True)
    for file in _results(where.build / "bin"):
        shutil.copy2(file, staging / "bin" / file.name, follow_symlinks=False)
    if plan.tools.cuda_copy:
        bundle.bring(Path(plan.tools.cuda_lib), staging / "bin")
    answers = check.ask(staging / "bin", plan.request.backends, plan.build)
    log = where.log.read_text(encoding="utf-8", errors="replace")
    info = _info(plan, answers, where, seconds, _ui(plan, where, log))
    (staging / "build.json").write_text(json.dumps(info, indent=1) + "\n", encoding="utf-8")
    store.publish(staging, target)
    return Build(plan.key, target, info)


def _results(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.iterdir()) if folder.is_dir() else ():
        library = re.search(r"\.(so|dylib)(\.|$)", file.name)
        if file.is_symlink() or (file.is_file() and (library or os.access(file, os.X_OK))):
            yield file


def _ui(plan: Plan, where: Places, log: str) -> str:
    """What the server's web UI is: how its assets came, or none. Asked for and absent is a failed build."""
    generated = where.build / "tools" / "ui" / "ui.cpp"
    if not generated.is_file():
        return "none: the server was not built"
    if re.search(r"asset_0\b", generated.read_text(encoding="utf-8", errors="replace")[:20000]):
        return "made with npm" if plan.request.ui == "build" else _prebuilt(log, plan.build)
    if plan.request.ui == "build":
        said = [x for x in log.splitlines() if "UI:" in x]
        raise BuildError(
            "the web UI could not be made",
            why=said[-1].strip() if said else "npm gave no assets",
            do=f"see {where.log}; npm and a registry are needed, or use --ui none",
        )
    return "none: left out (--ui none)" if plan.request.ui == "none" else "none: no network for the prebuilt assets"


def _prebuilt(log: str, build: int) -> str:
    """Which assets came: upstream's script falls back to the newest when this build number has none."""
    tried = re.findall(r"UI: downloading from (\S+?):", log)
    if tried and tried[-1] != f"b{build}":
        return f"prebuilt assets of another build ({tried[-1]}): upstream has none of b{build}"
    return f"prebuilt assets of b{build}"


def _info(plan: Plan, answers: check.Answers, where: Places, seconds: float, ui: str) -> dict[str, object]:
    return {
        "schema": "llamafork.build/1",
        "key": plan.key,
        **plan.inputs,
        "cmake": plan.tools.cmake_version,
        "ccache": plan.tools.ccache,
        "ui_result": ui,
        "seconds": round(seconds, 1),
        "finished": time.time(),
        "version": answers.version,
        "devices": [{"name": name, "description": text} for name, text in answers.devices],
        "backend_results": answers.backends,
        "notes": [*plan.notes, *answers.notes],
        "log": str(where.log),
        "work": where.root.name,
    }
