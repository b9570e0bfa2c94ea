"""The trained model of tests/data: its card is true, and it is good enough to stand in for real models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from real_builds import ROOT, llamafork

from llamafork.build.store import Build

sys.path.insert(0, str(ROOT / "scripts"))

from train_model import card

MODEL = ROOT / "tests/data/moe-small.gguf"
CARD = json.loads(MODEL.with_suffix(".json").read_text(encoding="utf-8"))
SAID = CARD["measured"]


@pytest.mark.alone  # half a minute on all cores: beside another program, threads that wait for each other take minutes
@pytest.mark.skipif(
    sys.version_info[:2] != tuple(map(int, CARD["python"].split(".")[:2])),
    reason=f"the held-out text ships with Python {CARD['python']}; run the tests with it to un-skip",
)
def test_the_card_is_reproduced(fork: Build) -> None:
    script = [sys.executable, str(ROOT / "scripts/check-test-model"), "--build", fork.key]
    done = subprocess.run(script, capture_output=True, text=True, cwd=ROOT)
    if "not the text of the card" in done.stderr:
        pytest.skip(f"this Python's library differs from that of {CARD['python']}; run the tests with it to un-skip")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == len(SAID)


def test_it_is_good_enough_to_stand_in_for_real_models() -> None:
    """A third better than trigrams at each length, experts that specialise, a small file."""
    assert card.falls_short(SAID, MODEL.stat().st_size) == []
    assert SAID["experts in effect"] > 16


def test_its_drafts_are_taken() -> None:
    assert SAID["MTP accepted at depth 1"] > 0.5
    assert SAID["MTP accepted at depth 3"] > 0.25


def test_the_card_for_people_is_of_the_same_numbers() -> None:
    assert MODEL.with_suffix(".md").read_text(encoding="utf-8") == card.markdown(CARD)
    assert Path(MODEL).read_bytes()[:4] == b"GGUF"


@pytest.mark.parametrize("off", [False, True])
def test_quality_is_told_from_quality_that_suffers(fork: Build, stock: Build, tmp_path: Path, off: bool) -> None:
    """On two RPC servers as on the CPU; with positions that turn a little faster, the distributions part."""
    for file in (fork.root / "bin").iterdir():
        (tmp_path / file.name).symlink_to(file)
    if off:
        spoiled = tmp_path / "llama-perplexity"
        spoiled.unlink()
        spoiled.write_text(f'#!/bin/sh\nexec {fork.root}/bin/llama-perplexity "$@" --rope-freq-base 9500\n')
        spoiled.chmod(0o755)
    words = ("--model", str(MODEL), "--suite", "quality", "--on", "rpc2", "--json")
    done = llamafork("compare", str(tmp_path), stock.key, *words, check=False)
    (row,) = json.loads(done.stdout)["rows"]
    assert (done.returncode, row["verdict"]) == ((8, "different output") if off else (0, "no difference"))
    perplexity = float(row["detail"].split("perplexity ")[1].split()[0])
    assert perplexity < 6  # a byte; random weights have 260
