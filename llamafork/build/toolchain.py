"""Finding the tools of a build and refusing unfit ones before anything is configured."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from llamafork import console, proc
from llamafork.errors import EnvironmentFault

MINIMUM = {"cmake": "3.18", "gcc": "9.0", "clang": "10.0", "nvcc": "11.7", "ccache": "4.4"}
NATIVE_CMAKE = Version("3.24")  # the first that understands CMAKE_CUDA_ARCHITECTURES=native


@dataclass(frozen=True)
class Program:
    path: str
    version: str

    def __str__(self) -> str:
        return f"{self.path} ({self.version})"


def version_of(path: str) -> str:
    """The first dotted number of ``--version``, or "" when the program does not answer."""
    try:
        done = proc.run([path, "--version"], timeout=20)
    except EnvironmentFault:
        return ""
    text = done.out + done.err
    # nvcc prints its year before its release
    found = re.search(r"release (\d+\.\d+)", text) or re.search(r"(\d+\.\d+(?:\.\d+)?)", text)
    return found[1] if found and done.ok else ""


def new_enough(version: str, minimum: str) -> bool:
    try:
        return Version(version) >= Version(minimum)
    except InvalidVersion:
        return False


def candidates(name: str, module: str = "") -> Iterator[str]:
    """Paths to try: the system's first, then what a wheel put beside this Python or inside its *module*.

    This Python's own folder is left out of the first look, so that an activated environment changes nothing.
    """
    beside = Path(sys.executable).parent
    elsewhere = [d for d in os.environ.get("PATH", "").split(os.pathsep) if d and Path(d) != beside]
    seen = [shutil.which(name, path=os.pathsep.join(elsewhere)), str(beside / name)]
    spec = importlib.util.find_spec(module) if module else None
    seen += [str(Path(base) / "data" / "bin" / name) for base in (spec and spec.submodule_search_locations) or ()]
    for path in dict.fromkeys(p for p in seen if p):
        if os.access(path, os.X_OK):
            yield path


def best(name: str, module: str = "") -> Program:
    """The first candidate that is new enough; otherwise a fault that names what was found and how to get better."""
    minimum, seen = MINIMUM[name], []
    for path in candidates(name, module):
        program = Program(path, version_of(path))
        if program.version and new_enough(program.version, minimum):
            return program
        seen.append(str(program))
    what = f"{name} {minimum} or newer is needed"
    how = f"pip install {name}" if module else f"install {name}"
    raise EnvironmentFault(what, why=f"found: {', '.join(seen)}" if seen else f"no {name} on PATH", do=how)


def generator() -> tuple[str, str]:
    """(CMake generator, its program): Ninja when there is one (system or wheel), else Makefiles."""
    chosen = os.environ.get("CMAKE_GENERATOR")
    ninja = next((p for p in candidates("ninja", "ninja") if version_of(p)), "")
    if chosen and chosen != "Ninja":
        return chosen, ""
    if ninja:
        return "Ninja", ninja
    make = shutil.which("make")
    if make is None:
        raise EnvironmentFault("neither ninja nor make is there", why="CMake needs one of them", do="pip install ninja")
    return "Unix Makefiles", make


def compilers() -> tuple[str, str, str]:
    """(C compiler, C++ compiler, identity). CC and CXX are respected; an old or missing compiler is a fault."""
    cc = _compiler("CC", ("cc", "gcc", "clang"))
    cxx = _compiler("CXX", ("c++", "g++", "clang++"))
    done = proc.run([cxx, "--version"], timeout=20)
    first = (done.out.splitlines() or ["?"])[0]
    family = "clang" if "clang" in first.lower() else "gcc"
    found = re.search(r"(\d+\.\d+(?:\.\d+)?)(?!.*\d+\.\d+\.\d+)", first)
    if found and not new_enough(found[1], MINIMUM[family]):
        raise EnvironmentFault(
            f"{cxx} is too old for llama.cpp",
            why=f"{first}; the least is {MINIMUM[family]}",
            do=f"install a newer {family}, or set CC and CXX",
        )
    machine = proc.run([cxx, "-dumpmachine"], timeout=20).out.strip()
    digest = hashlib.sha256(Path(cxx).resolve().read_bytes()).hexdigest()[:12]
    return cc, cxx, f"{first} | {machine} | {digest}"


def _compiler(variable: str, names: tuple[str, ...]) -> str:
    asked = os.environ.get(variable)
    for name in (asked,) if asked else names:
        found = shutil.which(name)
        if found:
            return found
    raise EnvironmentFault(
        f"no C++ compiler: {asked or names[0]} is not there",
        why=f"{variable}={asked}" if asked else "none of " + ", ".join(names) + " is on PATH",
        do="install one (Debian: apt-get install g++), or set CC and CXX",
    )


def ccache() -> Program | None:
    """ccache from PATH or from its wheel; None (with the reason said) when there is none that is new enough."""
    try:
        return best("ccache")
    except EnvironmentFault as fault:
        console.detail(f"compiling without a compiler cache: {fault.why}")
        return None


def openssl(cc: str) -> bool:
    """Whether the headers that https downloads need can be included."""
    done = proc.run([cc, "-E", "-x", "c", "-"], stdin="#include <openssl/ssl.h>\n", timeout=20)
    return done.ok


def native_cpu(cxx: str) -> str:
    """What ``-march=native`` means here, as a hash: two machines that differ in it must not share a build."""
    done = proc.run([cxx, "-march=native", "-Q", "--help=target"], timeout=20)
    text = done.out if done.ok else "".join(x for x in _cpuinfo() if x.startswith(("flags", "model name", "Features")))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()[:40]
    except OSError:
        return [f"machine {os.uname().machine}"]
