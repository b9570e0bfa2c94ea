"""Stages cache-output and cache-audit: the expert cache says what --cpu-moe says, and slots hold what they should."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_check import devices, model
from gpu_check.programs import Done, checked
from gpu_check.stage import SIM_DEVICE, Context, Outcome, Table
from llamafork.errors import LlamaforkError, UnhealthyError

LENGTH = 256  # tokens, of which llama-perplexity judges the second half
LEAST_KL = 1e-4  # nats; and as much again as whole layers on the device differ from the host
OF_CONTROL = 3.0
NUMBERS = {
    "ppl": re.compile(r"^Mean PPL\(Q\)\s*:\s*(\S+)", re.MULTILINE),
    "ppl_base": re.compile(r"^Mean PPL\(base\)\s*:\s*(\S+)", re.MULTILINE),
    "kl": re.compile(r"^Mean\s+KLD:\s*(\S+)", re.MULTILINE),
    "same_top": re.compile(r"^Same top p:\s*(\S+)", re.MULTILINE),
}
STATS = re.compile(r"expert cache: ([\d.]+) % hits, (\d+) uploads .*?(\d+) decodes with it, (\d+) without")
DEVICE = re.compile(r"expert cache: (\w+): \d+ slots in each of")
OFF = re.compile(r"expert cache: (off: .*|not served: .*)")
HEADER = ("tokens at once", "placement", "mean KL, nats", "PPL", "PPL of --cpu-moe", "same best, %", "hits, %")


def skips(ctx: Context) -> bool:
    """Whether the device was seen to know ids of -1; else misses read a slot of zeros."""
    return ctx.options.backend == "sim" or "skip-ids" in ctx.found


def environment(ctx: Context, **more: str) -> dict[str, str]:
    known = {"GGML_CUDA_SKIP_IDS": "1"} if skips(ctx) else {}
    return ctx.environment(**known, **{f"LLAMA_MOE_CACHE_{name}": value for name, value in more.items()})


def slots(facts: Mapping[str, Any], share: float) -> int:
    return round(int(facts["spec"]["n_expert"]) * share)


def output(ctx: Context) -> Outcome:
    """KL divergence from --cpu-moe with the same batches; half of the layers on the device show what rounding does."""
    facts = ctx.found["model"]
    layers, some = facts["layers"], slots(facts, 0.5)
    placed = {
        "whole layers": [*model.placed(ctx, layers // 2)],
        "cache": [*model.placed(ctx, layers), "--moe-expert-cache", str(some)],
    }
    found: dict[str, Any] = {}
    rows: list[tuple[str, ...]] = []
    for width in (1, 8 if skips(ctx) else 4):
        base = ctx.work / "kl.base"
        base.unlink(missing_ok=True)
        checked(_perplexity(ctx, [*model.placed(ctx, layers)], width, base))
        for name, words in placed.items():
            done = checked(_perplexity(ctx, [*words, "--kl-divergence"], width, base))
            one = _numbers(done) | (used(done) if name == "cache" else {})
            found[f"{name}, {width} at once"] = one
            cells = (f"{one['kl']:.3g}", f"{one['ppl']:.4f}", f"{one['ppl_base']:.4f}", f"{one['same_top']:.2f}")
            rows.append((str(width), name, *cells, f"{one['hits']:.1f}" if "hits" in one else ""))
        base.unlink(missing_ok=True)
        ctx.keep(Outcome(f"{len(rows)} of 4 runs", found, Table(HEADER, tuple(rows))))
        _judge(found[f"cache, {width} at once"]["kl"], found[f"whole layers, {width} at once"]["kl"], width)
    worst = max(one["kl"] for name, one in found.items() if name.startswith("cache"))
    return Outcome(f"mean KL to --cpu-moe at most {worst:.3g} nats", found, Table(HEADER, tuple(rows)))


def audit(ctx: Context) -> Outcome:
    """Slots against their source at each step: with other experts in each, with uploads that go on meanwhile, and on
    two devices, which are one card twice.
    """
    facts = ctx.found["model"]
    few = int(facts["spec"]["n_expert_used"]) + 1
    runs: dict[str, tuple[int, int, dict[str, str]]] = {
        "as few slots as possible": (1, few, {"WAIT": "1"}),
        "half of the experts": (1, slots(facts, 0.5), {}),
        "half of the experts, two devices": (2, slots(facts, 0.5), {}),
    }
    found: dict[str, Any] = {}
    for name, (count, n_slots, settings) in runs.items():
        words = [*model.placed(ctx, facts["layers"]), "--moe-expert-cache", str(n_slots)]
        done = checked(
            _perplexity(ctx, words, 1, None, n_devices=count, AUDIT="64", POLICY="lru", BUDGET="64", **settings)
        )
        found[name] = used(done)
        if not found[name]["uploads"] or len(found[name]["devices"]) != count:
            why = f"{name}: {found[name]['uploads']} uploads to {', '.join(found[name]['devices'])}"
            raise UnhealthyError("not all that was to be audited was there", why=why, do="see log.txt")
    uploads = sum(one["uploads"] for one in found.values())
    return Outcome(f"{uploads} uploads, 64 slots looked at in each of {LENGTH} steps, no difference", found)


def output_cost(ctx: Context) -> float:
    return 15.0 if ctx.options.backend == "sim" else 60.0


def audit_cost(ctx: Context) -> float:
    return 10.0 if ctx.options.backend == "sim" else 30.0


def used(done: Done) -> dict[str, Any]:
    """What the cache said of itself at its end. One that was off or did nothing is a failure, with its reason."""
    said = done.out + done.err
    last = STATS.search(said)
    if last is None or not int(last[3]):
        why = OFF.search(said)
        raise UnhealthyError("the expert cache was not used", why=why[1] if why else done.last, do="see log.txt")
    seen = list(dict.fromkeys(DEVICE.findall(said)))
    return {"hits": float(last[1]), "uploads": int(last[2]), "steps": int(last[3]), "devices": seen}


def _judge(kl: float, control: float, width: int) -> None:
    limit = max(LEAST_KL, OF_CONTROL * abs(control))
    if not abs(kl) <= limit:
        raise LlamaforkError(
            f"the cache's output is not that of --cpu-moe, {width} tokens at once",
            why=f"mean KL {kl:.3g} nats; whole layers on the device differ by {control:.3g}",
            do="record.md has the table",
        )


def _perplexity(
    ctx: Context, words: list[str | Path], width: int, base: Path | None, n_devices: int = 1, **settings: str
) -> Done:
    text = ctx.work / "cache.txt"
    if not text.is_file():
        from pydoc_data.topics import topics

        text.write_text("\n".join(topics[key] for key in sorted(topics))[:20_000], encoding="utf-8")
    program = ctx.programs("fork") / "llama-perplexity"
    batch = ["-c", str(LENGTH), "--chunks", "1", "-b", str(LENGTH), "-ub", str(width)]
    work: list[str | Path] = ["-f", text, *batch, "-fit", "off", "-t", str(ctx.options.threads), "-lv", "4"]
    kept: list[str | Path] = ["--kl-divergence-base", base] if base else []
    env = environment(ctx, STATS="1", **settings)
    if n_devices > 1:
        env |= {"GGML_CUDA_DEVICES": str(n_devices), "GGML_SIM_DEVICES": ";".join([SIM_DEVICE] * n_devices)}
        name = devices.first(ctx).rstrip("0123456789")
        kept += ["-dev", ",".join(f"{name}{number}" for number in range(n_devices))]  # the last one counts
    return ctx.run([program, *words, *work, *kept], env=env)


def _numbers(done: Done) -> dict[str, Any]:
    said = done.out + done.err
    found = {name: pattern.search(said) for name, pattern in NUMBERS.items()}
    missing = [name for name, match in found.items() if match is None]
    if missing:
        raise UnhealthyError(f"llama-perplexity did not say {', '.join(missing)}", why=done.last, do="see log.txt")
    return {name: float(match[1]) for name, match in found.items() if match}
