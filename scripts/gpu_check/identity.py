"""Stage identity: fork and stock give the same logits on the device, bit for bit, with every feature off."""

from __future__ import annotations

import hashlib
from pathlib import Path

from gpu_check import model
from gpu_check.programs import checked
from gpu_check.stage import Context, Outcome
from llamafork.errors import LlamaforkError, UnhealthyError

TEXT = "The expert cache keeps the experts in use in the memory of the device, and the host computes the rest.\n" * 4
KINDS = ("fork", "stock")


def compare(ctx: Context) -> Outcome:
    """With all layers on the device and with the experts on the host, one token and 512 at once."""
    text = ctx.work / "identity.txt"
    text.write_text(TEXT, encoding="utf-8")
    layers = ctx.found["model"]["layers"]
    found: dict[str, dict[str, str]] = {}
    for place, host in (("all on the device", 0), ("experts on the host", layers)):
        for width in (1, 512):
            found[f"{place}, {width} at once"] = {kind: _logits(ctx, kind, text, host, width) for kind in KINDS}
    different = [what for what, one in found.items() if one["fork"] != one["stock"]]
    outcome = Outcome(
        f"{len(found) - len(different)} of {len(found)} placements the same, bit for bit", {"logits": found}
    )
    if different:
        ctx.keep(outcome)
        raise LlamaforkError(
            "fork and stock differ on the device", why="; ".join(different), do="record.json has hashes"
        )
    return outcome


def cost(ctx: Context) -> float:
    return 10.0 if ctx.options.backend == "sim" else 60.0


def _logits(ctx: Context, kind: str, text: Path, host: int, width: int) -> str:
    out = ctx.work / "logits.gguf"
    out.unlink(missing_ok=True)
    program = ctx.programs(kind) / "llama-results"
    work = ["-c", "1024", "-b", "512", "-ub", str(width), "-t", str(ctx.options.threads)]
    checked(ctx.run([program, *model.placed(ctx, host), *work, "-f", text, "-o", out]))
    if not out.is_file():
        raise UnhealthyError(f"llama-results of {kind} wrote no logits")
    return hashlib.sha256(out.read_bytes()).hexdigest()
