"""A server of our own for the length of a block: started, awaited, asked, stopped."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from llamafork import proc
from llamafork.errors import UnhealthyError
from llamafork.paths import show

POLL_SECONDS = 0.05
STOP_SECONDS = 60.0


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def session() -> requests.Session:
    """Proxies have no business between us and this machine."""
    made = requests.Session()
    made.trust_env = False
    return made


@dataclass
class Client:
    """Talks to the server of :func:`running`. Errors of the server are :class:`UnhealthyError`."""

    url: str
    session: requests.Session
    process: subprocess.Popen[bytes]
    log: Path

    def get(self, path: str, *, timeout: float = 10.0) -> Any:
        return self._json("GET", path, None, timeout)

    def post(self, path: str, body: Mapping[str, object], *, timeout: float = 600.0) -> Any:
        return self._json("POST", path, body, timeout)

    def _json(self, method: str, path: str, body: Mapping[str, object] | None, timeout: float) -> Any:
        try:
            answer = self.session.request(method, self.url + path, json=body, timeout=timeout)
            if answer.status_code == 200:
                return answer.json()
            why = f"status {answer.status_code}: {answer.text[:300]}"
        except requests.RequestException as error:
            why = str(error)
        raise UnhealthyError(
            f"the server failed at {path}", why=f"{why}; {last_words(self.log)}", do=f"see {show(self.log)}"
        )


@contextmanager
def running(
    command: Sequence[str | Path], log: Path, *, env: Mapping[str, str] | None = None, timeout: float = 300.0
) -> Iterator[Client]:
    """Run *command* with ``--host`` and ``--port`` added; ready at entry, stopped and reaped at exit.

    Output goes to the file *log*. Raises :class:`UnhealthyError` if it is not ready within *timeout* seconds.
    """
    port = free_port()
    words = [*map(str, command), "--host", "127.0.0.1", "--port", str(port)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("wb") as sink,
        session() as web,
        proc.kept(words, env=dict(os.environ if env is None else env), stdout=sink, stderr=sink) as process,
    ):
        web.headers["Connection"] = "close"  # the server closes one that is idle for 5 s, maybe just as we ask again
        try:
            client = Client(f"http://127.0.0.1:{port}", web, process, log)
            _await(client, timeout)
            yield client
        finally:
            _stop(process)


def _await(client: Client, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while client.process.poll() is None and time.monotonic() < deadline:
        try:
            if client.session.get(f"{client.url}/health", timeout=2).status_code == 200:
                return
        except requests.RequestException:
            pass
        time.sleep(POLL_SECONDS)
    code = client.process.poll()
    what = f"the server was not ready within {timeout:g} s" if code is None else f"the server ended with exit {code}"
    raise UnhealthyError(what, why=last_words(client.log), do=f"see {show(client.log)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def last_words(log: Path, lines: int = 3) -> str:
    """The last lines of a log, in one line."""
    text = log.read_text(encoding="utf-8", errors="replace").strip() if log.is_file() else ""
    return " | ".join(text.splitlines()[-lines:])
