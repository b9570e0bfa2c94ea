"""Speed is a ratio: two builds in turns on the same work, so that what drifts drifts for both.

A round runs llama-bench of A and of B, in the other order every second round. Each number (prefill of a length, decode
at a depth) gives one ratio a round. The verdict looks at the median of the ratios and at an interval that holds it,
made of the ratios themselves (the sign test's), so that neither noise nor one lucky round decides.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamafork import proc
from llamafork.compare.target import Place, Target, at, environment
from llamafork.errors import UnhealthyError

LEAST = 6
FASTER, SLOWER, SAME = "faster", "slower", "no difference"


@dataclass(frozen=True)
class Work:
    """What a round does: tokens of the prompts, tokens decoded, depths at which decode starts, each *repeat* times."""

    prefill: tuple[int, ...] = (64, 512)
    decode: int = 32
    depths: tuple[int, ...] = (0, 512)
    threads: int = 1
    repeat: int = 5


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


def measure(
    target: Target, place: Place, model: Path, work: Work, more: Mapping[str, str] | None = None
) -> dict[str, float]:
    """Tokens per second by test, such as ``pp512`` and ``tg32@512``, and ``start``: starts per second, of one token."""
    depths = ",".join(map(str, work.depths))
    with at(place, target) as args:
        words = [*args, "-t", str(work.threads), "-o", "json"]
        often = ["-r", str(work.repeat)]
        prefill = [*often, "-p", ",".join(map(str, work.prefill)), "-n", "0"]
        decode = [*often, "-p", "0", "-n", str(work.decode), "-d", depths]
        env = environment(place, {"GGML_SIM_CHECK": "0", **(more or {})})
        rows = _bench(target, model, [*words, *prefill], env) + _bench(target, model, [*words, *decode], env)
        started = time.monotonic()
        _bench(target, model, [*words, "-r", "1", "-p", "1", "-n", "0", "--no-warmup"], env)
        start = time.monotonic() - started
    return {_name(row): statistics.median(row["samples_ts"]) for row in rows} | {"start": 1.0 / start}


def _bench(target: Target, model: Path, words: Sequence[str], env: Mapping[str, str]) -> list[dict[str, Any]]:
    command: list[str | Path] = [target.program("llama-bench"), "-m", model, *words]
    done = proc.run(command, env=env, timeout=3600)
    try:
        rows = json.loads(done.out)
    except ValueError:
        rows = []
    if not done.ok or not rows:
        last = done.err.strip().splitlines()[-1:] or [f"exit {done.code}"]
        raise UnhealthyError(f"llama-bench of {target.name} failed", why=last[0][:300])
    return list(rows)


def _name(row: Mapping[str, Any]) -> str:
    if row["n_prompt"]:
        return f"pp{int(row['n_prompt'])}"
    return f"tg{int(row['n_gen'])}" + (f"@{int(row['n_depth'])}" if row["n_depth"] else "")


def ratios(ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """By test, A over B of each round."""
    out: dict[str, list[float]] = {}
    for mine, other in zip(ours, theirs, strict=True):
        for name in mine:
            out.setdefault(name, []).append(mine[name] / other[name])
    return out
