"""Stage speed: fork and stock in turns at the same placements, prefill and decode, medians with their spread.

llama-bench feeds random tokens, so decode here is without the reuse that the model's router has: the right load for
placements that do not depend on it, the wrong one for a cache.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_check import devices, model
from gpu_check.programs import checked
from gpu_check.stage import Context, Outcome, Table
from llamafork.errors import UnhealthyError

KINDS = ("fork", "stock")
SHARES = (0.25, 0.5, 0.75)
ROOM = 192 << 20  # of a simulated device beside the weights: KV cache, and experts that a long prompt brings over
HEADER = ("placement", "weights", "decode fork", "decode stock", "ratio", "prefill fork", "prefill stock", "ratio")
Rows = dict[str, list[float]]  # test to tokens per second, one a round


@dataclass(frozen=True)
class Case:
    """``host``: layers whose experts stay in host memory; ``mode`` as llama-bench's --load-mode."""

    name: str
    host: int
    mode: str

    @property
    def title(self) -> str:
        return f"{self.name}, {self.mode}"


def cases(layers: int) -> list[Case]:
    """The most telling first: what does not fit into the time is left out from the end."""
    shares = [(f"{share:.0%} of the experts on the device", round(layers * (1 - share))) for share in SHARES]
    places = [("no experts on the device", layers), *shares]
    mapped = [Case(name, host, "mmap") for name, host in places]
    # Without mmap the host's part is in page-locked memory. 50 % before the other parts.
    pinned = [Case(name, host, "none") for name, host in (places[0], places[2], places[1], places[3])]
    return mapped + pinned


def measure(ctx: Context) -> Outcome:
    facts = ctx.found["model"]
    results: list[dict[str, Any]] = []
    longest = 0.0  # of a round so far
    for case in cases(facts["layers"]):
        need = ctx.options.rounds * longest
        if need > ctx.left():
            why = f"{need:.0f} s for it, {max(0.0, ctx.left()):.0f} s left"
            results.append({"case": case.title, "left_out": why})
            continue
        found: dict[str, Rows] = {kind: {} for kind in KINDS}
        for number in range(ctx.options.rounds):
            started = time.monotonic()
            for kind in KINDS if number % 2 == 0 else KINDS[::-1]:
                for test, value in _bench(ctx, kind, case, facts).items():
                    found[kind].setdefault(test, []).append(value)
            longest = max(longest, time.monotonic() - started)
        results.append({"case": case.title, "on_device_bytes": _on_device(case, facts), **_summed(found)})
        ctx.log.say(f"speed: {' | '.join(_row(results[-1]))}")
        ctx.keep(_outcome(results, ctx))
    return _outcome(results, ctx)


def cost(ctx: Context) -> float:
    """The least that is worth beginning; cases are added while there is time."""
    return 30.0 if ctx.options.backend == "sim" else 60.0


def _bench(ctx: Context, kind: str, case: Case, facts: Mapping[str, Any]) -> dict[str, float]:
    o = ctx.options
    env = ctx.environment()
    if o.backend == "sim":
        env["GGML_SIM_DEVICES"] = f"mem={(_on_device(case, facts) + ROOM) >> 20}M"
    program = ctx.programs(kind) / "llama-bench"
    words: list[str | Path] = [
        "-m",
        model.file(ctx),
        "-dev",
        devices.first(ctx),
        "-ngl",
        "99",
        "-ncmoe",
        str(case.host),
        "-lm",
        case.mode,
    ]
    work = ["-p", str(o.prefill), "-n", str(o.decode), "-t", str(o.threads), "-r", "1", "-o", "json"]
    done = checked(ctx.run([program, *words, *work], env=env))
    return read(done.out, kind)


def read(text: str, kind: str) -> dict[str, float]:
    """Tokens per second by test, of llama-bench's JSON. A program that has no device is refused."""
    try:
        rows = json.loads(text)
        found = {
            "prefill" if row["n_prompt"] else "decode": float(statistics.median(row["samples_ts"])) for row in rows
        }
        on_gpu = all(row["gpu_info"] and int(row["n_gpu_layers"]) > 0 for row in rows)
    except (ValueError, KeyError, TypeError) as error:
        raise UnhealthyError(
            f"llama-bench of {kind} printed no results", why=f"{type(error).__name__}: {error}"
        ) from error
    if sorted(found) != ["decode", "prefill"]:
        raise UnhealthyError(f"llama-bench of {kind} measured {', '.join(found) or 'nothing'}", do="see log.txt")
    if not on_gpu:
        raise UnhealthyError(f"llama-bench of {kind} ran without a device", why="its result names no GPU")
    return found


def _on_device(case: Case, facts: Mapping[str, Any]) -> int:
    layers, experts = facts["layers"], facts["expert_bytes"]
    return int(facts["bytes"] - experts + experts * (layers - case.host) // layers)


def _summed(found: Mapping[str, Rows]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for test in ("decode", "prefill"):
        for kind in KINDS:
            values = found[kind][test]
            out[f"{test}_{kind}"] = {"median": statistics.median(values), "low": min(values), "high": max(values),
                                     "samples": values}  # fmt: skip
        pairs = zip(found["fork"][test], found["stock"][test], strict=True)
        out[f"{test}_ratio"] = statistics.median(ours / theirs for ours, theirs in pairs)
    return out


def _row(result: Mapping[str, Any]) -> tuple[str, ...]:
    name, _, mode = result["case"].rpartition(", ")
    if "left_out" in result:
        return (name, mode, f"left out: {result['left_out']}", "", "", "", "", "")
    cells = [name, mode]
    for test in ("decode", "prefill"):
        cells += [_spread(result[f"{test}_{kind}"]) for kind in KINDS]
        cells.append(f"{result[f'{test}_ratio']:.3f}")
    return tuple(cells)


def _spread(one: Mapping[str, float]) -> str:
    return f"{one['median']:.1f} ({one['low']:.1f} to {one['high']:.1f})"


def _outcome(results: Sequence[Mapping[str, Any]], ctx: Context) -> Outcome:
    whole = [one for one in results if "left_out" not in one]
    missing = f", {len(results) - len(whole)} left out for want of time" if len(whole) < len(results) else ""
    rows = tuple(_row(one) for one in results)
    o = ctx.options
    work = f"{o.rounds} rounds, {o.decode} tokens decoded at depth 0, {o.prefill} of prompt, {o.threads} threads"
    numbers = {"rounds": o.rounds, "decode": o.decode, "prefill": o.prefill, "threads": o.threads, "cases": results}
    return Outcome(f"{len(whole)} placements measured{missing}: {work}; tokens a second", numbers, Table(HEADER, rows))
