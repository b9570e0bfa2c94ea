"""Off means stock: the identity suite of the fork against its twin, and that it fails when something is off."""

from __future__ import annotations

import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import planted
import pytest
from real_builds import FORK_SIM, SIM, find, llamafork

from llamafork.build.store import Build
from llamafork.synth.archs import LAYOUTS

SMALL = ("--layers", "3", "--embd", "64", "--heads", "2", "--kv-heads", "2", "--head-dim", "32", "--ff", "32")
SMALL += ("--experts", "16", "--used", "4", "--vocab", "300")
EACH_AT = ("cpu", "sim", "sim2-cpu-moe", "rpc2")
MORE_AT = ("cpu", "sim")
MORE = {
    "merged": ("qwen35moe", "--gate-up", "merged", "--mtp"),
    "mixed": ("glm4moe", "--embd", "256", "--ff", "256", "--type", "Q4_K", "--layer-types", "Q6_K,IQ4_XS", "--mtp"),
}  # beside each architecture as it is; the trained model has an MTP block whose drafts are taken
Rows = list[dict[str, Any]]


@pytest.fixture(scope="module")
def twins() -> tuple[Build, Build]:
    """With simulated devices; the stock one is the pin plus these alone."""
    return find(*FORK_SIM), find("--stock", *SIM)


def test_the_fork_is_stock_on_all_devices(twins: tuple[Build, Build], model: Path) -> None:
    fork, stock = twins
    done = json.loads(llamafork("compare", fork.key, stock.key, "--model", str(model), "--json").stdout)
    assert done["ok"] is True
    assert {row["place"] for row in done["rows"]} >= {"cpu", "sim", "sim2", "sim-cpu-moe", "rpc2"}
    assert {row["verdict"] for row in done["rows"]} == {"identical"}


@pytest.fixture(scope="module")
def each(twins: tuple[Build, Build], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Future[Rows]]:
    """Of each architecture with random weights; two at a time."""
    fork, stock = twins
    folder = tmp_path_factory.mktemp("each")

    def rows(name: str) -> Rows:
        file = str(folder / f"{name}.gguf")
        arch, *more = MORE.get(name, (name, *(("--layers", "4") if name == "llama4" else ())))
        where = [word for place in (MORE_AT if name in MORE else EACH_AT) for word in ("--on", place)]
        llamafork("make-model", file, "--arch", arch, *SMALL, *more)
        done = llamafork("compare", fork.key, stock.key, "--model", file, *where, "--json", check=False)
        assert done.stdout, done.stderr
        assert name not in MORE or "cannot draft" not in done.stderr
        found: Rows = json.loads(done.stdout)["rows"]
        return found

    with ThreadPoolExecutor(2) as pool:
        return {name: pool.submit(rows, name) for name in (*LAYOUTS, *MORE)}


@pytest.mark.parametrize("arch", LAYOUTS)
def test_the_fork_is_stock_on_each_architecture(each: dict[str, Future[Rows]], arch: str) -> None:
    rows = each[arch].result()
    assert {row["place"]: row["verdict"] for row in rows} == dict.fromkeys(EACH_AT, "identical")


@pytest.mark.parametrize("name", MORE)
def test_the_fork_is_stock_on_other_layouts_and_with_drafts(each: dict[str, Future[Rows]], name: str) -> None:
    rows = each[name].result()
    assert {row["place"]: row["verdict"] for row in rows} == dict.fromkeys(MORE_AT, "identical")


@pytest.fixture(scope="module")
def spoiled(twins: tuple[Build, Build], tmp_path_factory: pytest.TempPathFactory) -> Build:
    """The fork with faults in its C++ that a variable turns on."""
    return planted.build(tmp_path_factory.mktemp("planted"), *SIM)


FAULTS = {"": set(), "bit": {"logits"}, "split": {"splits"}}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("place", ["cpu", "sim2-cpu-moe"])
def test_it_fails_when_the_code_is_off(
    spoiled: Build, twins: tuple[Build, Build], model: Path, place: str, fault: str
) -> None:
    """One bit of one logit a row; one split more a graph. Without either the same programs are stock."""
    words = ("compare", spoiled.key, twins[1].key, "--model", str(model), "--on", place, "--json")
    done = llamafork(*words, env={"PLANTED": fault}, check=False)
    (row,) = json.loads(done.stdout)["rows"]
    assert done.returncode == (8 if FAULTS[fault] else 0), done.stderr
    assert row["verdict"] == ("different output" if FAULTS[fault] else "identical")
    assert {what for what in ("logits", "splits") if f"{what} at width 1" in row["detail"]} == FAULTS[fault]


BREAK = {
    # no dump of the scheduler at all
    "splits": ("llama-results", '"$real" "$@" 2>&1 | grep -av "SPLIT #\\|node #"'),
    # positions that turn a little faster
    "words or their probabilities": ("llama-server", 'exec "$real" "$@" --rope-freq-base 5000'),
    # drafts of one token: the words are the same, how they come about is not
    "number of drafts": ("llama-server", 'exec "$real" "$@" $([[ "$*" != *draft-mtp* ]] || echo --spec-draft-n-max 1)'),
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
