"""The model card: what was measured, and how far another measurement may be from it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

LENGTHS, DEPTHS = (128, 512, 1024, 2048), (1, 2, 3)
BITS_TEXT, ROUTING_TEXT = 32_768, 6_000  # tokens, the first of the held-out text
PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS, TEMPERATURE = 12, 256, 160, 0.8
# Another compiler sums in another order, so that answers part after some words.
TOLERANCE = {"bits": 0.02, "experts": 0.5, "MTP": 0.05, "used": 0.01, "lru": 0.01, "belady": 0.01}
Off = tuple[str, float, float, bool]


def against(found: Mapping[str, float], card: Mapping[str, float]) -> list[Off]:
    """Each number measured, the card's, and whether they agree. A number that either lacks is off."""
    rows = []
    for what in [*card, *(name for name in found if name not in card)]:
        now, then = found.get(what, float("nan")), card.get(what, float("nan"))
        rows.append((what, now, then, abs(now - then) <= TOLERANCE[what.split()[0]]))
    return rows


def falls_short(found: Mapping[str, float], size: int) -> list[str]:
    """What the model must be to stand in for a real one, where it is not; *size* in bytes."""
    wanted = {f"{size} bytes, more than 8 MB": size <= 8_000_000}
    for n in LENGTHS:
        best = found[f"bits of a trigram model at {n}"] * 2 / 3
        wanted[f"at {n} tokens it is not a third better than a trigram model"] = found[f"bits at {n}"] <= best
    for share in (25, 50):
        chance = share / 100  # what a cache of that share of the experts hits if all are used alike
        wanted[f"LRU hits at {share}% are hardly above chance"] = found[f"lru hits at {share}% of slots"] > chance + 0.1
    return [what for what, fine in wanted.items() if not fine]


def markdown(facts: Mapping[str, Any]) -> str:
    """The card for people; *facts* is what the trainer wrote, with ``measured`` by scripts/check-test-model."""
    words, network, got = facts["text"], facts["network"], facts["measured"]
    lengths = sorted({length for _, length in facts["settings"]["windows"]})
    paragraphs = (
        "A small Mixture-of-Experts model in the shape of GLM-4.5 (architecture glm4moe) for tests that need plausible "
        f"text, routing and drafts: {network}, Q8_0. It knows Python's library and manual a little and is good for "
        "nothing else. Made by `scripts/train-test-model --minutes "
        f"{facts['minutes']:g}`; `scripts/check-test-model` measures it again.",
        f"Data: {words['files']} files that ship with Python {facts['python']} (PSF licence), as bytes; "
        f"{words['train'] / 1e6:.2f} M tokens to train on, {words['held_out'] / 1e6:.2f} M held out, whole files.",
        f"Training: {facts['steps']} steps of windows of {' or '.join(map(str, lengths))} tokens "
        f"({facts['tokens'] / 1e6:.1f} M tokens, {facts['minutes']} minutes on {facts['cores']} cores), AdamW, "
        f"PyTorch {facts['torch']}, seed {facts['settings']['seed']}; last loss {facts['loss']:.3f} bits a token, of "
        f"the MTP block {facts['mtp_loss']:.3f}.",
        f"Measured, with our build on the CPU: bits a token over the second half of each window, of the first "
        f"{BITS_TEXT} held-out tokens (a small part, some files); experts over the first {ROUTING_TEXT}, as a prompt; "
        f"drafts after {PROMPTS} prompts of {PROMPT_TOKENS} tokens from all over it, {ANSWER_TOKENS} tokens each "
        f"sampled at temperature {TEMPERATURE}.",
    )
    lines = ["# moe-small: the trained test model"]
    for paragraph in paragraphs:
        lines += ["", textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False)]
    lines += ["", "| measured | |", "|---|---|"]
    for what, value in got.items():
        shown = f"{value:.3f}" if what.startswith("experts") else f"{value:.1%}"
        if what.startswith("bits"):
            shown = f"{value:.3f} (perplexity {2**value:.3f})"
        lines.append(f"| {what} | {shown} |")
    return "\n".join(lines) + "\n"
