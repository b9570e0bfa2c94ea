"""Routing traces: the file, its damage, and the policies on traces whose result is known."""

from __future__ import annotations

import itertools
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_upstream import World
from hypothesis import given, settings
from hypothesis import strategies as st

from llamafork import cli
from llamafork.errors import Exit, ModelError
from llamafork.trace import format as files
from llamafork.trace import program, simulate, verbs
from llamafork.trace.format import Trace


def trace(rows: list[list[int]], n_expert: int = 8, phases: list[int] | None = None) -> Trace:
    """One layer; a row is a token's experts."""
    experts = np.array(rows, dtype=np.uint16)[:, None, :]
    return Trace((3,), n_expert, len(rows[0]), "m.gguf", np.arange(len(rows), dtype=np.int32),
                 np.array(phases or [1] * len(rows), dtype=np.uint8), experts)  # fmt: skip


@given(st.integers(1, 600), st.integers(1, 3), st.integers(0, 9), st.data())
@settings(max_examples=40, deadline=None)
def test_what_is_saved_is_loaded(tmp_path_factory: pytest.TempPathFactory, n_expert: int, layers: int, tokens: int,
                                 data: st.DataObject) -> None:  # fmt: skip
    used = data.draw(st.integers(1, min(4, n_expert)))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    experts = rng.integers(0, n_expert, (tokens, layers, used)).astype(np.uint16)
    made = Trace(tuple(range(layers)), n_expert, used, 'a "name"', rng.integers(0, 1 << 31, tokens).astype(np.int32),
                 rng.integers(0, 2, tokens).astype(np.uint8), experts)  # fmt: skip
    path = tmp_path_factory.mktemp("trace") / "t"
    files.save(path, made)
    back = files.load(path)
    assert (back.layers, back.n_expert, back.n_used, back.model, back.cut) == (*_facts(made), False)
    for name in ("tokens", "phases", "experts"):
        assert np.array_equal(getattr(back, name), getattr(made, name))


def _facts(of: Trace) -> tuple[object, ...]:
    return of.layers, of.n_expert, of.n_used, of.model


