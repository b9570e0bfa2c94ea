"""Stage profile: where the time of the fork's decode goes, by the scheduler's own clock (docs/profiling.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gpu_check import archive, model
from gpu_check.programs import checked
from gpu_check.stage import Context, Outcome, Table
from llamafork.errors import UnhealthyError

MODES = {"1": "as it runs", "2": "serial"}


def decode(ctx: Context) -> Outcome:
    """With all experts in host memory, where there are the most splits and copies."""
    graphs: dict[str, dict[str, Any]] = {}
    rows: list[tuple[str, ...]] = []
    for mode, title in MODES.items():
        graphs[title] = _run(ctx, mode)
        rows += [(title, *row) for row in _parts(graphs[title])]
    lines = "".join(json.dumps({"mode": title, **graph}) + "\n" for title, graph in graphs.items())
    archive.replace(ctx.out / "profile.jsonl", lines.encode())
    table = Table(("clock", "part", "us a token", "count", "bytes a token"), tuple(rows))
    plain = graphs[MODES["1"]]
    summary = f"{plain['n_splits']} splits, {plain['ns'] / plain['runs'] / 1e3:.0f} us a token; profile.jsonl has all"
    return Outcome(summary, {title: _numbers(graph) for title, graph in graphs.items()}, table)


def cost(ctx: Context) -> float:
    return 5.0 if ctx.options.backend == "sim" else 25.0


def _run(ctx: Context, mode: str) -> dict[str, Any]:
    file = ctx.work / f"profile-{mode}.jsonl"
    file.unlink(missing_ok=True)
    program = ctx.programs("fork") / "llama-bench"
    words = model.placed(ctx, ctx.found["model"]["layers"])
    work = ["-p", "0", "-n", str(ctx.options.decode), "-t", str(ctx.options.threads), "-r", "1", "-o", "json"]
    env = ctx.environment(GGML_SCHED_PROF=mode, GGML_SCHED_PROF_FILE=str(file))
    checked(ctx.run([program, *words, *work], env=env))
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    graphs = [json.loads(line) for line in text.splitlines()]
    one = [graph for graph in graphs if graph["batch"] == 1]
    if not one:
        raise UnhealthyError("GGML_SCHED_PROF wrote no decode graph", why=f"{len(graphs)} graphs in its file")
    found: dict[str, Any] = max(one, key=lambda graph: int(graph["runs"]))
    return found


def _parts(graph: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (name, f"{one['us']:.1f}", str(one["count"]), str(one["bytes"]))
        for name, one in _numbers(graph)["parts"].items()
    ]


def _numbers(graph: Mapping[str, Any]) -> dict[str, Any]:
    """By backend: its splits, and the copies of inputs to them."""
    runs = graph["runs"]
    parts: dict[str, dict[str, float]] = {}

    def add(name: str, ns: float, size: float) -> None:
        one = parts.setdefault(name, {"us": 0.0, "count": 0, "bytes": 0})
        one["us"] += ns / runs / 1e3
        one["count"] += 1
        one["bytes"] += round(size / runs)

    for split in graph["splits"]:
        add(f"splits on {split['backend']}", split["ns"], 0)
        for copy in split["inputs"]:
            add(f"copies to {split['backend']}", copy["ns"], copy["bytes"])
    total = graph["ns"] / runs / 1e3
    parts["rest"] = {"us": total - sum(one["us"] for one in parts.values()), "count": 1, "bytes": 0}
    return {"us_a_token": total, "runs": runs, "n_splits": graph["n_splits"], "parts": parts}
