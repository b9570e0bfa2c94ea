"""The expert cache against the stock twin: speeds, what overlap leaves, what uploads cost."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from llamafork import console
from llamafork.compare.cache import overlap, servers, verdict
from llamafork.compare.cache.overlap import Branches, Profile
from llamafork.compare.cache.servers import CACHE, CPU_MOE, FIT, SMALL, Round
from llamafork.compare.cache.work import CachePlace, Size, Workload, model
from llamafork.compare.journal import Journal
from llamafork.compare.report import Row
from llamafork.compare.speed import Pair


def run(pair: Pair, at: CachePlace, work: Workload, size: Size, folder: Path, kept: Journal) -> list[Row]:
    """The rows of one workload at one place. Models are kept in *folder*."""
    file = model(folder, work, size)
    names = (CACHE, SMALL, CPU_MOE) if work.goal is None else (CACHE, CPU_MOE, FIT)
    key = f"cache {size.name} {work.name} {at.place.name}"
    with ExitStack() as stack, console.step(key) as shown:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="llamafork-compare-")))
        session, profile = None, None
        if work.goal is not None and f"{key} profile" not in kept.done:
            shown.update("profile")
            session = overlap.Session(stack, pair[0], at, file, size, scratch)
        rounds = []
        for number in range(size.rounds):
            shown.update(f"round {number + 1} of {size.rounds}")
            made = kept.step(f"{key} {number}", partial(_round, pair, at, file, names, size, scratch, number))
            rounds.append(Round(**made))
            if session is not None:  # a turn a round: what disturbs the machine disturbs both
                session.turn(number)
        if work.goal is not None:
            profile = _profile(kept.step(f"{key} profile", partial(_result, session)))
    return verdict.rows(work, at.place.name, rounds, profile, judged=size.judged)


def _round(
    pair: Pair, at: CachePlace, file: Path, names: Sequence[str], size: Size, scratch: Path, number: int
) -> dict[str, Any]:
    return asdict(servers.round_of(pair, at, file, names, size, scratch, number))


def _result(session: overlap.Session | None) -> dict[str, Any]:
    assert session is not None
    return asdict(session.result())


def _profile(made: dict[str, Any]) -> Profile:
    """As it was before it went through JSON."""
    stock, fork, serial, both = (Branches(**made[name]) for name in ("stock", "fork", "serial", "both"))
    return Profile(stock, fork, serial, both, made["outside"], made["rate"], tuple(made["rates"]))
