"""Change sched-prof: times per split and per input copy; nothing at all when off."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from real_builds import complete, rpc, serving

from llamafork.build.store import Build
from llamafork.run import client


def test_off_prints_nothing(fork: Build, model: Path) -> None:
    assert "sched-prof" not in complete(fork, model).log


@pytest.mark.parametrize("value", ["on", "3", "1x"])
def test_a_value_that_means_nothing_is_off_and_said(fork: Build, model: Path, value: str) -> None:
    log = complete(fork, model, env={"GGML_SCHED_PROF": value}).log
    assert f"sched-prof: off, because GGML_SCHED_PROF is '{value}'" in log
    assert log.count("sched-prof") == 1
    assert "sched-prof" not in complete(fork, model, env={"GGML_SCHED_PROF": "0"}).log


def test_on_changes_no_answer_and_prints_a_table(fork: Build, stock: Build, model: Path) -> None:
    done = complete(fork, model, env={"GGML_SCHED_PROF": "1"})
    assert done.answer == complete(stock, model).answer
    assert re.search(r"sched-prof: scheduler \d+, host times", done.log)
    assert "batch 1, 1 splits" in done.log


def test_splits_and_copies_of_two_devices_add_up(fork: Build, model: Path, tmp_path: Path) -> None:
    """Serial mode: 31 decode runs, MoE layers on the CPU, and the parts make up the wall time."""
    out = tmp_path / "prof.jsonl"
    env = {"GGML_SCHED_PROF": "2", "GGML_SCHED_PROF_FILE": str(out)}
    with rpc(fork) as address:
        done = complete(fork, model, "--rpc", address, "-ngl", "99", "--cpu-moe", env=env)
        plain = complete(fork, model, "--rpc", address, "-ngl", "99", "--cpu-moe")
    assert done.answer == plain.answer
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    decode = next(row for row in rows if row["batch"] == 1)
    assert decode["runs"] == 31
    assert decode["serial"] is True
    assert decode["n_splits"] == len(decode["splits"])
    backends = {split["backend"] for split in decode["splits"]}
    assert any(name.startswith("RPC") for name in backends)
    assert "CPU" in backends
    copies = [one for split in decode["splits"] for one in split["inputs"]]
    assert len(copies) >= 8  # each of 4 MoE layers: activations and ids to the CPU, or back
    assert all(one["bytes"] > 0 and one["runs"] == 31 for one in copies)
    ids = [one for one in copies if one["name"].startswith("ffn_moe_topk")]
    assert {one["bytes"] / one["runs"] for one in ids} == {4 * 4}  # 4 experts used, one i32 each
    parts = sum(s["ns"] + sum(i["ns"] for i in s["inputs"]) for s in decode["splits"])
    assert 0.5 * decode["ns"] < parts <= decode["ns"]


def test_the_signal_prints_while_the_server_runs(fork: Build, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "prof.txt"
    env = {"GGML_SCHED_PROF": "1", "GGML_SCHED_PROF_FILE": str(out)}
    body = {"prompt": "abc", "n_predict": 8, "temperature": 0}
    with serving("-m", str(model), "-c", "512", env=env) as (url, wrapper):
        client.session().post(f"{url}/completion", json=body, timeout=30).raise_for_status()
        assert not out.exists()
        os.kill(wrapper.pid, signal.SIGUSR1)  # which passes it on
        time.sleep(0.5)
        assert wrapper.poll() is None
        client.session().post(f"{url}/completion", json=body, timeout=30).raise_for_status()
        assert "sched-prof: scheduler" in out.read_text()
        before = len(out.read_text())
    assert len(out.read_text()) > before  # and once more at exit
