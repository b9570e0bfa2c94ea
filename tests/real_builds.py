"""Real builds and a real model, made once and kept in the user's own cache: minutes cold, seconds warm."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llamafork import paths
from llamafork.build import store
from llamafork.build.store import Build
from llamafork.run import client

ROOT = Path(__file__).resolve().parents[1]
# With simulated devices and test programs; flags are those of a release, so that the compiler cache serves both.
SIM = ("--backend", "rpc", "--backend", "sim", "-C", "-DLLAMA_BUILD_TESTS=ON")
for _name in ("llama-server", "llama-bench", "llama-results", "ggml-rpc-server", "test-backend-ops"):
    SIM += ("--target", _name)
# The fork has more of them: tests of its changes that need ggml at most.
OWN = ("--target", "test-sim-device", "--target", "test-mmid-skip", "--target", "test-sched-overlap",
       "--target", "test-expert-policy")  # fmt: skip
FORK_SIM = (*SIM, *OWN, "--target", "test-expert-cache")
PROMPT = "The expert cache keeps"


def llamafork(*words: str, env: dict[str, str] | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-m", "llamafork", *words], capture_output=True, text=True, errors="replace",
                          env=os.environ | (env or {}), stdin=subprocess.DEVNULL)  # fmt: skip
    if check:
        assert done.returncode == 0, f"{words}: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done


def find(*options: str) -> Build:
    """Build with *options* (nothing to do when it is there) and return that build."""
    root = llamafork("build", *options).stdout.strip().splitlines()[-1]
    found = store.find(paths.find(), Path(root).name)
    assert found is not None
    return found


def tests_of(profile: str) -> Build:
    """Of the fork, with its own test programs; the sanitizers' profiles have nothing else."""
    return find(*FORK_SIM) if profile == "release" else find("--profile", profile, *OWN)


tests_of.__test__ = False  # type: ignore[attr-defined]  # pytest takes its name for a test's


@contextlib.contextmanager
def serving(
    *words: str,
    env: dict[str, str] | None = None,
    tool: tuple[str, ...] = (sys.executable, "-m", "llamafork"),
    cwd: Path | None = None,
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`llamafork serve` as a process of its own, ready; yields its URL and the process."""
    port = client.free_port()
    command = [*tool, "serve", *words, "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
                              env=os.environ | (env or {}), stdin=subprocess.DEVNULL, cwd=cwd)  # fmt: skip
    assert server.stdout is not None
    try:
        seen: list[str] = []
        for line in server.stdout:
            seen.append(line)
            if line.startswith("ready: "):
                break
        else:
            raise AssertionError("".join(seen[-40:]))
        yield f"http://127.0.0.1:{port}", server
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)


@contextlib.contextmanager
def rpc(build: Build) -> Iterator[str]:
    """An RPC server on this machine: a second device, so that there are splits and copies."""
    port = client.free_port()
    server = subprocess.Popen([build.program("ggml-rpc-server"), "-H", "127.0.0.1", "-p", str(port)],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    try:
        for _ in range(100):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def wait_gone(pid: int, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@dataclass(frozen=True)
class Completion:
    """``answer`` holds text, tokens and the log probabilities of the best 8 at each step; ``log`` what was said."""

    answer: str
    log: str


def complete(build: Build, model: Path, *words: str, env: dict[str, str] | None = None) -> Completion:
    """A greedy completion of 32 tokens by the build's own llama-server, started and stopped for it."""
    command = [build.program("llama-server"), "-m", model, "-c", "512", "-t", "2", "-np", "1", "--no-warmup", *words]
    body = {
        "prompt": PROMPT,
        "n_predict": 32,
        "temperature": 0,
        "n_probs": 8,
        "return_tokens": True,
        "ignore_eos": True,
    }
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        with client.running(command, log, env=os.environ | (env or {}), timeout=30) as server:
            data = server.post("/completion", body)
        said = log.read_text(errors="replace")
    assert data["tokens_predicted"] == 32, said[-3000:]
    kept = {key: data[key] for key in ("content", "tokens", "completion_probabilities")}
    return Completion(json.dumps(kept, sort_keys=True), said)
