"""Asking a finished build what it is and what it can do, before it is called finished."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llamafork import proc
from llamafork.errors import BuildError

GPU_BACKENDS = ("cuda", "vulkan", "hip", "metal", "sim")
PREFIX = {"cuda": "CUDA", "vulkan": "Vulkan", "hip": "ROCm", "metal": "M", "sim": "SIM"}
WHY_NONE = re.compile(r"((?:ggml_\w+: )?(?:failed to initialize|no CUDA|no devices?).*)")
DEVICE = re.compile(r"^\s{2,}(\S+): (.+?)(?: \((\d+) MiB, (\d+) MiB free\))?$")


@dataclass(frozen=True)
class Answers:
    """What the programs said: version text, devices as (name, description), and per backend a line about it."""

    version: str
    devices: tuple[tuple[str, str], ...]
    backends: dict[str, str]
    notes: tuple[str, ...]


def program_env() -> dict[str, str]:
    """The environment for asking: loader paths and upstream's own variables must not decide the answer."""
    return {
        k: v
        for k, v in os.environ.items()
        if k not in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH") and not k.startswith(("LLAMA_ARG_", "GGML_SIM_"))
    } | {"GGML_SIM_DEVICES": "1"}  # a build with the simulation is asked for a device of it; others do not read this


def unresolved(folder: Path) -> list[str]:
    """Libraries that programs in *folder* need and the loader does not find, by name."""
    ldd = shutil.which("ldd")
    if ldd is None:
        return []
    files = [p for p in sorted(folder.iterdir()) if p.is_file() and not p.is_symlink() and os.access(p, os.X_OK)]
    missing: set[str] = set()
    for file in files:
        done = proc.run([ldd, file], env=program_env(), timeout=30)
        missing |= {line.split()[0] for line in done.out.splitlines() if "not found" in line}
    return sorted(missing)


def ask(folder: Path, backends: Sequence[str], build: int) -> Answers:
    """Run the programs. :class:`BuildError` when one cannot start, names another build, or lacks a backend."""
    missing = unresolved(folder)
    if missing:
        raise BuildError(
            f"the built programs do not find {', '.join(missing)}",
            why="a library is not where it was linked",
            do="install it, or remove what needs it with -C",
        )
    program = next((folder / n for n in ("llama-server", "llama-cli", "llama-bench") if (folder / n).is_file()), None)
    if program is None:
        return Answers("", (), {}, ("no program to ask: only some targets were built",))
    version = _run(program, "--version", required=True)
    number = re.search(r"build (\d+)", version)
    if number is None or int(number[1]) != build:
        raise BuildError(
            f"{program.name} calls itself build {number[1] if number else '?'}, not {build}",
            why="the stamp was lost",
            do="remove -C arguments that set LLAMA_BUILD_NUMBER",
        )
    listing = _run(program, "--list-devices", required=False)
    devices = tuple((m[1], m[2]) for m in map(DEVICE.match, listing.splitlines()) if m)
    said = {name: _backend(folder, name, devices, listing) for name in backends if name != "cpu"}
    notes = tuple(f"{name}: {text}" for name, text in said.items() if name in GPU_BACKENDS and "no device" in text)
    return Answers(_clean(version), devices, said, notes)


def _run(program: Path, flag: str, *, required: bool) -> str:
    done = proc.run([program, flag], env=program_env(), timeout=120)
    if required and not done.ok:
        raise BuildError(
            f"{program.name} {flag} fails",
            why=(done.err or done.out).strip()[-300:] or f"exit {done.code}",
            do="llamafork doctor",
        )
    return done.out + done.err


def _clean(version: str) -> str:
    return "\n".join(x for x in version.splitlines() if x.startswith(("version:", "built with", "llamafork")))


def _backend(folder: Path, name: str, devices: Sequence[tuple[str, str]], listing: str) -> str:
    linked = list(folder.glob(f"libggml-{name}.*"))
    if not linked:
        raise BuildError(
            f"backend {name} was asked for and is not in the result",
            why=f"no libggml-{name} was built",
            do="see the log for what CMake said about it",
        )
    if name not in GPU_BACKENDS:
        return "built"
    mine = [d for d, _ in devices if d.startswith(PREFIX[name])]
    if mine:
        return f"built; devices: {', '.join(mine)}"
    if name == "sim":
        raise BuildError("the simulated devices do not show up", why="--list-devices with GGML_SIM_DEVICES=1 has none")
    said = next((m[1] for m in map(WHY_NONE.search, listing.splitlines()) if m), "")
    return f"built; no device of it on this machine{f' ({said})' if said else ''}"


def without_device(folder: Path, backends: Sequence[str]) -> list[str]:
    """For each GPU backend that a build has and this machine has no device for: a line that says so.

    Programs then run on the CPU, slowly and without a word; whoever starts them has to be told.
    """
    wanted = [name for name in backends if name in GPU_BACKENDS]
    program = next((folder / n for n in ("llama-server", "llama-cli", "llama-bench") if (folder / n).is_file()), None)
    if not wanted or program is None:
        return []
    listing = _run(program, "--list-devices", required=False)
    devices = tuple((m[1], m[2]) for m in map(DEVICE.match, listing.splitlines()) if m)
    said = {name: _backend(folder, name, devices, listing) for name in wanted}
    return [f"{name} is {text}; this will run on the CPU" for name, text in said.items() if "no device" in text]
