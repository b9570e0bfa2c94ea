"""`compare` on real programs: speeds are read, and a killed comparison goes on where it stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from real_builds import llamafork

from llamafork import paths
from llamafork.build.store import Build

NUMBERS = {"pp64", "pp512", "tg32", "tg32@512", "start", "all"}


def test_a_killed_speed_comparison_leaves_no_server_and_goes_on(fork: Build, stock: Build, model: Path) -> None:
    words = ["compare", fork.key, stock.key, "--model", str(model), "--suite", "speed", "--on", "cpu", "--rounds", "6",
             "--repeat", "1"]  # fmt: skip
    folder = paths.find().state / "compare"
    before = set(folder.glob("*.jsonl"))
    wrapper = subprocess.Popen([sys.executable, "-m", "llamafork", *words], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (begun := set(folder.glob("*.jsonl")) - before):
        assert time.monotonic() < deadline
        assert wrapper.poll() is None
        time.sleep(0.05)
    children = psutil.Process(wrapper.pid).children(recursive=True)
    os.kill(wrapper.pid, signal.SIGKILL)
    wrapper.wait()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []
    done = llamafork(*words, "--json", check=False)
    assert done.returncode in (0, 8), done.stderr  # how fast, is not for a test to say
    assert "going on with an interrupted comparison" in done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {row["number"] for row in rows} == NUMBERS
    assert all(0.05 < row["low"] <= row["ratio"] <= row["high"] < 20 for row in rows)
    assert not any(file.exists() for file in begun)
