"""Stage model: the model for measuring, made on the spot, since none of that size could be brought along."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from gpu_check import archive, devices
from gpu_check.programs import checked
from gpu_check.stage import Context, Outcome

MAKER = Path(__file__).resolve().parent / "model_maker.py"


def file(ctx: Context) -> Path:
    return ctx.work / "model" / "bench.gguf"


def placed(ctx: Context, host: int) -> list[str | Path]:
    """Arguments of a program: all layers on the device, the experts of *host* of them in host memory."""
    return ["-m", file(ctx), "-dev", devices.first(ctx), "-ngl", "99", "-ncmoe", str(host)]


def make(ctx: Context) -> Outcome:
    facts = _kept(ctx)
    if facts is None:
        shutil.rmtree(file(ctx).parent, ignore_errors=True)
        file(ctx).parent.mkdir(parents=True)
        python = [sys.executable, "-B", *(["-S"] if sys.flags.no_site else [])]
        done = checked(ctx.run([*python, MAKER, file(ctx), str(_size(ctx))], env=_environment(ctx)))
        facts = json.loads(done.out)
        facts["seconds"] = round(done.seconds, 1)
        archive.replace(_stamp(ctx), json.dumps(facts | {"asked": _identity(ctx)}).encode())
    rates = ", ".join(f"{100 * float(share):g} %: {rate:.1%}" for share, rate in facts["lru_hit_rates"].items())
    summary = (
        f"{facts['name']}, {facts['bytes'] / 1e9:.2f} GB, of them experts {facts['expert_bytes'] / 1e9:.2f} GB in "
        f"{facts['layers']} layers; hits of LRU caches (estimate): {rates}"
    )
    return Outcome(summary, facts)


def cost(ctx: Context) -> float:
    return 1.0 if _kept(ctx) else 5 + 4 * ctx.options.model_gib


def _size(ctx: Context) -> int:
    return int(ctx.options.model_gib * (1 << 30))


def _stamp(ctx: Context) -> Path:
    return file(ctx).with_suffix(".json")


def _identity(ctx: Context) -> list[object]:
    made_by = ctx.archive.below("repo/llamafork") | ctx.archive.below("site")
    return [archive.digest(made_by), MAKER.read_text(encoding="utf-8"), ctx.options.model_gib]


def _kept(ctx: Context) -> dict[str, Any] | None:
    try:
        facts: dict[str, Any] = json.loads(_stamp(ctx).read_text(encoding="utf-8"))
        whole = file(ctx).stat().st_size == facts["bytes"]
        return facts if whole and facts.pop("asked") == _identity(ctx) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _environment(ctx: Context) -> dict[str, str]:
    """Our package and gguf from the archive: nothing but numpy is taken from this machine."""
    tree = ctx.work / "python"
    for top in ("repo", "site"):
        archive.sync(tree / top, ctx.archive.below(top))
    path = [str(tree / "repo"), str(tree / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return ctx.environment() | {"PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}
