"""Speed is a ratio: two builds in turns on the same work, so that what drifts drifts for both.

What disturbs a shared machine most (a neighbour on the other half of a core) comes and goes within seconds and makes
everything up to 1.6 times slower. Programs run one after the other meet it by chance; so the servers of both builds
live at the same time, and requests of some 10 to 200 ms alternate between them. Timings are the servers' own. Two
processes of the same build differ as well, for as long as they live, by where their memory lies; and which of two
comes after itself finds warm caches. So a round is a fresh pair of servers, asked A B B A; what was asked in both
orders makes one ratio, the round's is their median, and the verdict looks at the rounds: at their median and at an
interval that holds it, made of the ratios themselves (the sign test's).
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from llamafork import proc
from llamafork.compare.target import Place, Target, at, environment
from llamafork.errors import UnhealthyError, UsageError
from llamafork.run import client
from llamafork.run.client import Client

LEAST = 6
FASTER, SLOWER, SAME = "faster", "slower", "no difference"
START, ALL = "start", "all"
Times = dict[str, list[float]]  # by number, one value an alternation
Pair = tuple[Target, Target]


@dataclass(frozen=True)
class Work:
    """What an alternation does: prompts of some lengths, each followed by so many tokens decoded, none after the last
    but one: ``pp64``, ``pp512``, ``tg32`` after a prompt of one token, ``tg32@512``. ``repeat`` times in both orders
    a round.
    """

    prefill: tuple[int, ...] = (64, 512)
    decode: int = 32
    threads: int = 1
    repeat: int = 6

    @property
    def context(self) -> int:
        return 256 * math.ceil((max(self.prefill) + self.decode + 32) / 256)


@dataclass(frozen=True)
class Verdict:
    """``ratio``: median of A over B in tokens per second; ``low`` and ``high`` hold it; more than 1 is faster."""

    word: str
    ratio: float
    low: float
    high: float


def judge(ratios: Sequence[float], *, threshold: float = 0.02) -> Verdict:
    """*faster* or *slower* only when the whole interval lies beyond the threshold.

    Fewer than :data:`LEAST` ratios cannot hold their median with 95 %: use more.
    """
    ordered = sorted(ratios)
    drop = interval_drop(len(ordered))
    low, high = ordered[drop], ordered[len(ordered) - 1 - drop]
    word = SLOWER if high < 1 - threshold else FASTER if low > 1 + threshold else SAME
    return Verdict(word, statistics.median(ordered), low, high)


def interval_drop(n: int, confidence: float = 0.95) -> int:
    """How many of *n* values may be left out at each end so that the rest holds the median with *confidence*.

    The chance that the median lies outside is twice the binomial tail; with fewer than 6 values even the whole range
    does not reach 95 %, and nothing is left out.
    """
    drop, tail = 0, 0.0
    for k in range(n // 2):
        tail += math.comb(n, k) / 2**n
        if 2 * tail > 1 - confidence:
            break
        drop = k
    return drop


def cores_for(need: int, number: int) -> set[int] | None:
    """The cores for round *number* of programs that can use *need*; None where they had to share these.

    A shared machine's cores are not equally fast, and a process stays on its own: so both of a pair get the same.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    there = sorted(os.sched_getaffinity(0))
    return None if need >= len(there) else {there[(number * need + i) % len(there)] for i in range(need)}


@contextmanager
def on_cores(cores: set[int] | None) -> Iterator[None]:
    """What is started in the block, and all that it starts, runs on *cores* alone."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def round_of(
    pair: Pair,
    place: Place,
    model: Path,
    work: Work,
    scratch: Path,
    more: Mapping[str, str] | None = None,
    *,
    number: int = 0,
) -> tuple[Times, Times]:
    """Round *number*: a fresh pair of servers, asked in turns. *more*: variables for the first alone.

    Values are tokens per second, of ``start`` starts per second, which is there only if :func:`no_start` has nothing to
    say. The first alternation warms up and is left out.
    Raises :class:`UnhealthyError` when a program fails.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    envs = [environment(place, {"GGML_SIM_CHECK": "0", **extra}) for extra in (more or {}, {})]
    times: tuple[Times, Times] = ({}, {})
    cores = cores_for(work.threads, number) if not place.devices and not place.rpc else None
    with ExitStack() as stack:
        places = [stack.enter_context(at(place, target)) for target in pair]
        if not no_start(pair):
            in_turns(lambda side: {START: _start(pair[side], places[side], model, work, envs[side])}, times, 1)
        servers = []
        for side in (0, 1):
            words = [*places[side], "-t", str(work.threads), "-c", str(work.context), "-np", "1", "--no-warmup"]
            command: list[str | Path] = [pair[side].program("llama-server"), "-m", model, *words]
            with on_cores(cores):
                servers.append(stack.enter_context(client.running(command, scratch / f"{side}.log", env=envs[side])))
        tokens = prompt(servers[1], max(work.prefill))
        in_turns(lambda side: ask(servers[side], tokens, work), times, work.repeat)
    return times


