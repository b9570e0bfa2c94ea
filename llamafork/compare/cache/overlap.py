"""Times of the two branches of cached layers, from GGML_SCHED_PROF (docs/profiling.md).

Serial, each split has its own time: of hits, of misses, and of the rest. If they overlapped fully, a layer would take
the longer of the two. That is taken for each token and layer by itself and not for their means: with one miss the host
is as slow as the device, with none the device alone counts. So the profile is printed after each graph, which a signal
asks for, and differences of prints are tokens.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamafork.compare.cache.servers import (
    CACHE,
    CPU_MOE,
    Counters,
    Mode,
    ask,
    counters,
    modes,
    serving,
    touch,
    turned,
    warm_up,
)
from llamafork.compare.cache.work import CachePlace, Size
from llamafork.compare.target import Target
from llamafork.errors import UnhealthyError
from llamafork.run.client import Client

MISSES, SLOTS = "ffn_moe_misses", "ffn_moe_slots"  # first nodes of a miss and of a hit branch
POKE_SECONDS = 0.002
SERIAL, HOST = "2", "1"


@dataclass(frozen=True)
class Branches:
    """Milliseconds a token. ``rest``: what is in neither branch; ``longer``: the longer branch of each layer and
    token, summed; ``walls``: from the launch of a hit branch until both results are there; 0 where nothing was cached.
    """

    tokens: int = 0
    rest: float = 0.0
    hits: float = 0.0
    misses: float = 0.0
    longer: float = 0.0
    walls: float = 0.0
    graph: float = 0.0  # all of it, with what the profiler costs


@dataclass(frozen=True)
class Profile:
    """``stock``: serial, cache off; ``fork``: serial, at the hit rate ``rate``; ``serial`` and ``both``: with a cache
    that decides by the experts alone, so that the same ones hit, serial and overlapping. ``outside``: milliseconds a
    token that the server spends beside the graph, without a cache.
    """

    stock: Branches
    fork: Branches
    serial: Branches
    both: Branches
    outside: float
    rate: float
    rates: tuple[float, float]  # of serial and both

    @property
    def expected(self) -> float:
        """How many times as fast as stock with all experts on the host, if branches overlap fully."""
        return (self.stock.rest + self.outside) / (self.fork.rest + self.fork.longer + self.outside)

    @property
    def overlap(self) -> float:
        """Wall time of the cached layers over that of their longer branches."""
        return self.both.walls / self.serial.longer if self.serial.longer else float("inf")


Graph = Mapping[str, Any]


def tokens(lines: Iterable[str]) -> Iterator[tuple[int, Graph]]:
    """Runs of graphs of one token since the first print: how many of one graph, and its sums over them."""
    prints: dict[tuple[int, int], list[Graph]] = {}
    for line in lines:
        with suppress(ValueError):  # a line may be torn where a program was stopped
            graph = json.loads(line)
            prints.setdefault((graph["scheduler"], graph["print"]), []).append(graph)
    before: dict[tuple[int, ...], Graph] = {}
    for number in sorted(prints):
        first = number[1] == 0
        for graph in prints[number]:
            key = (number[0], graph["batch"], graph["n_splits"], graph["n_nodes"])
            runs = graph["runs"] - (before[key]["runs"] if key in before else 0)
            if not first and runs > 0 and graph["batch"] == 1:
                yield runs, _minus(graph, before.get(key))
            before[key] = graph


def _minus(graph: Graph, before: Graph | None) -> Graph:
    splits = []
    for at, split in enumerate(graph["splits"]):
        old: Graph = before["splits"][at] if before else {"ns": 0, "wait_ns": 0, "inputs": []}
        was = {(one["src"], one["name"]): one["ns"] for one in old["inputs"]}
        inputs = [{**one, "ns": one["ns"] - was.get((one["src"], one["name"]), 0)} for one in split["inputs"]]
        splits.append({**split, "ns": split["ns"] - old["ns"], "wait_ns": split["wait_ns"] - old["wait_ns"],
                       "inputs": inputs})  # fmt: skip
    return {**graph, "ns": graph["ns"] - (before["ns"] if before else 0), "splits": splits}


def branches(found: Iterable[tuple[int, Graph]]) -> Branches:
    """The sums over all tokens. A cached layer is three splits in a row: hits, misses, their sum."""
    count, sums = 0, dict.fromkeys(("rest", "hits", "misses", "longer", "walls", "graph"), 0.0)
    for runs, graph in found:
        count += runs
        sums["graph"] += graph["ns"]
        splits: Sequence[Graph] = graph["splits"]
        sums["rest"] += sum(one["ns"] + sum(part["ns"] for part in one["inputs"]) for one in splits)
        for hit, miss, both in zip(splits, splits[1:], splits[2:], strict=False):
            if miss["first"].startswith(MISSES) and hit["first"].startswith(SLOTS):
                up = sum(part["ns"] for part in both["inputs"] if part["name"] == miss["last"])
                sums["hits"] += hit["ns"]
                sums["misses"] += miss["ns"]
                sums["longer"] += max(hit["ns"], miss["ns"])
                sums["walls"] += hit["ns"] + miss["wait_ns"] + miss["ns"] + both["wait_ns"] + up
                sums["rest"] -= hit["ns"] + miss["ns"]
    return Branches(count, **{name: ns / 1e6 / max(1, count) for name, ns in sums.items()})


@contextmanager
def poked(server: Client) -> Iterator[None]:
    """Ask for prints again and again: the profiler prints at the end of each graph then."""
    done = threading.Event()

    def poke() -> None:
        while not done.wait(POKE_SECONDS):
            server.process.send_signal(signal.SIGUSR1)

    thread = threading.Thread(target=poke, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def run(ours: Target, at: CachePlace, model: Path, size: Size, scratch: Path) -> Profile:
    """Four servers of A in turns; without a cache it is stock, as the identity suite shows."""
    known = modes(at)
    fixed = {"LLAMA_MOE_CACHE_DETERMINISTIC": "1"}
    sides: dict[str, tuple[Mode, str, Mapping[str, str]]] = {
        "stock": (known[CPU_MOE], SERIAL, {}),
        "fork": (known[CACHE], SERIAL, {}),
        "serial": (known[CACHE], SERIAL, fixed),
        "both": (known[CACHE], HOST, fixed),
    }
    walls: list[float] = []
    rates: dict[str, Counters] = {}
    with ExitStack() as stack:
        live = {}
        for name, (mode, prof, more) in sides.items():
            file = {"GGML_SCHED_PROF": prof, "GGML_SCHED_PROF_FILE": str(scratch / f"{name}.jsonl"), **more}
            live[name] = stack.enter_context(serving(ours, mode, at, model, scratch / f"{name}.log", file, None))
            touch(live[name])
            if mode.cached:
                warm_up(live[name], size.warm[0], size.warm[0])  # the same work for both that decide by experts alone
                rates[name] = counters(live[name])
            live[name].process.send_signal(signal.SIGUSR1)  # what was before is not counted
            ask(live[name], 2, 1)
        for turn in range(2 * size.profile):
            for name in turned(list(sides), turn):
                with poked(live[name]) if name in ("fork", "serial") else ExitStack():
                    took = ask(live[name], size.decode, 20_000 + turn)
                if name == "stock":
                    walls.append(took)
        for name in rates:
            rates[name] = counters(live[name]) - rates[name]
    found = {name: branches(tokens((scratch / f"{name}.jsonl").read_text().splitlines())) for name in sides}
    if not all(one.tokens for one in found.values()) or not found["fork"].longer:
        raise UnhealthyError("GGML_SCHED_PROF shows no branches", why="no graph of one token has hits and misses")
    outside = max(0.0, sum(walls) / len(walls) - found["stock"].graph)
    return Profile(**found, outside=outside, rate=rates["fork"].rate,
                   rates=(rates["serial"].rate, rates["both"].rate))  # fmt: skip