def test_a_trace_that_was_cut_off_is_read_up_to_the_last_token(tmp_path: Path) -> None:
    files.save(tmp_path / "t", trace([[0, 1], [2, 3], [4, 5]]))
    whole = (tmp_path / "t").read_bytes()
    (tmp_path / "t").write_bytes(whole[:-1])
    back = files.load(tmp_path / "t")
    assert back.cut
    assert back.experts[:, 0].tolist() == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF" + bytes(60),
        b"LFTRACE1",
        b"LFTRACE1" + struct.pack("<I", 1 << 31),
        b"LFTRACE1" + struct.pack("<I", 4) + b"nope",
        b"LFTRACE1" + struct.pack("<I", 2) + b"{}",
        b"LFTRACE1" + struct.pack("<I", 64) + b'{"layers": [], "n_expert": 4, "n_used": 2, "width": 1}'.ljust(64),
        b"LFTRACE1" + struct.pack("<I", 64) + b'{"layers": [1], "n_expert": 4, "n_used": 9, "width": 1}'.ljust(64),
    ],
)  # fmt: skip
def test_what_is_no_trace_is_called_that(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(ModelError, match="trace"):
        files.load(tmp_path / "t")


def test_an_expert_that_cannot_be_is_damage(tmp_path: Path) -> None:
    files.save(tmp_path / "t", trace([[0, 1]]))
    (tmp_path / "t").write_bytes((tmp_path / "t").read_bytes()[:-1] + b"\x09")
    with pytest.raises(ModelError, match="expert 9 of 8"):
        files.load(tmp_path / "t")


CYCLE = [[n % 3] for n in range(12)]


@pytest.mark.parametrize(("slots", "hits", "uploads"), [(3, 9, 3), (8, 9, 3), (2, 0, 12), (1, 0, 12)])
def test_lru_on_a_cycle(slots: int, hits: int, uploads: int) -> None:
    """All fit, or, the classic, nothing is left when it comes round again."""
    score = simulate.run(trace(CYCLE), "lru", slots)
    assert (score.hits, score.uploads, score.lookups) == (hits, uploads, 12)


def test_belady_on_a_cycle_keeps_what_it_has() -> None:
    score = simulate.run(trace(CYCLE), "belady", 1)
    assert (score.hits, score.uploads) == (best(CYCLE, 1), 1)


def test_lfu_keeps_the_frequent_one_where_lru_does_not() -> None:
    rows = [[0], [0], [0], [1], [0], [2], [0], [3], [0], [4], [0]]
    assert simulate.run(trace(rows), "lfu", 1).hits > simulate.run(trace(rows), "lru", 1).hits


def test_tokens_that_fill_the_cache_are_not_counted() -> None:
    score = simulate.run(trace([[0, 1]] * 5), "lru", 4, skip=1)
    assert (score.hits, score.uploads, score.lookups, score.rate) == (8, 0, 8, 1.0)


def best(rows: list[list[int]], slots: int) -> int:
    """The most hits that any policy can have, by trying all."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for row in rows:
        after: dict[frozenset[int], int] = {}
        for there, hits in states.items():
            found = hits + sum(e in there for e in row)
            for size in range(slots + 1):
                for kept in itertools.combinations(sorted(there | set(row)), size):
                    after[frozenset(kept)] = max(after.get(frozenset(kept), 0), found)
        states = after
    return max(states.values())


@given(
    st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=2, unique=True), min_size=1, max_size=7),
    st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_belady_is_the_best_there_is(rows: list[list[int]], slots: int) -> None:
    limit = best(rows, slots)
    made = trace(rows, n_expert=5)
    assert simulate.run(made, "belady", slots).hits == limit
    assert simulate.run(made, "lru", slots).hits <= limit
    assert simulate.run(made, "lfu", slots).hits <= limit


def test_use_and_repetition_are_what_they_should_be() -> None:
    uniform = trace([[0, 1], [2, 3], [4, 5], [6, 7]])
    assert verbs.effective(uniform) == [pytest.approx(8)]
    assert verbs.repeat(uniform) == 0
    assert verbs.effective(trace([[5, 2]] * 9)) == [pytest.approx(2)]
    assert verbs.repeat(trace([[0, 1], [1, 2]])) == 0.5


def test_the_command_line(world: World, tmp_path: Path) -> None:
    path = tmp_path / "t"
    files.save(path, trace([[0, 1], [1, 2], [1, 0], [1, 2]], phases=[0, 1, 1, 1]))
    facts = world.json("trace", "info", str(path))
    assert (facts["tokens"], facts["decode"], facts["layers"]) == (4, 3, 1)
    found = world.json("trace", "simulate", str(path), "--slots", "8", "--policy", "lru", "--skip", "0")
    assert found["tokens"] == 3
    (score,) = found["scores"]  # type: ignore[misc]
    assert (score["hits"], score["uploads"]) == (3, 3)
    code, _, err = world.run("trace", "simulate", str(path), "--slots", "9")
    assert code == 2
    assert "--skip" in err or "9 slots" in err
    assert world.run("trace", "info", str(tmp_path / "none"))[0] == 6
    with pytest.raises(SystemExit, match="2"):
        world.run("trace", "simulate", str(path), "--skip", "-5")


def test_a_recording_replaces_nothing_unasked(world: World, tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    world.ok("make-model", str(model), "--layers", "1", "--embd", "32", "--ff", "32", "--vocab", "260")
    before = model.read_bytes()
    (tmp_path / "t").write_text("mine")
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "null").symlink_to("/dev/null")
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "p.part")
    asked = ("-p", "x", "-n", "1", "--build", "none")
    for out, force, why in (
        ("m.gguf", True, "is the model"),
        ("link", True, "is the model"),
        ("t", False, "exists"),
        (".", True, "is a folder"),
        ("pipe", True, "is a pipe"),
        ("p", True, "p.part is a pipe"),
        ("null", True, "is a device"),
    ):
        words = ("trace", "record", str(model), str(tmp_path / out), *asked, *(("--force",) if force else ()))
        code, _, err = world.run(*words)
        assert (code, why in err) == (2, True), err
    assert model.read_bytes() == before
    assert (tmp_path / "t").read_text() == "mine"
    code, _, err = world.run(
        "trace", "record", str(model), str(tmp_path / "new"), "-f", str(tmp_path / "no"), *asked[2:]
    )
    assert (code, "there is no file" in err) == (2, True)


STOPPED = """\
#!/bin/bash
while [ "$1" != -o ]; do shift; done
out=$2
trap '[ -z "$WHOLE" ] || { cp "$WHOLE" "$out.part"; mv "$out.part" "$out"; exit 130; }; exit 1' TERM
touch "$out.part"
kill -$SENT $ABOVE
for _ in {1..100}; do sleep 0.1; done
"""


@pytest.mark.parametrize(("sent", "code"), [("INT", Exit.INTERRUPTED), ("TERM", Exit.TERMINATED)])
@pytest.mark.parametrize("begun", [True, False])
def test_a_stopped_recording_says_what_there_is(
    world: World, tmp_path: Path, sent: str, code: Exit, begun: bool
) -> None:
    """It is not gone on with: the next begins anew."""
    root = world.home / "data/builds/fork-x"
    info = {"schema": "llamafork.build/1", "key": root.name, "kind": "fork", "profile": "release", "backends": ["cpu"],
            "targets": [], "made": 1, "tree": "t", "build": 1}  # fmt: skip
    world.write(root / "build.json", json.dumps(info))
    world.write(root / "bin/llama-expert-trace", STOPPED)
    (root / "bin/llama-expert-trace").chmod(0o755)
    model, out = tmp_path / "m.gguf", tmp_path / "t"
    world.ok("make-model", str(model), "--layers", "1", "--embd", "32", "--ff", "32", "--vocab", "260")
    files.save(tmp_path / "whole", trace([[0, 1], [2, 3], [4, 5]]))
    out.write_text("of before")
    code_of = "import os, sys; os.environ['ABOVE'] = str(os.getpid()); from llamafork import cli; sys.exit(cli.main())"
    words = ["trace", "record", str(model), str(out), "-p", "x", "--build", root.name, "--force", "--json"]
    env = os.environ | {"SENT": sent, "WHOLE": str(tmp_path / "whole") if begun else ""}
    done = subprocess.run([sys.executable, "-c", code_of, *words], env=env, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    said = json.loads(done.stdout)
    assert said["error"] == "the recording was stopped"
    assert said["why"] == (f"{out} has the 3 tokens until then" if begun else "nothing is written")
    assert "go on" not in done.stderr
    assert (out.read_text() == "of before") is not begun
    assert not verbs.part_of(out).exists()


def test_the_policies_of_the_command_line_are_those_there_are() -> None:
    assert (*program.POLICIES, *simulate.POLICIES) == cli.TRACE_POLICIES


@pytest.mark.parametrize(
    ("said", "want"),
    [
        ("does not fit\n0.00.031.589 I cmn  init: late\n", "does not fit"),
        ("0.00.031.589 I cmn  init: early\ndoes not fit\n", "does not fit"),
        ("0.00.031.589 E cmn  failed\n", "0.00.031.589 E cmn  failed"),
        ("", ""),
    ],
)
def test_why_a_recording_failed_is_not_hidden_by_a_log_that_comes_late(said: str, want: str) -> None:
    assert verbs.own_words(f"$ llama-expert-trace -m old\nold words\n$ llama-expert-trace -m new\n{said}") == want


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    """/dev/zero has no end."""
    for path in (Path("/dev/zero"), tmp_path):
        with pytest.raises(ModelError, match="is not a routing trace"):
            files.load(path)
