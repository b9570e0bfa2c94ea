"""Off means stock: the identity suite of the fork against its twin, and that it fails when something is off."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from real_builds import SIM, find, llamafork

from llamafork.build.store import Build


@pytest.fixture(scope="module")
def twins() -> tuple[Build, Build]:
    """With simulated devices; the stock one is the pin plus these alone."""
    return find(*SIM), find("--stock", *SIM)


def test_the_fork_is_stock_on_all_devices(twins: tuple[Build, Build], model: Path) -> None:
    fork, stock = twins
    done = json.loads(llamafork("compare", fork.key, stock.key, "--model", str(model), "--json").stdout)
    assert done["ok"] is True
    assert {row["place"] for row in done["rows"]} >= {"cpu", "sim", "sim2", "sim-cpu-moe", "rpc2"}
    assert {row["verdict"] for row in done["rows"]} == {"identical"}


BREAK = {
    # the same words most likely, but one bit of one logit
    "logits": ("llama-results", '"$real" "$@" || exit $?; for o in "$@"; do :; done; '
                                "printf '\\001' | dd of=\"$o\" bs=1 seek=4096 conv=notrunc status=none"),
    # a split more in the scheduler's list
    "splits": ("llama-results", '"$real" "$@" || exit $?; echo "## SPLIT #9: CPU # 1 inputs: [x (   1K)]"'),
    # positions that turn a little faster
    "words or their probabilities": ("llama-server", 'exec "$real" "$@" --rope-freq-base 5000'),
}  # fmt: skip


@pytest.mark.parametrize("what", BREAK)
def test_it_fails_when_one_thing_is_off(twins: tuple[Build, Build], model: Path, tmp_path: Path, what: str) -> None:
    """The fork's programs, one of them behind a script that spoils what it gives."""
    fork, stock = twins
    program, script = BREAK[what]
    for file in (fork.root / "bin").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / program).unlink()
    spoiled = tmp_path / program
    spoiled.write_text(f"#!/bin/bash\nreal={str(fork.root / 'bin' / program)!r}\n{script}\n")
    spoiled.chmod(0o755)
    words = ("compare", str(tmp_path), stock.key, "--model", str(model), "--on", "cpu", "--json")
    done = llamafork(*words, check=False)
    assert done.returncode == 8, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["verdict"] == "different output"
    assert what in row["detail"]
    assert os.fspath(tmp_path) in json.loads(done.stdout)["a"]
