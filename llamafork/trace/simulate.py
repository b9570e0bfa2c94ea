"""What a cache policy would have hit on a recorded trace: LRU and LFU to compare with, Belady as the limit.

A layer has a fixed number of slots and starts empty. For each token the experts it uses are looked up in what was there
before the token; then the policy may change what is there, and each expert it brings in is one upload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llamafork.trace.format import Trace

Uses = NDArray[np.uint16]  # [tokens, n_used] of one layer


class Policy(Protocol):
    """The slots of one layer. ``resident`` is what is there now; ``step`` sees a token's experts, returns uploads."""

    @property
    def resident(self) -> set[int]: ...
    def step(self, used: Sequence[int]) -> int: ...


Maker = Callable[[int, int, Uses], Policy]  # slots, n_expert, the layer's whole future (only Belady looks at it)


@dataclass(frozen=True)
class Score:
    """Of one policy at one number of slots, all layers together; ``layers`` holds the hit rate of each."""

    policy: str
    slots: int
    lookups: int
    hits: int
    uploads: int
    layers: tuple[float, ...]

    @property
    def rate(self) -> float:
        return self.hits / self.lookups if self.lookups else 0.0

    @property
    def hits_per_upload(self) -> float:
        return self.hits / self.uploads if self.uploads else float("inf") if self.hits else 0.0


class Lru:
    """Every miss is brought in, in place of what was used longest ago."""

    def __init__(self, slots: int, n_expert: int, future: Uses) -> None:
        self.slots = slots
        self.last: dict[int, int] = {}  # in order of use

    @property
    def resident(self) -> set[int]:
        return set(self.last)

    def step(self, used: Sequence[int]) -> int:
        missing = [e for e in used if e not in self.last]
        for expert in used:
            self.last.pop(expert, None)
            self.last[expert] = 0
        while len(self.last) > self.slots:
            self.last.pop(next(iter(self.last)))
        return sum(1 for e in missing if e in self.last)


class Lfu:
    """A miss comes in, in place of what has the least use, if its own is more; use halves every *half_life* tokens."""

    def __init__(self, slots: int, n_expert: int, future: Uses, half_life: float = 256.0) -> None:
        self.slots = slots
        self.decay = 0.5 ** (1.0 / half_life)
        self.score = np.zeros(n_expert)
        self.there: set[int] = set()

    @property
    def resident(self) -> set[int]:
        return self.there

    def step(self, used: Sequence[int]) -> int:
        self.score *= self.decay
        for expert in used:
            self.score[expert] += 1.0
        uploads = 0
        for expert in used:
            if expert in self.there:
                continue
            if len(self.there) >= self.slots:
                victim = min(self.there, key=lambda e: (self.score[e], e))
                if self.score[victim] >= self.score[expert]:
                    continue
                self.there.remove(victim)
            self.there.add(expert)
            uploads += 1
        return uploads


class Belady:
    """Knows the future: keeps the experts whose next use is soonest, and brings in none whose use is later."""

    def __init__(self, slots: int, n_expert: int, future: Uses) -> None:
        self.slots, self.now = slots, 0
        self.next_use = _next_uses(future, n_expert)
        self.there: dict[int, int] = {}  # expert -> its next use

    @property
    def resident(self) -> set[int]:
        return set(self.there)

    def step(self, used: Sequence[int]) -> int:
        before = set(self.there)
        coming = {expert: int(when) for expert, when in zip(used, self.next_use[self.now], strict=True)}
        never = len(self.next_use)
        wanted = {e: when for e, when in coming.items() if e in before or when < never}
        soonest = sorted((self.there | wanted).items(), key=lambda entry: entry[1])[: self.slots]
        self.there = dict(soonest)
        self.now += 1
        return len(self.there.keys() - before)


def _next_uses(future: Uses, n_expert: int) -> NDArray[np.int64]:
    """[tokens, n_used]: the next token that uses the same expert, the trace's length if none does."""
    out = np.empty(future.shape, dtype=np.int64)
    coming = np.full(n_expert, len(future), dtype=np.int64)
    for token in range(len(future) - 1, -1, -1):
        out[token] = coming[future[token]]
        coming[future[token]] = token
    return out


POLICIES: dict[str, Maker] = {"lru": Lru, "lfu": Lfu, "belady": Belady}


def run(trace: Trace, policy: str, slots: int, *, skip: int = 0) -> Score:
    """Play *trace* through one policy. The first *skip* tokens fill the cache and are not counted."""
    rates: list[float] = []
    hits = uploads = lookups = 0
    for layer in range(len(trace.layers)):
        uses = trace.experts[:, layer, :]
        got, brought = play(POLICIES[policy](slots, trace.n_expert, uses), uses, skip)
        here = max(0, len(trace) - skip) * trace.n_used
        rates.append(got / here if here else 0.0)
        hits, uploads, lookups = hits + got, uploads + brought, lookups + here
    return Score(policy, slots, lookups, hits, uploads, tuple(rates))


def play(policy: Policy, uses: Uses, skip: int) -> tuple[int, int]:
    """Hits and uploads of one layer, without those of the first *skip* tokens."""
    hits = uploads = 0
    for token, row in enumerate(uses.tolist()):
        there = policy.resident
        found = sum(1 for expert in row if expert in there)
        brought = policy.step(row)
        if token >= skip:
            hits, uploads = hits + found, uploads + brought
    return hits, uploads
