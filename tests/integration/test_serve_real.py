"""From a model file to an answer, and what is left afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
from real_builds import ROOT, llamafork, serving, wait_gone

from llamafork.build.store import Build
from llamafork.run import client


def children(pid: int) -> list[int]:
    return [p.pid for p in psutil.Process(pid).children(recursive=True)]


def test_a_chat_request_is_answered(fork: Build, model: Path) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "temperature": 0}
    with serving("-m", str(model), "-c", "512") as (url, server):
        first = client.session().post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        again = client.session().post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        pids = children(server.pid)
    assert first["choices"][0]["message"]["content"]
    assert first["usage"]["completion_tokens"] == 12
    assert first["choices"][0]["message"] == again["choices"][0]["message"]
    assert pids
    assert all(wait_gone(pid) for pid in pids)
    assert server.returncode == 0


def test_nothing_is_left_when_the_wrapper_is_killed(fork: Build, model: Path) -> None:
    with serving("-m", str(model), "-c", "512") as (_, server):
        pids = children(server.pid)
        server.send_signal(signal.SIGKILL)
        assert pids
        assert all(wait_gone(pid) for pid in pids)


def test_flags_are_checked_against_the_program_itself(fork: Build, model: Path) -> None:
    done = llamafork("serve", "-m", str(model), "--draft-max", "3", "--dry-run", check=False)
    assert done.returncode == 2
    assert "--spec-draft-n-max" in done.stderr
    done = llamafork("serve", "-m", str(model), "--no-such-flag", "--dry-run", check=False)
    assert done.returncode == 2
    assert "--no-such-flag" in done.stderr


def test_upstreams_own_flags_pass(fork: Build, model: Path) -> None:
    words = ["-c", "512", "-ngl", "0", "-t", "2", "-fa", "on", "-ctk", "q8_0", "-ub", "64", "--temp", "-1", "--jinja"]
    done = llamafork("serve", "-m", str(model), *words, "--dry-run")
    for word in words:
        assert word in done.stdout


def test_a_truncated_model_never_reaches_the_program(fork: Build, model: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model.read_bytes()[:-100])
    done = llamafork("serve", "-m", str(cut), check=False)
    assert done.returncode == 6
    assert "download" in done.stderr


def test_the_childs_own_code_is_returned(fork: Build, model: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.jinja").write_text("{% if %}")
    words = [
        "-m",
        str(model),
        "--port",
        str(client.free_port()),
        "--chat-template-file",
        str(tmp_path / "broken.jinja"),
    ]
    own = subprocess.run([fork.program("llama-server"), *words], capture_output=True, timeout=60).returncode
    done = llamafork("serve", *words, check=False)
    assert own != 0
    assert done.returncode == (own if own > 0 else 128 - own)
    assert "the whole log" in done.stderr


def test_offline_reaches_the_server(fork: Build, model: Path) -> None:
    assert "--offline" in llamafork("--offline", "serve", "-m", str(model), "--dry-run").stdout


def test_a_port_that_is_none_is_refused_by_a_dry_run(fork: Build, model: Path) -> None:
    assert llamafork("serve", "-m", str(model), "--port", "abc", "--dry-run", check=False).returncode == 2


def test_quickstart_ends_with_a_reply(fork: Build) -> None:
    done = subprocess.run([sys.executable, "-m", "llamafork.quickstart"], capture_output=True, text=True, cwd=ROOT,
                          env=os.environ | {"NO_COLOR": "1"}, timeout=600)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "model: " in done.stderr
    assert f"-lf.{fork.info['tree'][:8]}" in done.stderr
    assert "server stopped (exit 0)" in done.stderr
