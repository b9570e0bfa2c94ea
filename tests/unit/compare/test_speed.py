"""The verdict on speed: pure functions over ratios."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamafork.compare import speed, target
from llamafork.compare.speed import FASTER, SAME, SLOWER, Work
from llamafork.errors import UnhealthyError

# Starts, tokenizes a byte to a token, and says it needed 10 ms a token read and WAIT ms a token written.
SERVER = """#!{python}
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
words = sys.argv[1:]
wait = float(os.environ.get("WAIT", "20"))
with open({asked!r}, "a") as asked:
    print(os.environ.get("WAIT", "-"), *words, file=asked)
class Handler(BaseHTTPRequestHandler):
    def answer(self, data):
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer({{"status": "ok"}})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            return self.answer({{"tokens": list(body["content"].encode())}})
        n, m = len(body["prompt"]), body["n_predict"]
        made = m - {short}
        self.answer({{"timings": dict(prompt_n=n, prompt_ms=10.0 * n, predicted_n=made, predicted_ms=wait * made)}})
    def log_message(self, *_):
        pass
HTTPServer(("127.0.0.1", int(words[words.index("--port") + 1])), Handler).serve_forever()
"""


def fake(folder: Path, *, short: int = 0, bench: str = "exit 0", flags: str = "--no-warmup") -> target.Target:
    """Programs that take no time but say they did; ``short``: tokens that the server does not write."""
    for name, text in (
        ("llama-server", SERVER.format(python=sys.executable, asked=str(folder / "asked"), short=short)),
        ("llama-bench", f'#!/bin/sh\n[ "$1" = --help ] && {{ echo {flags}; exit; }}\n{bench}\n'),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return target.Target("x", folder)


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


WORK = Work((8, 16), 4, repeat=1)
CPU = target.PLACES["cpu"]


def test_a_round_asks_both_for_the_same(tmp_path: Path) -> None:
    made = fake(tmp_path)
    ours, theirs = speed.round_of((made, made), CPU, tmp_path / "m.gguf", WORK, tmp_path / "s", {"WAIT": "25"})
    assert len(ours.pop("start")) == len(theirs.pop("start")) == 2
    same = {"pp8": [100.0] * 2, "pp16": [100.0] * 2}
    assert theirs == {**same, "tg4": [50.0] * 2, "tg4@16": [50.0] * 2}
    assert ours == {**same, "tg4": [40.0] * 2, "tg4@16": [40.0] * 2}
    assert speed.ratios([ours, ours], [theirs, theirs])["tg4@16"] == pytest.approx([0.8, 0.8])
    one, two = ((tmp_path / "asked").read_text()).splitlines()
    assert one.startswith("25 -m") and two.startswith("- -m")  # noqa: PT018
    assert "-c 256 -np 1" in one


def test_less_work_than_asked_for_is_no_speed(tmp_path: Path) -> None:
    made = fake(tmp_path, short=1)
    with pytest.raises(UnhealthyError, match="other work"):
        speed.round_of((made, made), CPU, tmp_path / "m.gguf", WORK, tmp_path / "s")


def test_a_program_that_fails_is_named(tmp_path: Path) -> None:
    made = fake(tmp_path, bench="echo boom >&2; exit 3")
    with pytest.raises(UnhealthyError, match="llama-bench of x failed"):
        speed.round_of((made, made), CPU, tmp_path / "m.gguf", WORK, tmp_path / "s")


def test_what_another_tree_lacks_costs_only_what_needs_it(tmp_path: Path) -> None:
    made = fake(tmp_path, flags="-r")
    assert speed.no_start((made, made)) == "llama-bench of x knows no --no-warmup"
    ours, _ = speed.round_of((made, made), CPU, tmp_path / "m.gguf", WORK, tmp_path / "s")
    assert sorted(ours) == ["pp16", "pp8", "tg4", "tg4@16"]
    (tmp_path / "llama-bench").unlink()
    assert speed.no_start((made, made)) == "x has no llama-bench"
    assert speed.no_start((fake(tmp_path), made)) == ""


def test_turns_change_and_the_first_is_not_counted() -> None:
    order: list[int] = []

    def one(side: int) -> dict[str, float]:
        order.append(side)
        return {"n": len(order)}

    times: tuple[speed.Times, speed.Times] = ({}, {})
    speed.in_turns(one, times, 2)
    assert order == [0, 1, 1, 0, 0, 1, 1, 0, 0, 1]
    assert times == ({"n": [4, 5, 8, 9]}, {"n": [3, 6, 7, 10]})


def test_the_ratio_of_a_round_is_of_neighbours() -> None:
    """Neither a neighbour that slows both for a while nor which of the two comes after itself shows."""
    ours, theirs = {"n": [10.0, 8.0, 5.0, 4.0, 9.0, 9.0]}, {"n": [8.0, 10.0, 4.0, 5.0, 10.0, 10.0]}
    assert speed.ratios([ours], [theirs])["n"] == pytest.approx([1.0])


def test_all_is_the_mean_of_what_the_servers_did() -> None:
    ours, theirs = (
        {"start": [9.0, 9.0], "n": [2.0, 2.0], "m": [8.0, 8.0]},
        {key: [1.0, 1.0] for key in ("start", "n", "m")},
    )
    found = speed.ratios([ours] * 2, [theirs] * 2)
    assert found["all"] == pytest.approx([4.0, 4.0])
    assert list(found) == ["all", "start", "n", "m"]


@pytest.mark.parametrize(
    ("place", "words"),
    [("sim-cpu-moe", "-ngl 99 -ncmoe 999"), ("sim2-cpu-moe", "-ngl 99 -ncmoe 999 -ts 2/1"), ("cpu", "-ngl 0")],
)
def test_llama_bench_has_its_own_words(place: str, words: str) -> None:
    assert " ".join(speed.bench_args(target.PLACES[place].args)) == words


def test_the_mean_alone_decides() -> None:
    times = {key: [1.0, 1.0] for key in (speed.START, "pp64", "tg32")}
    names = list(speed.ratios([times] * 2, [times] * 2))
    assert len(names) == 4
    assert [name for name in names if speed.decides(name)] == [speed.ALL]
