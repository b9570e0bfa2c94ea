"""A comparison for people and for machines: table, JSON, Markdown, JUnit."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from llamafork.paths import write_atomic

IDENTICAL, DIFFERENT = "identical", "different output"


@dataclass(frozen=True)
class Row:
    """One case and its verdict; ``bad`` makes the comparison fail."""

    suite: str
    model: str
    place: str
    verdict: str
    bad: bool
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Report:
    ours: str
    theirs: str
    rows: tuple[Row, ...]

    @property
    def bad(self) -> bool:
        return any(row.bad for row in self.rows)

    def as_dict(self) -> dict[str, object]:
        return {"a": self.ours, "b": self.theirs, "ok": not self.bad, "rows": [asdict(row) for row in self.rows]}


def markdown(report: Report) -> str:
    lines = [
        f"{report.ours} against {report.theirs}",
        "",
        "| suite | model | place | verdict | detail |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.suite} | {r.model} | {r.place} | {r.verdict} | {r.detail.replace('|', '/')} |" for r in report.rows
    ]
    return "\n".join(lines) + "\n"


def junit(report: Report) -> str:
    rows = report.rows
    top = ET.Element("testsuite", name=f"{report.ours} against {report.theirs}", tests=str(len(rows)),
                     failures=str(sum(r.bad for r in rows)))  # fmt: skip
    for row in rows:
        name = f"{row.model} at {row.place}"
        case = ET.SubElement(top, "testcase", classname=row.suite, name=name, time=f"{row.seconds:.3f}")
        if row.bad:
            ET.SubElement(case, "failure", message=row.verdict).text = row.detail
    return ET.tostring(top, encoding="unicode", xml_declaration=True) + "\n"


def write(report: Report, *, markdown_file: str | None, junit_file: str | None) -> Sequence[Path]:
    written = []
    for name, make in ((markdown_file, markdown), (junit_file, junit)):
        if name:
            write_atomic(Path(name), make(report))
            written.append(Path(name))
    return written
