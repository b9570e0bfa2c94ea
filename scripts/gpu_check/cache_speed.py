"""Stage cache-speed: the expert cache against --cpu-moe and against whole layers in the same VRAM, and its margin."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_check import cache, devices, machine, model, speed
from gpu_check.servers import Server, free_ports, running
from gpu_check.stage import Context, Outcome, Table
from llamafork.errors import LlamaforkError, UnhealthyError

SHARES = (0.5, 0.25, 0.75)  # of the experts' bytes; what does not fit into the time is left out from the end
CACHE, HOST, LAYERS = "cache", "cpu-moe", "layers"
PREFILL = 512
LEAST = 3  # warm rounds
SIM_MEMORY = 8 << 30
BESIDE = {"sim": 128 << 20, "cuda": 1 << 30}  # of a device, for KV cache, compute buffers and the driver
HEADER = ("experts in VRAM", "decode", *(f"{name}, t/s" for name in (CACHE, HOST, LAYERS)),
          "cache / cpu-moe", "cache / layers", "prefill / cpu-moe", "hits")  # fmt: skip

Round = Mapping[str, speed.Answer]


def measure(ctx: Context) -> Outcome:
    facts = ctx.found["model"]
    found: dict[str, Any] = {}
    longest = 0.0
    for share in SHARES:
        if longest > ctx.left():
            found[f"{share:.0%}"] = {"left_out": f"{longest:.0f} s for it, {max(0.0, ctx.left()):.0f} s left"}
            continue
        started = time.monotonic()
        found[f"{share:.0%}"] = _share(ctx, facts, share)
        longest = max(longest, time.monotonic() - started)
        ctx.keep(_outcome(found))
    found["margin"] = _margin(ctx, facts)
    ctx.keep(_outcome(found))
    if found["margin"].get("held") is False:
        raise LlamaforkError("the margin of VRAM was not held", why=_said(found["margin"]), do="record.json has it")
    return _outcome(found)


def cost(ctx: Context) -> float:
    """The least that is worth beginning; other shares are added while there is time."""
    return 40.0 if ctx.options.backend == "sim" else 60.0


def placements(ctx: Context, facts: Mapping[str, Any], share: float) -> dict[str, list[str | Path]]:
    layers = facts["layers"]
    return {
        CACHE: [*model.placed(ctx, layers), "--moe-expert-cache", str(cache.slots(facts, share))],
        HOST: model.placed(ctx, layers),
        LAYERS: model.placed(ctx, layers - round(layers * share)),  # as --fit places them, back to front or not
    }


def _share(ctx: Context, facts: Mapping[str, Any], share: float) -> dict[str, Any]:
    """Three servers at a time, asked in turns; the first round is cold."""
    threads = max(1, ctx.options.threads - 1)  # a core for the device's driver and the uploads
    options = replace(ctx.options, prefill=min(PREFILL, ctx.options.prefill), threads=threads)
    args = ["-lm", "mmap", *speed._server_args(options)]
    with ExitStack() as stack:
        places = placements(ctx, facts, share)
        servers = {
            name: stack.enter_context(running(ctx, "fork", [*words, *args], port=port, env=cache.environment(ctx)))
            for (name, words), port in zip(places.items(), free_ports(len(places)), strict=True)
        }
        for server in servers.values():
            server.await_ready()
        tokens = speed._prompt(servers[CACHE], options.prefill)
        rounds: list[Round] = []
        hits: list[float] = []
        longest = 0.0
        for number in range(ctx.options.rounds + 1):
            if longest > ctx.left():
                break
            started = time.monotonic()
            order = list(servers) if number % 2 == 0 else list(servers)[::-1]
            rounds.append({name: speed._ask(servers[name], tokens, options.decode, speed.SEED + number)
                           for name in order})  # fmt: skip
            hits.append(_state(servers[CACHE])["hit_rate"])
            longest = max(longest, time.monotonic() - started)
        if rounds:
            for server in servers.values():
                server.require_device(devices.first(ctx))
        return result(rounds, hits, _state(servers[CACHE]))


def _state(server: Server) -> Mapping[str, Any]:
    state: Mapping[str, Any] = server.get("/props").get("moe_cache", {})
    if state.get("status") != "active":
        why = f"{state.get('status')}: {state.get('reason')}"
        raise UnhealthyError("the server's expert cache is not active", why=why, do="see log.txt")
    return state


def result(rounds: Sequence[Round], hits: Sequence[float], state: Mapping[str, Any]) -> dict[str, Any]:
    if len(rounds) <= LEAST:
        return {"left_out": f"it ended after {len(rounds)} rounds"}
    cold, warm = rounds[0], rounds[1:]
    out: dict[str, Any] = {"rounds": len(warm), "hit_rates": list(hits), "moe_cache": dict(state)}
    out["cold"] = {name: cold[name].decode for name in cold}
    for test in speed.TESTS:
        values = {name: [float(getattr(one[name], test)) for one in warm] for name in cold}
        out[test] = {name: statistics.median(list_) for name, list_ in values.items()} | {"samples": values}
        for other in (HOST, LAYERS):
            ratios = [mine / theirs for mine, theirs in zip(values[CACHE], values[other], strict=True)]
            out[f"{test}_to_{other}"] = {
                "median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}  # fmt: skip
    return out


def _margin(ctx: Context, facts: Mapping[str, Any]) -> dict[str, Any]:
    """-1 beside a margin that leaves room for half of the experts; what is free after two long prompts."""
    sim = ctx.options.backend == "sim"
    free = SIM_MEMORY if sim else machine.free_memory()
    if free is None:
        return {"left_out": "nvidia-smi does not say how much memory is free"}
    if ctx.left() < 15:
        return {"left_out": f"{max(0.0, ctx.left()):.0f} s left"}
    experts = int(facts["expert_bytes"])
    margin = (free - (int(facts["bytes"]) - experts) - experts // 2 - BESIDE[ctx.options.backend]) >> 20
    stats = ctx.work / "margin.json"
    stats.unlink(missing_ok=True)
    env = cache.environment(ctx, MARGIN_MB=str(margin)) | {"GGML_SIM_STATS": str(stats)}
    words = [*model.placed(ctx, facts["layers"]), "--moe-expert-cache", "-1", *speed._server_args(ctx.options)]
    words.remove("--no-warmup")
    with running(ctx, "fork", words, port=free_ports(1)[0], env=env) as server:
        server.await_ready()
        tokens = speed._prompt(server, ctx.options.prefill)
        for seed in (1, 2):
            speed._ask(server, tokens, ctx.options.decode, seed)
        taken = _state(server)["devices"][0]
        after = machine.free_memory() if not sim else None
        server.process.terminate()  # a simulated device tells at exit
        server.process.wait(timeout=max(1.0, min(30.0, ctx.left())))
    if sim:
        device = json.loads(stats.read_text(encoding="utf-8"))["sim"][0]
        after = device["mem"] - device["alloc_peak"]
    if after is None:
        return {"left_out": "nvidia-smi does not say how much memory is free"}
    held = after >= margin << 20
    if taken["slots"] >= facts["spec"]["n_expert"]:
        return {"left_out": f"all experts fit beside a margin of {margin} MiB"}
    return {"margin_mib": margin, "free_mib": after >> 20, "slots": taken["slots"], "held": held}


def _outcome(found: Mapping[str, Any]) -> Outcome:
    rows = [row for share, one in found.items() if share != "margin" for row in _rows(share, one)]
    whole = [one for share, one in found.items() if share != "margin" and "left_out" not in one]
    margin = f"; {_said(found['margin'])}" if "margin" in found else ""
    best = max((one[f"decode_to_{HOST}"]["median"] for one in whole), default=0.0)
    summary = f"{len(whole)} of {len(SHARES)} sizes; decode up to {best:.2f} times that of --cpu-moe{margin}"
    return Outcome(summary, found, Table(HEADER, tuple(rows)))


def _rows(share: str, one: Mapping[str, Any]) -> list[tuple[str, ...]]:
    if "left_out" in one:
        return [(share, f"left out: {one['left_out']}", *[""] * (len(HEADER) - 2))]
    names = (CACHE, HOST, LAYERS)
    cold, rates = one["cold"], one["hit_rates"]
    ratios = (f"{cold[CACHE] / cold[HOST]:.2f}", f"{cold[CACHE] / cold[LAYERS]:.2f}")
    warm = [f"{one[f'decode_to_{other}']['median']:.2f} ({one[f'decode_to_{other}']['low']:.2f} to "
            f"{one[f'decode_to_{other}']['high']:.2f})" for other in (HOST, LAYERS)]  # fmt: skip
    prefill = f"{one[f'prefill_to_{HOST}']['median']:.2f}"
    return [
        (share, "cold", *(f"{cold[name]:.1f}" for name in names), *ratios, "", f"{rates[0]:.1%}"),
        (share, "warm", *(f"{one['decode'][name]:.1f}" for name in names), *warm, prefill, f"{rates[-1]:.1%}"),
    ]


def _said(margin: Mapping[str, Any]) -> str:
    if "left_out" in margin:
        return f"margin left out: {margin['left_out']}"
    state = "held" if margin["held"] else "NOT held"
    return f"margin {state}: {margin['free_mib']} MiB free of {margin['margin_mib']}"
