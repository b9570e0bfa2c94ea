"""A child's output: passed through byte for byte, kept whole in a log, its last lines kept for messages."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO, BinaryIO

from llamafork import console
from llamafork.paths import show

KEPT_LINES, KEPT_LOGS, LONGEST_LINE = 40, 20, 4096


def open_log(folder: Path, header: str) -> tuple[BinaryIO | None, Path | None]:
    """A new log of this run, older ones beyond the newest pruned; without a place for it, a warning and no log."""
    name = f"serve-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Prompts can end up in a verbose server's log: for the owner only.
        stream = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0)
        stream.write(header.encode("utf-8", "surrogateescape") + b"\n")
    except OSError as error:
        console.warn(f"no log is kept: {show(path)}: {error.strerror}")
        return None, None
    prune(folder)
    return stream, path


def prune(folder: Path, keep: int = KEPT_LOGS) -> None:
    logs = sorted(folder.glob("serve-*.log"), key=lambda log: log.name)
    for log in logs[:-keep]:
        try:
            log.unlink()
        except OSError:
            pass


class Output:
    """Drains the child's pipes in threads until they close. A closed terminal or a full disk never stops it."""

    def __init__(self, log: BinaryIO | None) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._lines: deque[bytes] = deque(maxlen=KEPT_LINES)
        self._open_lines: dict[int, bytes] = {}
        self._threads: list[threading.Thread] = []
        self._latest = time.monotonic()

    def follow(self, source: IO[bytes], target: int) -> None:
        thread = threading.Thread(target=self._drain, args=(source, target), daemon=True)
        thread.start()
        self._threads.append(thread)

    def quiet_for(self) -> float:
        """Seconds since the child last wrote something."""
        return time.monotonic() - self._latest

    def last_lines(self, count: int = KEPT_LINES) -> list[str]:
        with self._lock:
            lines = [*self._lines, *(line for line in self._open_lines.values() if line)]
        return [line.decode("utf-8", "backslashreplace") for line in lines[-count:]]

    def finish(self, seconds: float = 1.0) -> None:
        """Wait for the rest; a detached grandchild may hold a pipe open for ever, so not for long."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _drain(self, source: IO[bytes], target: int) -> None:
        show_it = True
        while piece := os.read(source.fileno(), 65536):
            self._latest = time.monotonic()
            self._keep(source.fileno(), piece)
            show_it = show_it and _write_all(target, piece)

    def _keep(self, key: int, piece: bytes) -> None:
        with self._lock:
            *whole, rest = (self._open_lines.get(key, b"") + piece).split(b"\n")
            self._lines.extend(line[-LONGEST_LINE:].rstrip(b"\r") for line in whole)
            self._open_lines[key] = rest[-LONGEST_LINE:]
            if self._log is not None:
                try:
                    self._log.write(piece)
                except OSError:
                    self._log = None


def _write_all(target: int, piece: bytes) -> bool:
    view = memoryview(piece)
    try:
        while view:
            view = view[os.write(target, view) :]
    except OSError:
        return False
    return True
