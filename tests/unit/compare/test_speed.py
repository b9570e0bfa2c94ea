"""The verdict on speed: pure functions over ratios."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamafork.compare import speed, target
from llamafork.compare.speed import FASTER, SAME, SLOWER, Work
from llamafork.errors import UnhealthyError

BENCH = """#!/usr/bin/env python3
import json, sys
words = sys.argv[1:]
value = lambda flag: words[words.index(flag) + 1]
lengths = [int(p) for p in value("-p").split(",") if p != "0"]
rows = [{"n_prompt": p, "n_gen": 0, "n_depth": 0, "samples_ts": [100.0, 1.0, 101.0]} for p in lengths]
if value("-n") != "0":
    rows += [{"n_prompt": 0, "n_gen": int(value("-n")), "n_depth": int(d), "samples_ts": [50.0 - int(d) / 100]}
             for d in value("-d").split(",")]
print(json.dumps(rows))
"""


@pytest.mark.parametrize(
    ("n", "drop"), [(1, 0), (3, 0), (5, 0), (6, 0), (7, 0), (8, 0), (9, 1), (11, 1), (12, 2), (17, 4)]
)
def test_the_interval_is_the_sign_tests(n: int, drop: int) -> None:
    """As in tables of order statistics: of 9 values the second and the eighth hold the median at 96 %."""
    assert speed.interval_drop(n) == drop


def noisy(centre: float, sigma: float, seed: int, n: int = 9) -> list[float]:
    rng = random.Random(seed)
    return [centre * rng.lognormvariate(0, sigma) for _ in range(n)]


@pytest.mark.parametrize(("centre", "word"), [(1.0, SAME), (0.9, SLOWER), (1.1, FASTER)])
def test_ten_percent_shows_and_nothing_does_not(centre: float, word: str) -> None:
    assert {speed.judge(noisy(centre, 0.02, seed)).word for seed in range(40)} == {word}


def test_noise_alone_is_no_verdict() -> None:
    words = [speed.judge(noisy(1.0, 0.15, seed)).word for seed in range(200)]
    assert words.count(SAME) >= 190


def test_one_wild_round_does_not_decide() -> None:
    assert speed.judge([1.0] * 8 + [0.2]).word == SAME
    assert speed.judge([0.9] * 8 + [3.0]).word == SLOWER


@given(st.lists(st.floats(0.2, 5), min_size=1, max_size=30), st.floats(0, 0.2))
def test_the_verdict_turns_round_when_a_and_b_are_swapped(values: list[float], threshold: float) -> None:
    one = speed.judge(values, threshold=threshold)
    assert one.low <= one.ratio <= one.high
    if one.word == FASTER:
        assert min(1 / v for v in values) < 1
        assert speed.judge([1 / v for v in values], threshold=threshold / 2 / (1 + threshold)).word == SLOWER


def test_what_llama_bench_says_is_read(tmp_path: Path) -> None:
    program = tmp_path / "llama-bench"
    program.write_text(BENCH)
    program.chmod(0o755)
    made = target.Target("x", tmp_path)
    found = speed.measure(made, target.PLACES["cpu"], tmp_path / "m.gguf", Work((8, 16), 4, (0, 100)))
    assert found.pop("start") > 0
    assert found == {"pp8": 100, "pp16": 100, "tg4": 50, "tg4@100": 49}
    assert speed.ratios([found, found], [{**found, "tg4": 100}, found])["tg4"] == [0.5, 1]
    program.write_text("#!/bin/sh\necho boom >&2; exit 3\n")
    with pytest.raises(UnhealthyError, match="llama-bench of x failed"):
        speed.measure(made, target.PLACES["cpu"], tmp_path / "m.gguf", Work())
