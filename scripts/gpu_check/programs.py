"""Running a program: in a group of its own, up to a time, with what it said kept even if it was ended."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from llamafork.errors import EnvironmentFault, LlamaforkError
from llamafork.proc import Args, command_line, guardian, shut_down

GRACE = 2.0
LOGGED = 1 << 20  # of each stream of a program; the log has to stay small enough to be brought back


class Log:
    """What is printed, and beside it what the programs printed."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.started = time.monotonic()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("", encoding="utf-8")

    def say(self, text: str) -> None:
        line = f"[{time.monotonic() - self.started:6.1f} s] {text}"
        print(line, flush=True)
        self.add(line)

    def add(self, text: str) -> None:
        with self.file.open("a", encoding="utf-8", errors="replace") as out:
            out.write(text.rstrip("\n") + "\n")

    def ran(self, done: Done, note: str = "") -> None:
        """What a program said, as much of it as can be brought back."""
        self.add(f"$ {command_line(done.args)}\n{done.out[-LOGGED:]}{done.err[-LOGGED:]}")
        self.add(f"(exit {done.code}{note}, {done.seconds:.1f} s)")


@dataclass(frozen=True)
class Done:
    """``late``: it was ended at its limit; ``out`` and ``err`` hold what it had said by then."""

    args: tuple[str, ...]
    code: int
    out: str
    err: str
    seconds: float
    late: bool = False

    @property
    def ok(self) -> bool:
        return self.code == 0 and not self.late

    @property
    def name(self) -> str:
        return Path(self.args[0]).name

    @property
    def last(self) -> str:
        """The last line it said, for an error."""
        lines = (self.err.strip() or self.out.strip()).splitlines()
        return lines[-1].strip()[:300] if lines else f"exit {self.code}"


class TimeUp(LlamaforkError):
    """The budget or a program's own limit is spent."""


def run(
    args: Args, *, limit: float, log: Log | None = None, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Done:
    """Run to the end, or end the whole group after *limit* seconds. It dies with us, too, even if we are killed."""
    words = tuple(str(word) for word in args)
    if limit <= 0:
        raise TimeUp(f"no time is left for {Path(words[0]).name}", do="give more --minutes, or choose --stages")
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, guardian() as name_group:
        started = time.monotonic()
        try:
            child = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, cwd=cwd, start_new_session=True
            )
        except OSError as error:
            raise EnvironmentFault(f"cannot run {Path(words[0]).name}", why=str(error)) from error
        late = False
        try:
            name_group(child.pid)
            code = child.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            late, code = True, shut_down(child, grace=GRACE)
        except BaseException:
            shut_down(child, grace=GRACE)
            raise
        done = Done(words, code, _text(out), _text(err), time.monotonic() - started, late)
    if log is not None:
        log.ran(done, f", ended at its limit of {limit:.0f} s" if late else "")
    return done


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def checked(done: Done) -> Done:
    """*done*, if it ended well."""
    if done.late:
        raise TimeUp(
            f"{done.name} took longer than the {done.seconds:.0f} s that were left for it",
            why=f"the last it said: {done.last}",
            do="give more --minutes, or choose --stages",
        )
    if not done.ok:
        raise LlamaforkError(f"{done.name} failed (exit {done.code})", why=done.last, do="see log.txt")
    return done
