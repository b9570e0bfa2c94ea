"""A comparison for people and for machines: table, JSON, Markdown, JUnit, plot."""

from __future__ import annotations

import importlib.util
import io
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from llamafork.errors import EnvironmentFault, UsageError
from llamafork.paths import write_atomic

IDENTICAL, DIFFERENT, LEFT_OUT = "identical", "different output", "left out"
COLORS = {"faster": "tab:green", "no difference": "tab:gray", "slower": "tab:red"}


@dataclass(frozen=True)
class Row:
    """One case and its verdict; ``bad`` makes the comparison fail.

    ``number``: which speed, such as ``pp512``; ``ratio``, ``low``, ``high``: of it, A over B, and the interval that
    holds it.
    """

    suite: str
    model: str
    place: str
    verdict: str
    bad: bool
    detail: str = ""
    seconds: float = 0.0
    number: str = ""
    ratio: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Report:
    ours: str
    theirs: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()  # what must be said beside the numbers

    @property
    def bad(self) -> bool:
        return any(row.bad for row in self.rows)

    def as_dict(self) -> dict[str, object]:
        return {"a": self.ours, "b": self.theirs, "ok": not self.bad, "notes": list(self.notes),
                "rows": [asdict(row) for row in self.rows]}  # fmt: skip


def markdown(report: Report) -> str:
    lines = [
        f"{report.ours} against {report.theirs}",
        "",
        *(line for note in report.notes for line in (note, "")),
        "| suite | model | place | number | verdict | detail |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.suite} | {r.model} | {r.place} | {r.number} | {r.verdict} | {r.detail.replace('|', '/')} |"
        for r in report.rows
    ]
    return "\n".join(lines) + "\n"


def junit(report: Report) -> str:
    rows = report.rows
    top = ET.Element("testsuite", name=f"{report.ours} against {report.theirs}", tests=str(len(rows)),
                     failures=str(sum(r.bad for r in rows)))  # fmt: skip
    if report.notes:
        properties = ET.SubElement(top, "properties")
        for note in report.notes:
            ET.SubElement(properties, "property", name="note", value=note)
    for row in rows:
        name = f"{row.model} at {row.place}" + (f": {row.number}" if row.number else "")
        case = ET.SubElement(top, "testcase", classname=row.suite, name=name, time=f"{row.seconds:.3f}")
        if row.bad:
            ET.SubElement(case, "failure", message=row.verdict).text = row.detail
    return ET.tostring(top, encoding="unicode", xml_declaration=True) + "\n"


def check_plot(suites: Sequence[str]) -> None:
    """Before anything is measured: :class:`UsageError` without speeds, :class:`EnvironmentFault` without matplotlib."""
    if "speed" not in suites:
        raise UsageError("there will be nothing to plot", why="no speed is measured", do="add --suite speed")
    if importlib.util.find_spec("matplotlib") is None:
        raise EnvironmentFault("--plot needs matplotlib", why="it is not installed", do="pip install 'llamafork[plot]'")


def plot(report: Report) -> bytes:
    """A PNG of the speeds: one line a number, A over B with its interval."""
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if row.low is not None]
    figure = Figure(figsize=(8, 1.2 + 0.32 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for at, row in enumerate(rows):
        assert row.ratio is not None and row.low is not None and row.high is not None  # noqa: PT018
        color = COLORS.get(row.verdict, "tab:gray")
        axes.plot([row.low, row.high], [at, at], color=color, linewidth=3, alpha=0.5, solid_capstyle="butt")
        axes.plot(row.ratio, at, "o", color=color)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"{r.model} {r.place} {r.number}" for r in rows])
    axes.invert_yaxis()
    axes.set_xlabel("speed of A over B (more is faster)")
    axes.set_title(f"A: {report.ours}   B: {report.theirs}", fontsize="medium")
    for word, color in COLORS.items():
        axes.plot([], [], "o", color=color, label=word)
    axes.legend(loc="best", fontsize="small")
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=120, metadata={"Software": None})
    return out.getvalue()


def write(
    report: Report, *, markdown_file: str | None, junit_file: str | None, plot_file: str | None = None
) -> Sequence[Path]:
    written = []
    for name, make in ((markdown_file, markdown), (junit_file, junit), (plot_file, plot)):
        if name:
            write_atomic(Path(name), make(report))
            written.append(Path(name))
    return written