def decides(number: str) -> bool:
    """Whether the comparison fails if *number* is slower. Single numbers scatter more than their mean."""
    return number == ALL


def in_turns(one: Callable[[int], Mapping[str, float]], times: tuple[Times, Times], repeat: int) -> None:
    """A B, then *repeat* times B A, A B, into *times*. The first turn is not counted."""
    for number in range(2 * repeat + 1):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            for name, value in one(side).items():
                if number:
                    times[side].setdefault(name, []).append(value)


def prompt(server: Client, length: int) -> list[int]:
    """*length* tokens of plain text, in the model's own vocabulary."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[key] for key in sorted(topics))[: 8 * length]
    tokens: list[int] = server.post("/tokenize", {"content": text})["tokens"]
    while len(tokens) < length:
        tokens = tokens + tokens
    return tokens[:length]


def ask(server: Client, tokens: Sequence[int], work: Work) -> dict[str, float]:
    """Tokens per second of all numbers of *work* but ``start``. A first request wakes it and is not counted."""
    found = {}
    server.post("/completion", {"prompt": [tokens[0]], "n_predict": 8, "cache_prompt": False, "ignore_eos": True})
    for length in (1, *work.prefill):
        decode = work.decode if length in (1, max(work.prefill)) else 1
        body = {"prompt": list(tokens[:length]), "n_predict": decode, "cache_prompt": False, "ignore_eos": True,
                "temperature": 0, "samplers": ["temperature"]}  # fmt: skip
        timings = server.post("/completion", body)["timings"]
        if length > 1:
            found[f"pp{length}"] = 1e3 * timings["prompt_n"] / timings["prompt_ms"]
        if decode > 1:
            name = f"tg{decode}" + (f"@{length}" if length > 1 else "")
            found[name] = 1e3 * timings["predicted_n"] / timings["predicted_ms"]
        if timings["prompt_n"] != length or timings["predicted_n"] != decode:
            raise UnhealthyError(
                "a server did other work than it was asked for",
                why=f"{timings['prompt_n']} + {timings['predicted_n']} tokens instead of {length} + {decode}",
            )
    return found


def no_start(pair: Pair) -> str:
    """Why starting up cannot be measured: a tree of other people may lack what it takes. Empty if it can."""
    for one in pair:
        try:
            bench = one.program("llama-bench")
        except UsageError as error:
            return error.what
        said = proc.run([bench, "--help"], timeout=60)
        if "--no-warmup" not in said.out + said.err:
            return f"llama-bench of {one.name} knows no --no-warmup"
    return ""


def _start(target: Target, place: Sequence[str], model: Path, work: Work, env: Mapping[str, str]) -> float:
    """Starts per second: llama-bench from nothing to its first token."""
    command: list[str | Path] = [target.program("llama-bench"), "-m", model, *bench_args(place)]
    command += ["-t", str(work.threads), "-r", "1", "-p", "1", "-n", "0", "--no-warmup"]
    started = time.monotonic()
    done = proc.run(command, env=env, timeout=3600)
    took = time.monotonic() - started
    if not done.ok:
        last = done.err.strip().splitlines()[-1:] or [f"exit {done.code}"]
        raise UnhealthyError(f"llama-bench of {target.name} failed", why=last[0][:300])
    return 1.0 / took


def bench_args(args: Sequence[str]) -> list[str]:
    """The arguments of a place as llama-bench wants them: it has its own words for some."""
    out: list[str] = []
    words = list(args)
    while words:
        word = words.pop(0)
        if word == "--cpu-moe":
            out += ["-ncmoe", "999"]
        elif word == "-ts":
            out += ["-ts", words.pop(0).replace(",", "/")]
        else:
            out.append(word)
    return out


def ratios(ours: Sequence[Times], theirs: Sequence[Times]) -> dict[str, list[float]]:
    """By number, A over B of each round: the median of what two turns in a row, one in each order, say together.

    :data:`ALL` is the geometric mean of what the servers did: it scatters half as much as each of four numbers.
    """
    out: dict[str, list[float]] = {}
    for mine, other in zip(ours, theirs, strict=True):
        for name in mine:
            turns = [a / b for a, b in zip(mine[name], other[name], strict=True)]
            both = [math.sqrt(one * two) for one, two in zip(turns[::2], turns[1::2], strict=True)]
            out.setdefault(name, []).append(statistics.median(both))
    served = [values for name, values in out.items() if name != START]
    return {ALL: [statistics.geometric_mean(one) for one in zip(*served, strict=True)], **out}
