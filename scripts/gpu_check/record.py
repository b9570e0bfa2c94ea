"""The record of a check: written whole after every step, so that whatever ends us, what was found is there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_check.archive import replace
from gpu_check.stage import Outcome, Table

SCHEMA = "llamafork.gpu-check/1"
WAITING, RUNNING, DONE, FAILED, LEFT_OUT, STOPPED = "waiting", "running", "done", "failed", "left out", "interrupted"


@dataclass
class Entry:
    """A stage's part. ``why``: of what is not done; of a failed stage, ``outcome`` is what it had found by then."""

    name: str
    state: str = WAITING
    seconds: float = 0.0
    why: str = ""
    outcome: Outcome = field(default_factory=lambda: Outcome(""))

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "state": self.state,
            "seconds": round(self.seconds, 1),
            "why": self.why,
            "summary": self.outcome.summary,
            "numbers": dict(self.outcome.numbers),
        }


class Record:
    """``head``: date, series, machine, command and the like, as they appear in the files."""

    def __init__(self, out: Path, head: Mapping[str, Any], stages: Sequence[str]) -> None:
        self.out, self.head = out, dict(head)
        self.entries = {name: Entry(name) for name in stages}
        self.write()

    @property
    def ok(self) -> bool:
        """Ended, without a failure, and something was done."""
        states = {one.state for one in self.entries.values()}
        return DONE in states and states <= {DONE, LEFT_OUT}

    @property
    def verdict(self) -> str:
        states = {one.state for one in self.entries.values()}
        if states & {FAILED, STOPPED}:
            return "NOT well"
        if states & {WAITING, RUNNING}:
            return "not finished"
        if DONE not in states:
            return "nothing was done"
        return "well, as far as it went" if LEFT_OUT in states else "all is well"

    def write(self) -> None:
        data = {"schema": SCHEMA, "ok": self.ok, **self.head, "stages": [e.as_dict() for e in self.entries.values()]}
        replace(self.out / "record.json", (json.dumps(data, indent=1) + "\n").encode())
        replace(self.out / "record.md", self.markdown().encode())

    def markdown(self) -> str:
        parts = [f"# GPU check, {self.head.get('date', '')}: {self.verdict}\n\n{self._facts()}"]
        rows = tuple((e.name, e.state, f"{e.seconds:.1f} s" if e.seconds else "", e.outcome.summary, e.why)
                     for e in self.entries.values())  # fmt: skip
        parts += [f"{e.name}:\n\n{_markdown(e.outcome.table)}" for e in self.entries.values() if e.outcome.table]
        return "\n".join([*parts, _markdown(Table(("stage", "state", "time", "found", "why"), rows))])

    def _facts(self) -> str:
        lines = [(name, value) for name, value in self.head.items() if name != "date"]
        return "\n".join(f"- {name}: {_plain(value)}" for name, value in lines) + "\n"


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{name} {_plain(one)}" for name, one in value.items() if one not in ("", None, []))
    if isinstance(value, list | tuple):
        return ", ".join(_plain(one) for one in value)
    return str(value)


def _markdown(table: Table) -> str:
    lines = [table.header, tuple("---" for _ in table.header), *table.rows]
    return "".join(f"| {' | '.join(_cell(one) for one in line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())
