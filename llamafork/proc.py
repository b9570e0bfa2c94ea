"""The one way to run another program: argument lists only, output captured or streamed, a shutdown ladder.

Also the lock under which programs write: they share it, so that it outlives a killed wrapper as long as they do.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from llamafork import guard
from llamafork.console import detail, redact_args, warn
from llamafork.errors import EnvironmentFault

if TYPE_CHECKING:
    from filelock import BaseFileLock

Args = Sequence[str | Path]
POSIX = os.name == "posix"
FOREIGN = ("LLAMA_ARG_", "LLAMA_API_KEY", "LLAMA_MOE_CACHE_", "GGML_")
_shared: list[int] = []  # descriptors of the locks now held, for the programs started meanwhile


@dataclass(frozen=True)
class Result:
    args: tuple[str, ...]
    code: int
    out: str
    err: str
    raw: bytes = b""  # standard output undecoded

    @property
    def ok(self) -> bool:
        return self.code == 0


def command_line(args: Args) -> str:
    """A command as one copy-and-paste safe line, secrets hidden."""
    return shlex.join(redact_args([str(a) for a in args]))


def plain_environment() -> dict[str, str]:
    """Ours without what would decide, beside the arguments, what a program of llama.cpp does."""
    return {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """An exclusive lock; taking it again in the same process is fine.

    Killing us does not kill a git that we started. So each program gets the descriptor of a flock as it starts: the
    kernel frees that lock when the last holder ends, and the next run waits for the orphan instead of writing beside
    it. Unlike a parent-death signal this costs nothing a call, does not depend on threads, and works on macOS.
    """
    own = _file_lock(path.absolute())
    if own.is_locked:
        yield
        return
    with own, _shared_lock(path) if POSIX else nullcontext():
        yield


@cache
def _file_lock(path: Path) -> BaseFileLock:
    from filelock import FileLock

    return FileLock(path)


@contextmanager
def _shared_lock(path: Path) -> Iterator[None]:
    import fcntl

    with path.with_name(f"{path.name}.shared").open("ab") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            warn("an interrupted run left a program at work; waiting for it to end")
            fcntl.flock(handle, fcntl.LOCK_EX)
        _shared.append(handle.fileno())
        stopped = False
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            stopped = True  # what we started may end after us: the lock is its until then
            raise
        finally:
            _shared.remove(handle.fileno())
            if not stopped:  # a daemon that some program left behind must not keep it
                fcntl.flock(handle, fcntl.LOCK_UN)


def shared_fds() -> tuple[int, ...]:
    """For Popen's ``pass_fds`` where a program is started without :func:`run` or :func:`stream`."""
    return tuple(_shared)


def run(
    args: Args,
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: str | bytes | None = None,
    timeout: float | None = None,
    guarded: bool = False,
) -> Result:
    """Run to the end and capture. A program that cannot be started is an :class:`EnvironmentFault`.

    *guarded*: for what may take minutes, such as a download; it dies with us even if we are killed (see guard.py).
    """
    words = [str(a) for a in args]
    detail(f"$ {command_line(words)}")
    data = stdin.encode() if isinstance(stdin, str) else stdin
    with guardian() if guarded else nullcontext(_nobody) as name_group:
        child: subprocess.Popen[bytes] | None = None
        try:
            with _signals_wait():
                command, takes = (_gated(words, env, data), True) if guarded else (words, data is not None)
                child = subprocess.Popen(
                    command,
                    cwd=cwd,
                    env=env,
                    stdin=subprocess.PIPE if takes else subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=guarded and POSIX,
                    pass_fds=shared_fds(),
                )
                name_group(child.pid)
            out, err = child.communicate(_go(data) if guarded else data, timeout=timeout)
        except BaseException as error:
            if child is None:
                _raise_if_it_cannot_run(words, error)
                raise
            if guarded:
                shut_down(child, grace=1.0)
            else:
                _end(child)
            if isinstance(error, subprocess.TimeoutExpired):
                return Result(tuple(words), 124, "", f"no answer within {timeout} s")
            raise
        finally:
            for pipe in (child.stdin, child.stdout, child.stderr) if child is not None else ():
                if pipe is not None and not pipe.closed:
                    _close(pipe)
    return Result(tuple(words), child.returncode, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"), out)


def _gated(words: list[str], env: Mapping[str, str] | None, data: bytes | None = None) -> list[str]:
    """*words* behind a shell that becomes them at the first line it reads, and ends if none comes.

    Killed between starting a program and naming it to the guardian, we would leave it running.
    """
    if not POSIX:
        return words
    if shutil.which(words[0], path=(os.environ if env is None else env).get("PATH")) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), words[0])
    return ["/bin/sh", "-c", 'read -r go && exec "$@"' + (" </dev/null" if data is None else ""), words[0], *words]


