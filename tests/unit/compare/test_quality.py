"""Reading what llama-perplexity says, and what counts as different."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamafork import cli
from llamafork.compare import quality, verbs
from llamafork.errors import UnhealthyError, UsageError

SAID = """\
====== Perplexity statistics ======
Mean PPL(Q)                   : 126.512262 ±   3.107701
Mean PPL(base)                : 126.512209 ±   3.107699
Mean PPL(Q)/PPL(base)         :   1.000000 ±       -nan

====== KL divergence statistics ======
Mean    KLD:   0.000120 ±   0.000001
Maximum KLD:   0.000500
Same top p: 99.900 ± 0.000 %
"""


def test_the_numbers_are_read() -> None:
    assert quality.read(SAID) == quality.Quality(126.512262, 126.512209, 0.00012, 0.0005, 99.9)


@pytest.mark.parametrize(("limit", "worse"), [(1e-4, True), (1.3e-4, False)])
def test_the_limit_is_on_the_mean_divergence(limit: float, worse: bool) -> None:
    assert quality.read(SAID).worse_than(limit) is worse


@pytest.mark.parametrize("broken", ["nan", "inf"])
def test_no_number_is_never_good(broken: str) -> None:
    assert quality.read(SAID.replace("0.000120", "nan")).worse_than(1)
    assert quality.read(SAID.replace("126.512262", broken)).worse_than(1)


def test_a_program_that_says_nothing_is_an_error() -> None:
    with pytest.raises(UnhealthyError, match="kl_max"):
        quality.read(SAID.replace("Maximum", "Largest"))


def test_the_suites_of_the_command_line_are_those_there_are() -> None:
    assert set(cli.SUITES) == {*verbs.SUITES, "cache"}


@pytest.mark.parametrize("name", ["none", "folder", "short", "/dev/zero"])
def test_a_text_that_will_not_do_is_refused_first(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "short").write_text("a few words")
    with pytest.raises(UsageError) as caught:
        quality.check_text(tmp_path / name)
    assert caught.value.do
