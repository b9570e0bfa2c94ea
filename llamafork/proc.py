"""The one way to run another program: argument lists only, output captured or streamed, a shutdown ladder."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llamafork import guard
from llamafork.console import detail, redact_args
from llamafork.errors import EnvironmentFault

Args = Sequence[str | Path]


@dataclass(frozen=True)
class Result:
    args: tuple[str, ...]
    code: int
    out: str
    err: str

    @property
    def ok(self) -> bool:
        return self.code == 0


def command_line(args: Args) -> str:
    """A command as one copy-and-paste safe line, secrets hidden."""
    return shlex.join(redact_args([str(a) for a in args]))


def run(
    args: Args,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str | bytes | None = None,
    timeout: float | None = None,
) -> Result:
    """Run to the end and capture. A program that cannot be started is an :class:`EnvironmentFault`."""
    words = [str(a) for a in args]
    detail(f"$ {command_line(words)}")
    data = stdin.encode() if isinstance(stdin, str) else stdin
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            env=env,
            input=data,
            capture_output=True,
            timeout=timeout,
            stdin=None if data is not None else subprocess.DEVNULL,
        )
    except FileNotFoundError as error:
        raise EnvironmentFault(f"cannot run {words[0]}", why=str(error), do=f"install {Path(words[0]).name}") from error
    except OSError as error:
        raise EnvironmentFault(f"cannot run {words[0]}", why=str(error)) from error
    except subprocess.TimeoutExpired:
        return Result(tuple(words), 124, "", f"no answer within {timeout} s")
    return Result(
        tuple(words), done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
    )


def stream(
    args: Args,
    *,
    log: Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    line: Callable[[str], None] | None = None,
) -> int:
    """Run with output (both streams) appended to *log* and handed to *line*; the group dies with us,
    on Ctrl-C and also when we are killed (see guard.py).
    """
    words = [str(a) for a in args]
    detail(f"$ {command_line(words)}")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", buffering=1, encoding="utf-8", errors="replace") as sink, guardian() as name_group:
        sink.write(f"$ {command_line(words)}\n")
        sink.flush()
        try:
            child = subprocess.Popen(
                words,
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=os.name == "posix",
            )
        except OSError as error:
            raise EnvironmentFault(f"cannot run {words[0]}", why=str(error)) from error
        name_group(child.pid)
        try:
            assert child.stdout is not None
            for text in child.stdout:
                sink.write(text)
                if line is not None:
                    line(text.rstrip("\n"))
            return child.wait()
        except BaseException:
            shut_down(child, grace=5.0)
            raise


@contextmanager
def guardian() -> Iterator[Callable[[int], None]]:
    """A small process that ends the group named to it if we are killed without a chance to do so."""
    if os.name != "posix":
        yield lambda _: None
        return
    command = [sys.executable, "-I", "-S", str(Path(guard.__file__))]
    watcher = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    try:
        yield lambda group: _write(watcher, f"{group}\n")
    finally:
        _write(watcher, "done\n")
        try:
            assert watcher.stdin is not None
            watcher.stdin.close()
        except OSError:
            pass
        watcher.wait()


def _write(watcher: subprocess.Popen[str], text: str) -> None:
    assert watcher.stdin is not None
    try:
        watcher.stdin.write(text)
        watcher.stdin.flush()
    except OSError:
        pass


def signal_group(child: subprocess.Popen[str] | subprocess.Popen[bytes], number: int) -> None:
    """Send *number* to the child's whole group (it leads one), or to the child alone elsewhere."""
    try:
        if os.name == "posix":
            os.killpg(child.pid, number)
        else:
            child.send_signal(number)
    except (ProcessLookupError, PermissionError):
        pass


def shut_down(child: subprocess.Popen[str] | subprocess.Popen[bytes], *, grace: float) -> int:
    """TERM to the group, wait *grace* seconds, KILL the group, reap. Returns the child's code."""
    signal_group(child, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    signal_group(child, getattr(signal, "SIGKILL", signal.SIGTERM))
    return child.wait()


def exit_code(returncode: int) -> int:
    """A child's return code as a shell would report it: 128 + n for signal n."""
    return 128 - returncode if returncode < 0 else returncode