def _go(data: bytes | None = None) -> bytes | None:
    return b"go\n" + (data or b"") if POSIX else data


def _raise_if_it_cannot_run(words: list[str], error: BaseException) -> None:
    if isinstance(error, OSError):
        do = f"install {Path(words[0]).name}" if isinstance(error, FileNotFoundError) else ""
        raise EnvironmentFault(f"cannot run {words[0]}", why=str(error), do=do) from error


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Ctrl-C and TERM are raised at the end of the block: raised in the middle of Popen they would leave a program
    running that nobody knows.
    """
    held: list[int] = []
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(signal.getsignal(number)):
                before[number] = signal.signal(number, lambda sent, _: held.append(sent))
    try:
        yield
    finally:
        for sent, handler in before.items():
            signal.signal(sent, handler)
    for sent in held[:1]:
        signal.raise_signal(sent)


def _end(child: subprocess.Popen[bytes]) -> None:
    child.terminate()  # git removes its lock files
    try:
        child.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _nobody(_: int) -> None:
    """Names no group to any guardian."""


def _close(pipe: IO[bytes] | IO[str]) -> None:
    try:
        pipe.close()
    except OSError:  # what was not written yet has no reader any more
        pass


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
        child: subprocess.Popen[str] | None = None
        try:
            with _signals_wait():
                child = subprocess.Popen(
                    _gated(words, env),
                    cwd=cwd,
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    start_new_session=POSIX,
                    pass_fds=shared_fds(),
                )
                name_group(child.pid)
            assert child.stdin is not None
            assert child.stdout is not None
            with suppress(BrokenPipeError), child.stdin:
                child.stdin.write((_go() or b"").decode())
            for text in child.stdout:
                sink.write(text)
                if line is not None:
                    line(text.rstrip("\n"))
            return child.wait()
        except BaseException as error:
            if child is None:
                _raise_if_it_cannot_run(words, error)
                raise
            shut_down(child, grace=5.0)
            raise


@contextmanager
def kept(
    args: Args, *, env: Mapping[str, str] | None, stdout: int | IO[bytes], stderr: int | IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """A program for the length of a block, which ends it; also gone when we are killed (see guard.py)."""
    words = [str(a) for a in args]
    detail(f"$ {command_line(words)}")
    with guardian() as name_group:
        child: subprocess.Popen[bytes] | None = None
        try:
            with _signals_wait():
                child = subprocess.Popen(
                    _gated(words, env),
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=stdout,
                    stderr=stderr,
                    start_new_session=POSIX,
                )
                name_group(child.pid)
            assert child.stdin is not None
            with suppress(BrokenPipeError), child.stdin:
                child.stdin.write(_go() or b"")
            yield child
        except OSError as error:
            if child is None:
                _raise_if_it_cannot_run(words, error)
            raise
        finally:
            if child is not None:
                shut_down(child, grace=1.0)


@contextmanager
def guardian() -> Iterator[Callable[[int], None]]:
    """A small process that ends the group named to it if we are killed without a chance to do so."""
    if not POSIX:
        yield _nobody
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
        assert watcher.stdin is not None
        _close(watcher.stdin)
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
        if POSIX:
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
