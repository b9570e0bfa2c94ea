"""The plot of a comparison, and that it is refused before anything is measured."""

from __future__ import annotations

import struct
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from llamafork.compare import report, verbs
from llamafork.compare.report import Report, Row
from llamafork.errors import EnvironmentFault, UsageError

SPEEDS = (
    Row("speed", "m.gguf", "cpu", "slower", bad=True, number="tg32", ratio=0.9, low=0.88, high=0.93),
    Row("speed", "m.gguf", "cpu", "no difference", bad=False, number="pp64", ratio=1.0, low=0.97, high=1.02),
    Row("speed", "m.gguf", "sim", "faster", bad=False, number="start", ratio=1.5, low=1.4, high=1.6),
)


def size(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def test_the_plot_has_a_line_for_each_speed_and_none_for_what_has_no_ratio() -> None:
    identical = Row("identity", "m.gguf", "cpu", report.IDENTICAL, bad=False)
    two = report.plot(Report("ours", "stock", SPEEDS[:2]))
    assert report.plot(Report("ours", "stock", (*SPEEDS[:2], identical))) == two
    assert size(report.plot(Report("ours", "stock", SPEEDS)))[1] > size(two)[1]


def test_it_is_written_whole_beside_the_others(tmp_path: Path) -> None:
    files = {name: str(tmp_path / name) for name in ("a.md", "b.xml", "c.png")}
    one, two, three = files.values()
    done = report.write(Report("ours", "stock", SPEEDS), markdown_file=one, junit_file=two, plot_file=three)
    assert [path.name for path in done] == list(files)
    assert sorted(path.name for path in tmp_path.iterdir()) == list(files)
    size((tmp_path / "c.png").read_bytes())


def test_it_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    report.check_plot(["identity", "speed"])
    with pytest.raises(UsageError, match="nothing to plot"):
        report.check_plot(["identity"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match="matplotlib"):
        report.check_plot(["speed"])


def test_each_number_has_a_name_of_its_own_for_ci() -> None:
    names = [case.get("name") for case in ET.fromstring(report.junit(Report("ours", "stock", SPEEDS)))]
    assert names == ["m.gguf at cpu: tg32", "m.gguf at cpu: pp64", "m.gguf at sim: start"]
    assert "| m.gguf | cpu | tg32 | slower |" in report.markdown(Report("ours", "stock", SPEEDS))


def test_two_reports_are_two_files(tmp_path: Path) -> None:
    verbs.check_reports([tmp_path / "a", tmp_path / "b", Path("/dev/null"), Path("/dev/null")])
    with pytest.raises(UsageError, match="two reports have the name"):
        verbs.check_reports([tmp_path / "a", tmp_path / "a"])
