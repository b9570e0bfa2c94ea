"""Change expert-policy: its properties, and what it hits on text that nobody tuned it on."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from real_builds import ROOT, llamafork, tests_of

from llamafork.build.store import Build
from llamafork.trace import format as files
from llamafork.trace import program, simulate

SHARES = (0.125, 0.25, 0.5, 0.75)
SAMPLED = ("--temp", "1", "--top-k", "0", "--top-p", "1", "--min-p", "0", "--ignore-eos", "-t", "1", "-s", "1")


@pytest.mark.parametrize("profile", ["release", "asan"])
def test_its_properties_hold(profile: str) -> None:
    tool = tests_of(profile).program("test-expert-policy")
    done = subprocess.run([tool], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count(": done\n") == 13


@pytest.fixture(scope="module")
def text(fork: Build, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model on text that it was not trained on, nor the policy tuned."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "prompt").write_bytes((ROOT / "docs" / "compare.md").read_bytes()[:4000])
    llamafork("trace", "record", str(model), str(folder / "t"), "-f", str(folder / "prompt"), "-n", "1",
              "--build", fork.key, "--", "-c", "8192", "-t", "1", "-ngl", "0")  # fmt: skip
    return folder / "t"


@pytest.fixture(scope="module")
def bench(fork: Build, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[float, float], Path]:
    """By reuse and skew; (0, 0) is as near to noise as a router's choices come."""
    folder, found = tmp_path_factory.mktemp("bench"), {}
    for reuse, skew in ((0.0, 0.0), (0.8, 1.0)):
        file, out = folder / f"{reuse}.gguf", folder / f"{reuse}.trace"
        sizes = ("--experts", "64", "--used", "8", "--layers", "4", "--embd", "256", "--ff", "64", "--seed", "17")
        llamafork("make-model", str(file), "--arch", "qwen3moe", *sizes,
                  "--bench", "--reuse", str(reuse), "--skew", str(skew))  # fmt: skip
        llamafork("trace", "record", str(file), str(out), "-p", "Hello", "-n", "1000", "--build", fork.key,
                  "--", "-c", "2048", *SAMPLED)  # fmt: skip
        found[reuse, skew] = out
    return found


def played(
    fork: Build, trace: Path, share: float, *more: str, policy: str = "score", skip: int = 256
) -> simulate.Score:
    slots = round(share * files.load(trace).n_expert)
    tool = fork.program(program.PROGRAM)
    return program.run(tool, trace, policy, slots, skip=skip, everything=True, more=more)


def ours(trace: Path, policy: str, share: float, skip: int = 256) -> simulate.Score:
    read = files.load(trace)
    return simulate.run(read, policy, round(share * read.n_expert), skip=skip)


@pytest.mark.parametrize("share", SHARES)
def test_lru_is_the_same_in_both_languages(fork: Build, text: Path, share: float) -> None:
    here, there = ours(text, "lru", share, 0), played(fork, text, share, policy="lru", skip=0)
    assert (here.hits, here.uploads, here.lookups) == (there.hits, there.uploads, there.lookups)


@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_on_text_it_hits_no_less_than_lru_with_a_fraction_of_the_uploads(fork: Build, text: Path, share: float) -> None:
    lru, score = ours(text, "lru", share), played(fork, text, share)
    assert score.rate >= lru.rate - 0.01
    assert score.rate <= ours(text, "belady", share).rate
    assert played(fork, text, share, skip=1500).hits_per_upload >= 5.7


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("kind", [(0.0, 0.0), (0.8, 1.0)])
def test_on_bench_models_it_hits_no_less_than_lru(
    fork: Build, bench: dict[tuple[float, float], Path], kind: tuple[float, float], share: float
) -> None:
    lru, score = ours(bench[kind], "lru", share), played(fork, bench[kind], share)
    assert score.rate >= lru.rate - 0.01
    assert score.hits_per_upload >= 5.7


def test_uploads_that_come_a_step_late_cost_a_little(fork: Build, text: Path) -> None:
    now, late = played(fork, text, 0.25), played(fork, text, 0.25, "--delay", "2")
    assert now.rate - 0.03 <= late.rate <= now.rate


def test_a_slow_link_is_not_filled(fork: Build, text: Path) -> None:
    """A quarter of a step of 1 ms, uploads of 0.5 ms: one in two steps."""
    slow = played(fork, text, 0.75, "--step-us", "1000", "--upload-us", "500")
    tokens = slow.lookups / files.load(text).n_used / len(slow.layers)
    assert 0 < slow.uploads <= tokens / 2 + 4


def test_deterministic_plans_do_not_depend_on_times(fork: Build, text: Path) -> None:
    found = [
        played(fork, text, 0.25, "--deterministic", "--step-us", us, "--upload-us", "7").hits for us in ("1", "90000")
    ]
    assert found[0] == found[1] > 0


def test_the_command_line_plays_it(fork: Build, text: Path) -> None:
    words = ("--all", "--slots", "8", "--policy", "score", "--policy", "lru", "--build", fork.key, "--json")
    said = json.loads(llamafork("trace", "simulate", str(text), *words).stdout)
    assert [row["policy"] for row in said["scores"]] == ["score", "lru"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--slots", "0"], "--slots needs"),
        (["--slots", "8", "--delay", "0"], "--delay at least 1"),
        (["--slots", "x"], "is no number"),
        (["--slots", "8", "--policy", "best"], "no policy best"),
        (["--slots", "8", "--speed", "1"], "no option --speed"),
        (["--slots"], "needs a value"),
    ],
)
def test_wrong_options_are_named(fork: Build, text: Path, words: list[str], why: str) -> None:
    done = subprocess.run([fork.program(program.PROGRAM), text, *words], capture_output=True, text=True)
    assert done.returncode == 1
    assert why in done.stderr


def test_what_is_no_trace_is_called_that(fork: Build, tmp_path: Path, text: Path) -> None:
    whole = text.read_bytes()
    cases = {"GGUF" + "0" * 60: "not a routing trace", "": "not a routing trace"}
    (tmp_path / "cut").write_bytes(whole[:14])
    for content, why in cases.items():
        (tmp_path / "t").write_text(content)
        done = subprocess.run(
            [fork.program(program.PROGRAM), tmp_path / "t", "--slots", "8"], capture_output=True, text=True
        )
        assert (done.returncode, why in done.stderr) == (1, True)
    done = subprocess.run(
        [fork.program(program.PROGRAM), tmp_path / "cut", "--slots", "8"], capture_output=True, text=True
    )
    assert (done.returncode, "header is cut off" in done.stderr) == (1, True)
