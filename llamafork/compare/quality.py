"""Does it still say the same? KL divergence and perplexity of A at a place against B on the CPU, by llama-perplexity.

For modes whose arithmetic is not the reference's, so that bits differ: another device's kernels, another order of sums.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from llamafork import proc
from llamafork.compare.target import PLACES, Place, Target, at, environment
from llamafork.errors import UnhealthyError, UsageError
from llamafork.paths import show

CONTEXT, CHUNKS = 512, 8
LAST, TRIES = "Same top p:", 5  # the program may end before its log is written
NUMBERS = {
    "ppl": re.compile(r"^Mean PPL\(Q\)\s*:\s*(\S+)", re.MULTILINE),
    "ppl_base": re.compile(r"^Mean PPL\(base\)\s*:\s*(\S+)", re.MULTILINE),
    "kl": re.compile(r"^Mean\s+KLD:\s*(\S+)", re.MULTILINE),
    "kl_max": re.compile(r"^Maximum KLD:\s*(\S+)", re.MULTILINE),
    "same_top": re.compile(r"^Same top p:\s*(\S+)", re.MULTILINE),
}


@dataclass(frozen=True)
class Quality:
    """Perplexities, KL divergence in nats (mean and largest over tokens), how often the best token is the same (%)."""

    ppl: float
    ppl_base: float
    kl: float
    kl_max: float
    same_top: float

    def worse_than(self, limit: float) -> bool:
        """Whether the mean divergence is beyond *limit* nats, or no number at all."""
        return not (math.isfinite(self.ppl) and abs(self.kl) <= limit)


def check_text(file: Path) -> None:
    """Raises :class:`UsageError` for a text that cannot be read or is too short; a token has a byte or more."""
    least = 2 * CONTEXT
    try:
        size = file.stat().st_size if file.is_file() else None
    except OSError:
        size = None
    if size is None or not os.access(file, os.R_OK):
        raise UsageError(f"--text {show(file)} is no file that can be read", do="name a text file")
    if size < least:
        raise UsageError(
            f"--text {show(file)} is too short", why=f"{size} bytes; it takes {least} tokens", do="name a longer text"
        )


def text(file: Path) -> None:
    """Write the default text: the manual that ships with Python, in a fixed order."""
    from pydoc_data.topics import topics

    file.write_text("\n".join(topics[key] for key in sorted(topics))[:40_000], encoding="utf-8")


def run(ours: Target, theirs: Target, place: Place, model: Path, scratch: Path, source: Path | None = None) -> Quality:
    """B on the CPU writes its distributions, A at *place* is held against them."""
    words = source or scratch / "text"
    if source is None:
        text(words)
    base = scratch / "base"
    common = ["-m", str(model), "-f", str(words), "-c", str(CONTEXT), "--chunks", str(CHUNKS), "-t", "1", "--no-warmup",
              "--kl-divergence-base", str(base)]  # fmt: skip
    _run(theirs, [*common, "-ngl", "0", "-nr"], environment(PLACES["cpu"]))
    with at(place, ours) as args:
        for _ in range(TRIES):
            said = _run(ours, [*common, *args, "-nr", "--kl-divergence"], environment(place))
            if LAST in said:
                break
    return read(said)


def _run(target: Target, words: list[str], env: Mapping[str, str]) -> str:
    done = proc.run([target.program("llama-perplexity"), *words], env=env, timeout=3600, guarded=True)
    if not done.ok:
        last = (done.err or done.out).strip().splitlines()[-1:] or [f"exit {done.code}"]
        raise UnhealthyError(f"llama-perplexity of {target.name} failed", why=last[0][:300])
    return done.out + done.err


def read(said: str) -> Quality:
    """The numbers of ``--kl-divergence``. Raises :class:`UnhealthyError` when one is not there."""
    found = {name: pattern.search(said) for name, pattern in NUMBERS.items()}
    missing = [name for name, match in found.items() if match is None]
    if missing:
        raise UnhealthyError(f"llama-perplexity did not say {', '.join(missing)}", why=said.strip()[-200:])
    return Quality(**{name: float(match[1]) for name, match in found.items() if match})
