"""Stage speed: fork and stock in turns at the same placements, decode and prefill, as llamafork/compare/speed.py does.

What disturbs a machine lasts seconds. So the servers of both builds live at the same time and are asked in turns, and
a ratio is one of neighbours in time. They go on with plain text by sampling, the same in both: then the router reuses
experts from token to token as it does in use, which random tokens would not show.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from gpu_check import devices, machine, model
from gpu_check.servers import Server, free_ports, running
from gpu_check.stage import Context, Options, Outcome, Table
from llamafork.errors import EnvironmentFault, UnhealthyError

KINDS = ("fork", "stock")
SHARES = (0.25, 0.5, 0.75)
TESTS = ("decode", "prefill")
LEAST = 4  # alternations, which make 3 ratios: fewer say nothing
SEED = 1000
ROOM = 192 << 20  # of a simulated device beside the weights: KV cache, and experts that a long prompt brings over
SPARE = 1 << 30  # of host memory, for what two servers need beside the weights
HEADER = ("placement", "weights", "decode fork", "decode stock", "ratio", "prefill fork", "prefill stock", "ratio")


@dataclass(frozen=True)
class Case:
    """``host``: layers whose experts stay in host memory; ``mode`` as llama-server's --load-mode."""

    name: str
    host: int
    mode: str

    @property
    def title(self) -> str:
        return f"{self.name}, {self.mode}"


@dataclass(frozen=True)
class Answer:
    """Tokens per second, and the tokens that were sampled."""

    decode: float
    prefill: float
    tokens: tuple[int, ...]


Alternation = Mapping[str, Answer]  # by kind


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
    longest = 0.0  # of the cases so far
    for case in cases(facts["layers"]):
        why = _no_memory(case, facts) or _no_time(longest, ctx.left())
        if why:
            results.append({"case": case.title, "left_out": why})
            continue
        found: list[Alternation] = []
        started = time.monotonic()
        try:
            _measure(ctx, case, facts, found)
        finally:  # whatever ends the case, what it had found is kept
            longest = max(longest, time.monotonic() - started)
            results.append(_result(case, facts, found))
            ctx.keep(_outcome(results, ctx.options))
        ctx.log.say(f"speed: {' | '.join(_row(results[-1], ctx.options))}")
    if all("left_out" in one for one in results):
        raise EnvironmentFault("no placement could be measured", why=results[0]["left_out"])
    return _outcome(results, ctx.options)


def cost(ctx: Context) -> float:
    """The least that is worth beginning; cases are added while there is time."""
    return 30.0 if ctx.options.backend == "sim" else 60.0


def _no_memory(case: Case, facts: Mapping[str, Any]) -> str:
    """Why two servers cannot live here at the same time, or "". They share what is mapped; page-locked, each has its
    own copy.
    """
    copies = 2 if case.mode == "none" else 1
    need, there = copies * (facts["bytes"] - _on_device(case, facts)) + SPARE, machine.available_memory()
    if there is None or need <= there:
        return ""
    return f"both servers need {need / 1e9:.1f} GB of host memory, and {there / 1e9:.1f} GB are available"


def _no_time(need: float, left: float) -> str:
    return f"{need:.0f} s for it, {max(0.0, left):.0f} s left" if need > left else ""


def _measure(ctx: Context, case: Case, facts: Mapping[str, Any], found: list[Alternation]) -> None:
    """A fresh pair of servers, asked in turns."""
    env = ctx.environment()
    if ctx.options.backend == "sim":
        env["GGML_SIM_DEVICES"] = f"mem={(_on_device(case, facts) + ROOM) >> 20}M"
    args = [*model.placed(ctx, case.host), "-lm", case.mode, *_server_args(ctx.options)]
    with ExitStack() as stack:
        ports = free_ports(len(KINDS))
        servers = [stack.enter_context(running(ctx, kind, args, port=port, env=env))
                   for kind, port in zip(KINDS, ports, strict=True)]  # fmt: skip
        for server in servers:
            server.await_ready()
        tokens = _prompt(servers[0], ctx.options.prefill)
        _in_turns(ctx, servers, tokens, found)


def _server_args(o: Options) -> list[str]:
    context = 256 * math.ceil((o.prefill + o.decode + 32) / 256)
    words = ["-t", str(o.threads), "-c", str(context), "-np", "1", "--no-warmup"]
    # Nothing fitted or cached on the side; at level 4 the log names the buffers of the model.
    return [*words, "-fit", "off", "-cram", "0", "-lv", "4"]


