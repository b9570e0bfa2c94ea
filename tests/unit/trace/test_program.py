"""`trace simulate --policy score`: what is asked of the program of a build, and what is made of its answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_upstream import World

from llamafork.trace import format as files
from llamafork.trace import program

FAKE = """#!{python}
import json, pathlib, sys
pathlib.Path({asked!r}).write_text(json.dumps(sys.argv[1:]))
{rest}
"""
ANSWER = {"lookups": 8, "hits": 6, "uploads": 2, "layers": [{"layer": 3, "lookups": 8, "hits": 6, "uploads": 2}]}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t"
    experts = np.array([[[0, 1]], [[1, 2]], [[1, 0]], [[1, 2]]], dtype=np.uint16)
    files.save(path, files.Trace((3,), 8, 2, "m", np.arange(4, dtype=np.int32), np.ones(4, dtype=np.uint8), experts))
    return path


def build(world: World, rest: str | None) -> Path:
    """A build whose program notes what it was asked and then does *rest*; None: it has no such program."""
    root = world.paths.data / "builds" / "fork-x"
    (root / "bin").mkdir(parents=True)
    (root / "build.json").write_text(json.dumps({"kind": "fork", "profile": "release"}))
    asked = world.base / "asked"
    if rest is not None:
        file = root / "bin" / program.PROGRAM
        file.write_text(FAKE.format(python=sys.executable, asked=str(asked), rest=rest))
        file.chmod(0o755)
    return asked


def test_the_score_is_the_programs(world: World, trace: Path) -> None:
    asked = build(world, f"print(json.dumps({ANSWER}))")
    words = ("--policy", "score", "--policy", "lru", "--slots", "4", "--skip", "0", "--all", "--json")
    code, out, err = world.run("trace", "simulate", str(trace), *words, "--", "--delay", "2")
    assert code == 0, err
    score, lru = json.loads(out)["scores"]
    assert (score["policy"], score["hits"], score["uploads"], score["rate"]) == ("score", 6, 2, 0.75)
    assert score["layers"] == [0.75]
    assert lru["policy"] == "lru"
    want = [str(trace), "--policy", "score", "--slots", "4", "--skip", "0", "--all", "--delay", "2"]
    assert json.loads(asked.read_text()) == want


@pytest.mark.parametrize(
    ("rest", "why"),
    [
        ("print('no such option --x', file=sys.stderr); sys.exit(1)", "no such option --x"),
        ("sys.exit(3)", "exit 3"),
        ("print('hello')", "hello"),
        ("print('{}')", "gave no result"),
        ("pass", "it printed nothing"),
    ],
)
def test_a_program_that_fails_says_why(world: World, trace: Path, rest: str, why: str) -> None:
    build(world, rest)
    code, _, err = world.run("trace", "simulate", str(trace), "--policy", "score", "--skip", "0")
    assert (code, why in err) == (9, True), err


def test_a_build_without_the_program_is_named_with_what_to_do(world: World, trace: Path) -> None:
    build(world, None)
    code, _, err = world.run("trace", "simulate", str(trace), "--policy", "score", "--skip", "0")
    assert code == 5
    for said in ("build fork-x has no llama-expert-policy-sim", "older than the change expert-policy", "--build"):
        assert said in err.replace("\n", " ")


def test_unasked_the_policy_is_left_out_with_a_warning(world: World, trace: Path) -> None:
    build(world, None)
    code, out, err = world.run("trace", "simulate", str(trace), "--slots", "4", "--skip", "0", "--json")
    assert code == 0
    assert [score["policy"] for score in json.loads(out)["scores"]] == ["lru", "lfu", "belady"]
    assert "without the policy score" in err


def test_options_for_a_policy_that_is_not_played_are_refused(world: World, trace: Path) -> None:
    code, _, err = world.run("trace", "simulate", str(trace), "--policy", "lru", "--skip", "0", "--", "--delay", "2")
    assert (code, "options behind --" in err) == (2, True)
