"""The only module that talks to the terminal: results on stdout, progress and messages on stderr."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from llamafork.errors import LlamaforkError

QUIET, NORMAL, VERBOSE, DEBUG = -1, 0, 1, 2
SECRET = re.compile(r"(?i)((?:api[-_]?key|token|password|secret|authorization)\S*?(?:\s+|[=:]\s*)(?:bearer\s+)?)(\S+)")
USERINFO = re.compile(r"(\w+://)[^/@\s'\"]+@")
SECRET_FLAGS = frozenset({"--api-key", "--hf-token", "-hft", "--token", "--password"})


class Output:
    """Verbosity, JSON mode and the two rich consoles, made when first used (rich costs 60 ms to import)."""

    def __init__(self) -> None:
        self.level = NORMAL
        self.json = False
        self._err: Console | None = None
        self._out: Console | None = None

    @property
    def err(self) -> Console:
        if self._err is None:
            self._err = _console(stderr=True)
        return self._err

    @property
    def out(self) -> Console:
        if self._out is None:
            self._out = _console(stderr=False)
        return self._out


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    plain = os.environ.get("TERM") == "dumb" or not stream.isatty()
    width = None if not plain else 100_000
    return Console(stderr=stderr, highlight=False, soft_wrap=True, width=width, emoji=False, markup=False)


output = Output()


def configure(*, level: int = NORMAL, as_json: bool = False) -> None:
    output.level, output.json = level, as_json
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def say(text: str, *, style: str = "", level: int = NORMAL) -> None:
    """A message line on stderr."""
    if output.level >= level:
        output.err.print(text, style=style or None)


def detail(text: str) -> None:
    say(text, style="dim", level=VERBOSE)


def warn(text: str) -> None:
    if output.level >= QUIET:
        output.err.print(f"warning: {hide_userinfo(text)}", style="yellow")


def result(text: str) -> None:
    """A result line on stdout; silent in JSON mode, where the one object is the result."""
    if not output.json:
        output.out.print(text)


def emit(schema: str, data: Mapping[str, Any]) -> None:
    """In JSON mode, the one object of this run on stdout."""
    if output.json:
        sys.stdout.write(
            json.dumps({"schema": f"llamafork.{schema}/1", **data}, indent=2, default=str, allow_nan=False)
        )
        sys.stdout.write("\n")
        sys.stdout.flush()


def failure(error: LlamaforkError, *, last: bool = True) -> None:
    """What, why, what to do. *last*: it is the run's result, also on stdout in JSON mode."""
    said = {k: hide_userinfo(v) if isinstance(v, str) else v for k, v in error.as_dict().items()}
    if last:
        emit("error", said)
    output.err.print(f"error: {said['error']}", style="bold red")
    for key, label in (("why", "why: "), ("do", "do:  ")):
        if said[key]:
            output.err.print(f"  {label}{said[key]}")


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, title: str = "") -> None:
    """A table on stdout; tab-separated when stdout is not a terminal, so that it can be cut and sorted."""
    if output.json:
        return
    if not sys.stdout.isatty():
        print("\t".join(headers))
        for row in rows:
            print("\t".join(str(cell) for cell in row))
        return
    from rich.table import Table

    grid = Table(title=title or None, title_justify="left")
    for header in headers:
        grid.add_column(header, overflow="fold")  # a key that is cut cannot be copied
    for row in rows:
        grid.add_row(*(str(cell) for cell in row))
    output.out.print(grid)


class Step:
    """A running step; ``update`` shows how far it is, ``note`` is printed after its name when it ends."""

    def __init__(self, name: str) -> None:
        self.name, self.note = name, ""
        self.started = time.monotonic()
        self._status: Any = None
        self._told = self.started

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def update(self, text: str) -> None:
        if self._status is not None:
            self._status.update(f"{self.name} … {text} ({self.seconds:.0f} s)")
        elif time.monotonic() - self._told >= 30 and output.level >= NORMAL:
            self._told = time.monotonic()
            say(f"  {self.name} … {text} ({self.seconds:.0f} s)")


@contextmanager
def step(name: str) -> Iterator[Step]:
    """A named step: a spinner in a terminal, plain lines elsewhere, ``✓ name (seconds)`` at the end."""
    current = Step(name)
    live = output.level >= NORMAL and output.err.is_terminal and os.environ.get("TERM") != "dumb"
    if live:
        with output.err.status(f"{name} …") as status:
            current._status = status
            yield current
    else:
        yield current
    current._status = None
    note = f": {current.note}" if current.note else ""
    say(f"✓ {name}{note} ({current.seconds:.1f} s)", style="green" if live else "")


def hide_userinfo(text: str) -> str:
    """*text* with the user and password of URLs replaced."""
    return USERINFO.sub(r"\1***@", text)


def redact(text: str) -> str:
    """*text* with what follows a word like token, api-key or authorization replaced."""
    return SECRET.sub(r"\1***", text)


def redact_args(args: Sequence[str]) -> list[str]:
    """A command line with the values of secret flags replaced; for printing and logs only."""
    shown: list[str] = []
    hide = False
    for arg in args:
        name, equals, _ = arg.partition("=")
        if hide:
            shown.append("***")
            hide = False
        elif name in SECRET_FLAGS:
            shown.append(f"{name}=***" if equals else name)
            hide = not equals
        else:
            shown.append(hide_userinfo(arg))
    return shown
