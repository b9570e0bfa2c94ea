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
from itertools import pairwise
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
    """Milliseconds a token; 0 where nothing was cached.

    ``rest``: what is in neither branch; ``longer``: the longer branch of each layer and token, summed. Of all layers
    but the last, from which the host returns before the device is done: ``cycles``, from the launch of a hit branch
    to the next one's; ``between``, what of that is in neither branch; ``longest``, the longer branches.
    """

    tokens: int = 0
    rest: float = 0.0
    hits: float = 0.0
    misses: float = 0.0
    longer: float = 0.0
    cycles: float = 0.0
    between: float = 0.0
    longest: float = 0.0
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
        """Wall time of the cached layers over that of their longer branches.

        What is between layers, attention above all, is waited for in both modes and taken from the serial one.
        """
        return self.wall / self.serial.longest if self.serial.longest else float("inf")

    @property
    def wall(self) -> float:
        """Of the cached layers but the last, in milliseconds a token."""
        return self.both.cycles - self.serial.between


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
    """The sums over all tokens. A cached layer is a split of hits and one of misses; the next begins with their sum."""
    count, sums = 0, dict.fromkeys(("rest", "hits", "misses", "longer", "cycles", "between", "longest", "graph"), 0.0)
    for runs, graph in found:
        count += runs
        splits: Sequence[Graph] = graph["splits"]
        layers = [at for at, one in enumerate(splits) if at and one["first"].startswith(MISSES)]
        hits, misses = [splits[at - 1]["ns"] for at in layers], [splits[at]["ns"] for at in layers]
        longer = [max(pair) for pair in zip(hits, misses, strict=True)]
        sums["graph"] += graph["ns"]
        sums["hits"] += sum(hits)
        sums["misses"] += sum(misses)
        sums["longer"] += sum(longer)
        sums["longest"] += sum(longer[:-1])
        sums["rest"] += sum(one["ns"] + _copies(one) for one in splits) - sum(hits) - sum(misses)
        for at, after in pairwise(layers):
            between = sum(one["ns"] for one in splits[at + 1 : after - 1])
            between += sum(_copies(one) for one in splits[at + 1 : after + 1])
            waits = splits[at]["wait_ns"] + sum(one["wait_ns"] for one in splits[at + 1 : after])
            sums["between"] += between
            sums["cycles"] += between + waits + splits[at - 1]["ns"] + splits[at]["ns"]
    return Branches(count, **{name: ns / 1e6 / max(1, count) for name, ns in sums.items()})


def _copies(split: Graph) -> int:
    return sum(part["ns"] for part in split["inputs"])


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


class Session:
    """Four servers of A, asked now and then; without a cache A is stock, as the identity suite shows."""

    def __init__(self, stack: ExitStack, ours: Target, at: CachePlace, model: Path, size: Size, scratch: Path) -> None:
        known, fixed = modes(at), {"LLAMA_MOE_CACHE_DETERMINISTIC": "1"}
        sides: dict[str, tuple[Mode, str, Mapping[str, str]]] = {
            "stock": (known[CPU_MOE], SERIAL, {}),
            "fork": (known[CACHE], SERIAL, {}),
            "serial": (known[CACHE], SERIAL, fixed),
            "both": (known[CACHE], HOST, fixed),
        }
        self.decode, self.walls, self.begin = size.decode, list[float](), dict[str, Counters]()
        self.files = {name: scratch / f"{name}.jsonl" for name in sides}
        self.live: dict[str, Client] = {}
        self.ended = stack.enter_context(ExitStack())
        for name, (mode, prof, more) in sides.items():
            env = {"GGML_SCHED_PROF": prof, "GGML_SCHED_PROF_FILE": str(self.files[name]), **more}
            log = scratch / f"{name}.log"
            server = self.ended.enter_context(serving(ours, mode, at, model, log, env, None))
            touch(server)
            if mode.cached:
                # those that decide by the experts alone are soon full, and both have to do the same
                before = size.warm[0] if name == "fork" else size.warm[0] // 2
                warm_up(server, before, before)
                self.begin[name] = counters(server)
            server.process.send_signal(signal.SIGUSR1)  # what was before is not counted
            ask(server, 2, 1)
            self.live[name] = server

    def turn(self, number: int) -> None:
        for name in turned(list(self.live), number):
            with poked(self.live[name]) if name in ("fork", "serial") else ExitStack():
                took = ask(self.live[name], self.decode, 20_000 + number)
            if name == "stock":
                self.walls.append(took)

    def result(self) -> Profile:
        """Ends the servers. Raises :class:`UnhealthyError` when they have written no profile."""
        rates = {name: (counters(self.live[name]) - before).rate for name, before in self.begin.items()}
        self.ended.close()
        found = {name: branches(tokens(_lines(file))) for name, file in self.files.items()}
        if not all(one.tokens for one in found.values()) or not found["fork"].longer:
            raise UnhealthyError("GGML_SCHED_PROF shows no branches", why="no graph of one token has hits and misses")
        outside = max(0.0, sum(self.walls) / len(self.walls) - found["stock"].graph)
        return Profile(**found, outside=outside, rate=rates["fork"], rates=(rates["serial"], rates["both"]))


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
