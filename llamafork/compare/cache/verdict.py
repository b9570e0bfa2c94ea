"""Rounds and profiles against the goals: pure functions to rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llamafork.compare import speed
from llamafork.compare.cache.overlap import Profile
from llamafork.compare.cache.servers import CACHE, CPU_MOE, FIT, SMALL, Counters, Round
from llamafork.compare.cache.work import Workload
from llamafork.compare.report import Row

REACHED, MISSED, UNJUDGED = "reached", "missed", "not judged"
OF_EXPECTED, OVERLAP, PER_UPLOAD, LINK_SHARE, NO_SLOWER = 0.9, 1.15, 6.0, 0.25, 0.97


@dataclass(frozen=True)
class Measured:
    """A ratio of speeds (more is faster) with the interval that holds its median, and milliseconds a token."""

    ratio: float
    low: float
    high: float
    ours: float
    theirs: float

    def __str__(self) -> str:
        return (f"{self.ratio:.3f} ({self.low:.3f} to {self.high:.3f}); "
                f"{1e3 / self.ours:.1f} and {1e3 / self.theirs:.1f} tokens/s")  # fmt: skip


def over(rounds: Sequence[Round], mode: str, base: str) -> Measured:
    """How many times as fast *mode* is as *base*. Two turns in a row, one in each order, make one ratio; of a round
    their median counts."""
    each = []
    for one in rounds:
        turns = [b / a for a, b in zip(one.times[mode], one.times[base], strict=True)]
        each.append(statistics.median(math.sqrt(x * y) for x, y in zip(turns[::2], turns[1::2], strict=True)))
    ours, theirs = (statistics.median(x for one in rounds for x in one.times[name]) for name in (mode, base))
    return _measured(each, ours, theirs)


def cold(rounds: Sequence[Round]) -> Measured:
    """The same of the first tokens."""
    ours, theirs = (statistics.median(one.cold[name] for one in rounds) for name in (CACHE, CPU_MOE))
    return _measured([one.cold[CPU_MOE] / one.cold[CACHE] for one in rounds], ours, theirs)


def _measured(ratios: Sequence[float], ours: float, theirs: float) -> Measured:
    found = speed.judge(ratios)
    return Measured(found.ratio, found.low, found.high, ours, theirs)


def counted(rounds: Sequence[Round]) -> Counters:
    return sum((Counters(**one.counters) for one in rounds), Counters())


def rows(work: Workload, place: str, rounds: Sequence[Round], profile: Profile | None, *, judged: bool) -> list[Row]:
    """All rows of a workload. Not *judged*: too little was measured for verdicts."""

    def row(number: str, fine: bool, detail: str, value: float, spread: Measured | None = None) -> Row:
        word = (REACHED if fine else MISSED) if judged else UNJUDGED
        low, high = (spread.low, spread.high) if spread else (None, None)
        return Row("cache", work.name, place, word, judged and not fine, detail, number=number, ratio=value, low=low,
                   high=high)  # fmt: skip

    def speeds(number: str, found: Measured, fine: bool, detail: str) -> Row:
        return row(number, fine, f"{found}{detail}", found.ratio, found)

    def no_slower(number: str, found: Measured) -> Row:
        return speeds(number, found, found.high >= NO_SLOWER, f"; missed if all of the interval is below {NO_SLOWER}")

    if work.goal is None or profile is None:
        return [
            no_slower("thrashing", over(rounds, CACHE, CPU_MOE)),
            no_slower("too small", over(rounds, SMALL, CPU_MOE)),
        ]
    hosted, fit, have = over(rounds, CACHE, CPU_MOE), over(rounds, CACHE, FIT), counted(rounds)
    best, name = min((hosted, "--cpu-moe"), (fit, "--fit"), key=lambda one: one[0].ratio)
    slots = ", ".join(map(str, rounds[0].slots))
    warm = max(one.warm for one in rounds)
    how = f"; stock's best is {name}; goal {work.goal:g}; {have.rate:.1%} hits, {slots} slots, after {warm} tokens"
    spent = have.upload_us / 1e3 / sum(one.cache_ms for one in rounds)
    return [
        speeds("over the best", best, best.ratio >= work.goal, how),
        speeds("over --cpu-moe", hosted, True, ""),
        speeds("over --fit", fit, True, ""),
        _of_expected(row, hosted.ratio, profile),
        _overlap(row, profile),
        row("hits per upload", have.per_upload >= PER_UPLOAD,
            f"{have.per_upload:.1f}; goal {PER_UPLOAD:g}; {have.hits} hits, {have.uploads} uploads", have.per_upload),
        row("link share", spent <= LINK_SHARE,
            f"{spent:.1%}; goal {LINK_SHARE:.0%}; uploads took {have.upload_us / 1e3:.0f} ms", spent),
        no_slower("cold", cold(rounds)),
    ]  # fmt: skip


def _of_expected(row: Callable[..., Row], ratio: float, found: Profile) -> Row:
    stock, fork, part = found.stock, found.fork, ratio / found.expected
    detail = (
        f"{part:.3f}; goal {OF_EXPECTED:g}; {ratio:.3f} of {found.expected:.3f}, which is ({stock.rest:.2f} + "
        f"{found.outside:.2f}) / ({fork.rest:.2f} + {fork.longer:.2f} + {found.outside:.2f}) ms a token: graph, longer "
        f"branches, outside; hits {fork.hits:.2f}, misses {fork.misses:.2f} ms at {found.rate:.1%}"
    )
    return row("of expected", part >= OF_EXPECTED, detail, part)


def _overlap(row: Callable[..., Row], found: Profile) -> Row:
    one = found.serial
    detail = (
        f"{found.overlap:.3f}; goal {OVERLAP:g}; {found.wall:.2f} ms a token, longer branches {one.longest:.2f}, "
        f"hits {one.hits:.2f}, misses {one.misses:.2f}; {found.rates[0]:.1%} and {found.rates[1]:.1%} hits"
    )
    return row("overlap", found.overlap <= OVERLAP, detail, found.overlap)
