"""A llama-server for the length of a block, asked with the standard library alone."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError

from gpu_check.programs import Done, TimeUp
from gpu_check.stage import Context
from llamafork.errors import LlamaforkError, UnhealthyError
from llamafork.proc import kept

POLL_SECONDS = 0.05
# A line of its log begins with the time and the level; before there is a log, errors begin with that word.
LINE = re.compile(r"^(?:[\d.]+ [A-Z] )?(.+)$", re.MULTILINE)
ERROR = re.compile(r"^(?:[\d.]+ E |(?=error))(.+)$", re.MULTILINE)
DYING_SECONDS = 10.0  # a connection breaks before the program has ended, and a core dump takes a while
JSON = {"Content-Type": "application/json"}
# Proxies have no business between us and this machine.
WEB = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True)
class Server:
    """``left``: seconds that there are for it, by which each wait is limited. Raises :class:`TimeUp` after them."""

    kind: str
    url: str
    process: subprocess.Popen[bytes]
    said: IO[bytes]
    left: Callable[[], float]

    @property
    def name(self) -> str:
        return f"llama-server of {self.kind}"

    @property
    def output(self) -> str:
        """What it has said. It writes where the file's position is, which we share and must not move."""
        number = self.said.fileno()
        return os.pread(number, os.fstat(number).st_size, 0).decode("utf-8", "replace")

    def await_ready(self) -> None:
        while True:
            limit = self._limit()
            if self.process.poll() is not None:
                raise self._ended()
            try:
                with WEB.open(f"{self.url}/health", timeout=min(2.0, limit)):
                    return
            except (OSError, HTTPException):
                time.sleep(POLL_SECONDS)

    def get(self, path: str) -> Any:
        return self._ask(path, urllib.request.Request(self.url + path))

    def post(self, path: str, body: Mapping[str, object]) -> Any:
        return self._ask(path, urllib.request.Request(self.url + path, json.dumps(body).encode(), JSON))

    def _ask(self, path: str, request: urllib.request.Request) -> Any:
        try:
            with WEB.open(request, timeout=self._limit()) as answer:
                return json.load(answer)
        except HTTPError as error:
            with error:
                why = f"status {error.code}: {error.read().decode('utf-8', 'replace')[:300]}"
            raise UnhealthyError(f"{self.name} failed at {path}", why=why, do="see log.txt") from error
        except (OSError, HTTPException, ValueError) as error:
            raise self._failed(path, error) from error

    def require_device(self, device: str) -> None:
        """Refuse a server that holds nothing of the model on *device*: it computes on the CPU and says nothing."""
        sizes = re.findall(rf"\b{re.escape(device)} model buffer size = *([\d.]+) MiB", self.output)
        if not any(float(size) for size in sizes):
            raise UnhealthyError(f"{self.name} ran without a device", why=f"its log names no buffer of {device}")

    def _limit(self) -> float:
        limit = self.left()
        if limit <= 0:
            raise TimeUp(f"no time is left for {self.name}", do="give more --minutes, or choose --stages")
        return limit

    def _failed(self, path: str, error: Exception) -> LlamaforkError:
        if isinstance(error, TimeoutError) or isinstance(getattr(error, "reason", None), TimeoutError):
            return TimeUp(
                f"{self.name} did not answer {path} in the time that was left", do="give more --minutes, or see log.txt"
            )
        try:
            self.process.wait(timeout=max(0.0, min(DYING_SECONDS, self.left())))
        except subprocess.TimeoutExpired:
            return UnhealthyError(f"{self.name} failed at {path}", why=str(error), do="see log.txt")
        return self._ended()

    def _ended(self) -> LlamaforkError:
        """With the first error of its log, which names the cause, and the last line it said."""
        text = self.output.strip()
        said = [*ERROR.findall(text)[:1], *LINE.findall(text)[-1:]]
        why = "; ".join(dict.fromkeys(line.strip()[:200] for line in said)) or "it said nothing"
        return LlamaforkError(f"{self.name} failed (exit {self.process.returncode})", why=why, do="see log.txt")


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on now, each another."""
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(one.getsockname()[1]) for one in taken]


@contextmanager
def running(
    ctx: Context, kind: str, args: Sequence[str | Path], *, port: int, env: Mapping[str, str]
) -> Iterator[Server]:
    """Started at entry (:meth:`Server.await_ready` waits for it), ended and reaped at exit; the log has its output."""
    words = tuple(map(str, [ctx.programs(kind) / "llama-server", *args, "--host", "127.0.0.1", "--port", port]))
    with tempfile.TemporaryFile() as said:
        started = time.monotonic()
        server: Server | None = None
        try:
            with kept(words, env=env, stdout=said, stderr=said) as process:
                server = Server(kind, f"http://127.0.0.1:{port}", process, said, ctx.left)
                yield server
        finally:
            if server is not None:
                took = time.monotonic() - started
                ctx.log.ran(Done(words, server.process.returncode, server.output, "", took))
