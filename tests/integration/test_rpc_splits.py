"""Change rpc-splits: a split is sent without its ancestors; the answer stays the same."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from real_builds import FORK_SIM, SIM, complete, find, rpc

from llamafork import cli
from llamafork.build.store import Build


@dataclass
class Meter:
    """Passes a server's connections on and counts what clients send."""

    address: str
    sent: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def metered(server: str) -> Iterator[Meter]:
    host, port = server.split(":")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        meter = Meter(f"127.0.0.1:{listener.getsockname()[1]}")

        def pump(source: socket.socket, target: socket.socket, count: bool) -> None:
            with source, target:
                try:
                    while data := source.recv(1 << 16):
                        if count:
                            with meter.lock:
                                meter.sent += len(data)
                        target.sendall(data)
                    target.shutdown(socket.SHUT_WR)  # the server has one client at a time, and waits for its end
                except OSError:
                    return

        def accept() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                upstream = socket.create_connection((host, int(port)))
                for end in (client, upstream):  # many small messages there and back
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for words in ((client, upstream.dup(), True), (upstream, client.dup(), False)):
                    threading.Thread(target=pump, args=words, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield meter


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("deep") / "m.gguf"
    words = (
        "--arch",
        "qwen3moe",
        "--layers",
        "12",
        "--embd",
        "64",
        "--heads",
        "2",
        "--kv-heads",
        "1",
        "--head-dim",
        "32",
    )
    words += ("--ff", "32", "--experts", "8", "--used", "2", "--vocab", "300")
    assert cli.main(["--quiet", "make-model", str(out), *words]) == 0
    return out


def test_less_is_sent_and_the_answer_is_the_same(deep: Path) -> None:
    answers, sent = [], []
    for options in (("--stock", *SIM), FORK_SIM):
        build: Build = find(*options)
        with rpc(build) as server, metered(server) as meter:
            words = ("-ngl", "99", "-cmoe", "-nr", "-t", "1", "-fit", "off", "--rpc", meter.address)
            answers.append(complete(build, deep, *words, env={"GGML_SIM_DEVICES": ""}).answer)
            sent.append(meter.sent)
    assert answers[0] == answers[1]
    assert sent[1] < 0.6 * sent[0], sent
