"""What is compared, and where it runs: programs of some llama.cpp build, on a set of devices."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from llamafork import proc
from llamafork.build import store
from llamafork.build.check import DEVICE
from llamafork.errors import EnvironmentFault, UsageError
from llamafork.paths import Paths, show
from llamafork.run import client

# No place is a real GPU, and upstream offloads large batches to any that it sees, -ngl 0 or not.
HIDDEN = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}


@dataclass(frozen=True)
class Target:
    """A folder of programs; ``name`` is what reports call it."""

    name: str
    folder: Path

    def program(self, name: str) -> Path:
        path = self.folder / name
        if not os.access(path, os.X_OK):
            raise UsageError(
                f"{self.name} has no {name}",
                why=f"not in {show(self.folder)}",
                do=f"build it: --target {name}, or build everything",
            )
        return path


@dataclass(frozen=True)
class Place:
    """Devices and where the model's parts go. ``rpc``: how many RPC servers of the target's own build it needs."""

    name: str
    args: tuple[str, ...]
    devices: str = ""  # GGML_SIM_DEVICES
    rpc: int = 0


ALL, MOE = ("-ngl", "99"), ("-ngl", "99", "--cpu-moe")
TWO = "mem=2G;mem=1G"
PLACES = {
    place.name: place
    for place in (
        Place("cpu", ("-ngl", "0")),
        Place("sim", ALL, "1"),
        Place("sim-cpu-moe", MOE, "1"),
        Place("sim-part", ("-ngl", "2"), "1"),
        Place("sim2", (*ALL, "-ts", "2,1"), TWO),
        Place("sim2-cpu-moe", (*MOE, "-ts", "2,1"), TWO),
        Place("rpc2", ALL, rpc=2),
        Place("rpc2-cpu-moe", MOE, rpc=2),
    )
}


def twin_of(paths: Paths, ours: Target) -> Target:
    """The stock build like *ours*. Raises :class:`UsageError` when there is none."""
    build = store.find(paths, ours.name)
    if build is None:  # a folder of programs: whatever stock build is there
        return resolve(paths, "stock")
    found = store.twin(store.load_all(paths), build)
    if found is None or not store.alike(found, build):
        more = "".join(f" --backend {name}" for name in build.info.get("backends", []) if name != "cpu")
        more += "" if build.profile == "release" else f" --profile {build.profile}"
        raise UsageError(
            f"there is no stock build like {build.key}",
            why="another profile or other backends would be another comparison",
            do=f"llamafork build --stock{more}, or name B",
        )
    return Target(found.key, found.root / "bin")


def resolve(paths: Paths, word: str) -> Target:
    """A folder with programs of any llama.cpp tree, or what :func:`store.resolve` takes."""
    folder = Path(word).expanduser()
    for found in (folder / "bin", folder):
        if (found / "llama-server").is_file() or (found / "llama-bench").is_file():
            return Target(show(word), found.absolute())
    build = store.resolve(paths, word)
    return Target(build.key, build.root / "bin")


def places(words: Sequence[str]) -> list[Place]:
    """The places named; none named means all."""
    unknown = [word for word in words if word not in PLACES]
    if unknown:
        raise UsageError(f"no place is called {unknown[0]!r}", do=f"one of: {', '.join(PLACES)}")
    return [PLACES[word] for word in dict.fromkeys(words)] if words else list(PLACES.values())


def check_devices(place: Place, target: Target) -> None:
    """Upstream only warns when there is no device and it ignores ``-ngl``: then nothing would be compared at *place*.
    And it uses what it sees beside what a place names.

    Raises :class:`EnvironmentFault` unless *target* has the simulated devices of *place* and no others.
    """
    wanted = 1 + place.devices.count(";") if place.devices else 0
    names = ("llama-server", "llama-bench", "llama-results")
    program = next((name for name in names if os.access(target.folder / name, os.X_OK)), names[0])
    done = proc.run([target.program(program), "--list-devices"], env=environment(place), timeout=60)
    found = [match[1] for match in map(DEVICE.match, done.out.splitlines()) if match]
    others = [name for name in found if not name.startswith("SIM")]
    if others:
        raise EnvironmentFault(
            f"{target.name} sees a device that the place {place.name} has not",
            why=f"{', '.join(others)}: upstream would use it, whatever is asked for",
            do="compare builds without its backend, or hide it from them",
        )
    if len(found) != wanted:
        raise EnvironmentFault(
            f"{target.name} has no simulated devices for the place {place.name}",
            why=f"{len(found)} of {wanted} in its --list-devices; what ran there would run on the CPU",
            do="build it with --backend sim (a stock build too), or choose other places: --on cpu",
        )


def environment(place: Place, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """For a program at *place*: nothing of the user's that would change what is compared."""
    sim = {"GGML_SIM_DEVICES": place.devices, "GGML_SIM_CHECK": "1"} if place.devices else {}
    return {**proc.plain_environment(), **HIDDEN, "GGML_NO_BACKTRACE": "1", **sim, **(more or {})}


@contextmanager
def at(place: Place, target: Target) -> Iterator[tuple[str, ...]]:
    """The arguments that put a program at *place*; RPC servers live as long as the block."""
    with ExitStack() as stack:
        addresses = [stack.enter_context(_rpc_server(target)) for _ in range(place.rpc)]
        yield (*place.args, *(("--rpc", ",".join(addresses)) if addresses else ()))


@contextmanager
def _rpc_server(target: Target) -> Iterator[str]:
    port = client.free_port()
    command: list[str | Path] = [target.program("ggml-rpc-server"), "-H", "127.0.0.1", "-p", str(port), "-t", "1"]
    nowhere = subprocess.DEVNULL
    with proc.kept(command, env=environment(PLACES["cpu"]), stdout=nowhere, stderr=nowhere) as server:
        try:
            _await(port, server)
            yield f"127.0.0.1:{port}"
        finally:
            server.kill()


def _await(port: int, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return
        except OSError:
            time.sleep(0.05)
    raise EnvironmentFault("an RPC server on this machine did not come up", why=f"exit {server.poll()}")