def _prompt(server: Server, length: int) -> list[int]:
    """*length* tokens of plain text, in the model's own vocabulary."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[key] for key in sorted(topics))[: 8 * length]
    tokens: list[int] = server.post("/tokenize", {"content": text}).get("tokens")
    if not tokens:
        raise UnhealthyError(f"{server.name} made no tokens of a text")
    while len(tokens) < length:
        tokens = tokens + tokens
    return tokens[:length]


def _in_turns(ctx: Context, servers: Sequence[Server], tokens: Sequence[int], found: list[Alternation]) -> None:
    """A B, B A, A B … into *found*: after one that warms up, as many as asked for, or as time allows."""
    longest = 0.0
    for number in range(ctx.options.rounds + 1):
        if longest > ctx.left():
            return
        started = time.monotonic()
        turn = servers if number % 2 == 0 else servers[::-1]
        answers = {server.kind: _ask(server, tokens, ctx.options.decode, SEED + number) for server in turn}
        longest = max(longest, time.monotonic() - started)
        if number:
            found.append(answers)
            continue
        for server in servers:
            server.require_device(devices.first(ctx))


def _ask(server: Server, tokens: Sequence[int], decode: int, seed: int) -> Answer:
    body = {"prompt": list(tokens), "n_predict": decode, "cache_prompt": False, "ignore_eos": True, "temperature": 1.0,
            "samplers": ["temperature"], "seed": seed, "return_tokens": True}  # fmt: skip
    answer = server.post("/completion", body)
    try:
        t = answer["timings"]
        done = (t["prompt_n"], t["predicted_n"])
        speeds = (1e3 * t["predicted_n"] / t["predicted_ms"], 1e3 * t["prompt_n"] / t["prompt_ms"])
        sampled = tuple(answer["tokens"])
    except (KeyError, TypeError, ZeroDivisionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise UnhealthyError(f"{server.name} gave no timings", why=why, do="see log.txt") from error
    if done != (len(tokens), decode):
        raise UnhealthyError(
            f"{server.name} did other work than it was asked for",
            why=f"{done[0]} + {done[1]} tokens instead of {len(tokens)} + {decode}",
        )
    return Answer(*speeds, sampled)


def _on_device(case: Case, facts: Mapping[str, Any]) -> int:
    layers, experts = facts["layers"], facts["expert_bytes"]
    return int(facts["bytes"] - experts + experts * (layers - case.host) // layers)


def _result(case: Case, facts: Mapping[str, Any], found: Sequence[Alternation]) -> dict[str, Any]:
    """``same_tokens``: alternations in which both sampled the same, so that both needed the same experts."""
    if len(found) < LEAST:
        return {"case": case.title, "left_out": f"it ended after {len(found)} alternations"}
    out: dict[str, Any] = {"case": case.title, "on_device_bytes": _on_device(case, facts), "alternations": len(found)}
    out["same_tokens"] = sum(one["fork"].tokens == one["stock"].tokens for one in found)
    for test in TESTS:
        values = {kind: [float(getattr(one[kind], test)) for one in found] for kind in KINDS}
        turns = [ours / theirs for ours, theirs in zip(values["fork"], values["stock"], strict=True)]
        # Whoever comes after itself finds warm caches: two alternations in a row have both orders.
        ratios = [math.sqrt(one * two) for one, two in itertools.pairwise(turns)]
        for kind in KINDS:
            out[f"{test}_{kind}"] = _spread(values[kind]) | {"samples": values[kind]}
        spread = _spread(ratios)
        out |= {f"{test}_ratio": spread["median"], f"{test}_ratio_low": spread["low"],
                f"{test}_ratio_high": spread["high"]}  # fmt: skip
    return out


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def _row(result: Mapping[str, Any], o: Options) -> tuple[str, ...]:
    name, _, mode = result["case"].rpartition(", ")
    if "left_out" in result:
        return (name, mode, f"left out: {result['left_out']}", "", "", "", "", "")
    number = result["alternations"]
    cells = [name if number == o.rounds else f"{name} ({number} alternations)", mode]
    for test in TESTS:
        for kind in KINDS:
            one = result[f"{test}_{kind}"]
            cells.append(f"{one['median']:.1f} ({one['low']:.1f} to {one['high']:.1f})")
        ratio, low, high = (result[f"{test}_ratio{end}"] for end in ("", "_low", "_high"))
        cells.append(f"{ratio:.3f} ({low:.3f} to {high:.3f})")
    return tuple(cells)


def _outcome(results: Sequence[Mapping[str, Any]], o: Options) -> Outcome:
    whole = [one for one in results if "left_out" not in one]
    missing = f", {len(results) - len(whole)} left out" if len(whole) < len(results) else ""
    rows = tuple(_row(one, o) for one in results)
    work = f"{o.rounds} alternations, {o.decode} tokens sampled after {o.prefill} of prompt, {o.threads} threads"
    numbers = {name: getattr(o, name) for name in ("rounds", "decode", "prefill", "threads")} | {"cases": [*results]}
    return Outcome(f"{len(whole)} placements measured{missing}: {work}; tokens a second", numbers, Table(HEADER, rows))
