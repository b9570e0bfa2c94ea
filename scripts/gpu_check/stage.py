"""What a stage is, what it may use, and which stages fit into the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_check import programs
from gpu_check.archive import Archive
from gpu_check.programs import Done, Log
from llamafork.errors import UsageError
from llamafork.proc import Args, plain_environment

SIM_DEVICE = "mem=8G"


@dataclass(frozen=True)
class Table:
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Outcome:
    """What a stage found: a line for people, numbers for programs, and a table if a line is not enough."""

    summary: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    table: Table | None = None


@dataclass(frozen=True)
class Options:
    """``prefill`` and ``decode``: tokens of a measurement, repeated for ``rounds``. ``threads``: of the host, where a
    program computes.
    """

    backend: str
    arch: str = "90"
    model_gib: float = 12.0
    jobs: int = 1
    minutes: float = 10.0
    threads: int = 1
    prefill: int = 2048
    decode: int = 64
    rounds: int = 7
    cmake: tuple[str, ...] = ()


@dataclass
class Context:
    """``ends``: when the budget is spent (monotonic). ``reserve``: seconds of it that later stages need."""

    options: Options
    archive: Archive
    out: Path
    work: Path
    log: Log
    ends: float
    reserve: float = 0.0
    found: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    keep: Callable[[Outcome], None] = lambda outcome: None

    def left(self) -> float:
        """Seconds that the stage at work may still take."""
        return self.ends - time.monotonic() - self.reserve

    def run(
        self, args: Args, *, most: float = 3600.0, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> Done:
        """Run a program in what time is left, *most* seconds at most."""
        return programs.run(args, limit=min(most, self.left()), log=self.log, env=env or self.environment(), cwd=cwd)

    def programs(self, kind: str) -> Path:
        return self.work / "programs" / kind

    def environment(self, **more: str) -> dict[str, str]:
        """For a built program: nothing of the user's that would change what is measured."""
        sim = {"GGML_SIM_DEVICES": SIM_DEVICE} if self.options.backend == "sim" else {}
        return {**plain_environment(), "LC_ALL": "C", "GGML_NO_BACKTRACE": "1", **sim, **more}


@dataclass(frozen=True)
class Stage:
    """``needs``: stages that must be done before. ``cost``: seconds it will take, about. Of what does not fit
    together, stages with the smaller ``priority`` are run.
    """

    name: str
    work: Callable[[Context], Outcome]
    cost: Callable[[Context], float]
    priority: int
    needs: tuple[str, ...] = ()


def choose(table: Sequence[Stage], names: Collection[str]) -> list[Stage]:
    """The stages named and what they need, in the table's order; none named means all."""
    known = {stage.name: stage for stage in table}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"no stage is called {unknown[0]!r}", do=f"one of: {', '.join(known)}")
    wanted: set[str] = set()
    for name in names or known:
        wanted |= {name} | _all_needs(known, name)
    return [stage for stage in table if stage.name in wanted]


def affordable(stages: Sequence[Stage], costs: Mapping[str, float], seconds: float) -> list[str]:
    """Which of *stages*, none of which has run, to run in *seconds*: by priority, each with what it needs."""
    waiting = {stage.name: stage for stage in stages}
    kept: set[str] = set()
    for stage in sorted(stages, key=lambda one: one.priority):
        more = ({stage.name} | _all_needs(waiting, stage.name)) - kept
        price = sum(costs[name] for name in more)
        if price <= seconds:
            kept |= more
            seconds -= price
    return [stage.name for stage in stages if stage.name in kept]


def reserve(stage: Stage, later: Sequence[Stage], costs: Mapping[str, float]) -> float:
    """Seconds for those *later* stages that do not need *stage*: it must not take their time."""
    known = {one.name: one for one in (stage, *later)}
    return sum(costs[one.name] for one in later if stage.name not in _all_needs(known, one.name))


def _all_needs(known: Mapping[str, Stage], name: str) -> set[str]:
    """What *name* needs, and what that needs; stages that are not *known* are behind us."""
    found: set[str] = set()
    for one in known[name].needs:
        if one in known:
            found |= {one} | _all_needs(known, one)
    return found
