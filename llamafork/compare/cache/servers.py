"""Servers of all modes, alive at the same time and asked in turns; what the cache says of itself beside the times."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llamafork import proc
from llamafork.compare.cache.work import USED, CachePlace, Size
from llamafork.compare.speed import Pair, cores_for, on_cores
from llamafork.compare.target import Target, environment
from llamafork.errors import UnhealthyError, UsageError
from llamafork.run import client
from llamafork.run.client import Client

COMMON = ("-t", "1", "-c", "1024", "-ub", "64", "-np", "1", "--no-warmup")
WINDOW, STEADY = 128, 0.05  # tokens of a look at the hit rate, and how little it changes then
AGREE_SECONDS = 0.05
CACHE, SMALL, CPU_MOE, FIT = "cache", "small", "cpu-moe", "fit"


@dataclass(frozen=True)
class Mode:
    """``ours``: a program of A, otherwise of B."""

    name: str
    ours: bool
    words: tuple[str, ...]

    @property
    def cached(self) -> bool:
        return "--moe-expert-cache" in self.words


def modes(at: CachePlace) -> dict[str, Mode]:
    """All modes leave the same memory of each device free."""
    hosted = ("-ngl", "99", "--cpu-moe", "--fit", "off", *at.split)
    return {mode.name: mode for mode in (
        Mode(CACHE, True, (*hosted, "--moe-expert-cache", "-1")),
        Mode(SMALL, True, (*hosted, "--moe-expert-cache", str(USED + 1))),
        Mode(CPU_MOE, False, hosted),
        Mode(FIT, False, ("--fit", "on", "-fitt", str(at.margin))),
    )}  # fmt: skip


@dataclass(frozen=True)
class Counters:
    """Of the cache, since its start. ``upload_us``: how long uploads took, over all devices."""

    hits: int = 0
    misses: int = 0
    uploads: int = 0
    upload_us: int = 0
    steps: int = 0

    def __sub__(self, other: Counters) -> Counters:
        mine, theirs = asdict(self), asdict(other)
        return Counters(**{name: mine[name] - theirs[name] for name in mine})

    def __add__(self, other: Counters) -> Counters:
        mine, theirs = asdict(self), asdict(other)
        return Counters(**{name: mine[name] + theirs[name] for name in mine})

    @property
    def rate(self) -> float:
        return self.hits / max(1, self.hits + self.misses)

    @property
    def per_upload(self) -> float:
        return self.hits / max(1, self.uploads)


@dataclass
class Round:
    """Milliseconds a token by mode: of the ``cold`` first tokens, and of each turn (``times``)."""

    cold: dict[str, float] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)  # of the cache over the turns
    cache_ms: float = 0.0
    warm: int = 0  # tokens before the turns
    slots: list[int] = field(default_factory=list)  # a layer, by device


def check_cache(target: Target) -> None:
    """Raises :class:`UsageError` if the server of *target* knows no expert cache."""
    said = proc.run([target.program("llama-server"), "--help"], timeout=60)
    if "--moe-expert-cache" not in said.out + said.err:
        raise UsageError(f"{target.name} has no expert cache", why="its llama-server knows no --moe-expert-cache",
                         do="name a build of the fork as A")  # fmt: skip


@contextmanager
def serving(
    target: Target, mode: Mode, at: CachePlace, model: Path, log: Path, more: Mapping[str, str], cores: set[int] | None
) -> Iterator[Client]:
    """A server of *mode*. Raises :class:`UnhealthyError` when its cache is not active."""
    env = environment(at.place, {**at.env, "LLAMA_MOE_CACHE_MARGIN_MB": str(at.margin), **more})
    command: list[str | Path] = [target.program("llama-server"), "-m", model, *COMMON, *mode.words, *at.place.args]
    with ExitStack() as stack:
        with on_cores(cores):
            server = stack.enter_context(client.running(command, log, env=env))
        if mode.cached:
            state = status(server)
            if state.get("status") != "active":
                raise UnhealthyError("the expert cache is off", why=str(state.get("reason", "")))
        yield server


def status(server: Client) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/props").get("moe_cache") or {}
    return found


def counters(server: Client) -> Counters:
    """As of now: the server refreshes them a few times a second, so two looks have to agree."""
    last: dict[str, Any] = {}
    for _ in range(40):
        now = status(server)
        if last and now.get("steps") == last.get("steps"):
            break
        last = now
        time.sleep(AGREE_SECONDS)
    spent = sum(int(device["upload_us"]) for device in now["devices"])
    return Counters(now["hits"], now["misses"], now["uploads"], spent, now["steps"])


def ask(server: Client, tokens: int, seed: int) -> float:
    """Milliseconds a token of text sampled at temperature 1: greedy text of these models runs into loops."""
    body = {"prompt": [3 + seed * 97 % 250], "n_predict": tokens, "cache_prompt": False, "ignore_eos": True,
            "temperature": 1.0, "samplers": ["temperature"], "seed": seed}  # fmt: skip
    timings = server.post("/completion", body)["timings"]
    if timings["predicted_n"] != tokens:
        raise UnhealthyError("a server did other work than it was asked for",
                             why=f"{timings['predicted_n']} tokens instead of {tokens}")  # fmt: skip
    return float(timings["predicted_ms"]) / (tokens - 1)  # the first is the prompt's


def touch(server: Client) -> None:
    """Have most experts read once by a prompt, which no cache takes part in: the first to read a mapped page waits."""
    prompt = [3 + i * 37 % 500 for i in range(128)]
    server.post("/completion", {"prompt": prompt, "n_predict": 1, "cache_prompt": False})


def warm_up(server: Client, least: int, most: int) -> int:
    """Decode until the hit rate of the last WINDOW tokens is that of the ones before. Returns how many it took."""
    window = min(WINDOW, least)
    before, rates = counters(server), [-1.0]
    for done in range(window, most + 1, window):
        ask(server, window, 10_000 + done)
        now = counters(server)
        rates.append((now - before).rate)
        before = now
        if done >= least and abs(rates[-1] - rates[-2]) <= STEADY:
            return done
    return most


def round_of(
    pair: Pair, at: CachePlace, model: Path, names: Sequence[str], size: Size, scratch: Path, number: int
) -> Round:
    """Round *number*: fresh servers of the modes *names*, the first with a cache. First all cold, then in turns.

    A turn is a text of its own, in all modes; every second time they are asked backwards.
    """
    known = modes(at)
    made = Round(times={name: [] for name in names})
    devices = 1 + at.place.devices.count(";")
    cores = cores_for(2 + devices, number)  # the host's thread, one a device, and the uploader
    with ExitStack() as stack:
        live = {}
        for name in names:
            target, log = pair[0 if known[name].ours else 1], scratch / f"{name}.log"
            live[name] = stack.enter_context(serving(target, known[name], at, model, log, {}, cores))
            touch(live[name])
        for name in turned([CACHE, CPU_MOE], number):
            made.cold[name] = ask(live[name], size.decode, number)
        caches = [name for name in names if known[name].cached]
        warm = size.warm if FIT in names else (size.warm[0] // 4,) * 2  # a cache of noise is soon as good as it gets
        made.warm = max(warm_up(live[name], *warm) for name in caches)
        made.slots = [int(device["slots"]) for device in status(live[names[0]])["devices"]]
        before = counters(live[names[0]])
        for turn in range(2 * size.repeat):
            for name in turned(names, turn):
                made.times[name].append(ask(live[name], size.decode, 100 * number + turn))
        made.counters = asdict(counters(live[names[0]]) - before)
        made.cache_ms = (size.decode - 1) * sum(made.times[names[0]])
    return made


def turned(names: Sequence[str], number: int) -> list[str]:
    """Every second time backwards."""
    return list(names) if number % 2 == 0 else list(reversed(names))
