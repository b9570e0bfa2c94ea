"""Starting, watching and ending one server: own process group, signals passed on, nothing left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from llamafork import console, guard, proc
from llamafork.errors import EnvironmentFault, LlamaforkError
from llamafork.paths import show
from llamafork.run.args import normal
from llamafork.run.output import Output, open_log

POSIX = os.name == "posix"
PR_SET_PDEATHSIG = 1
USR1 = getattr(signal, "SIGUSR1", None)
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
SAME_KEYPRESS_SECONDS = 0.25
LEFTOVER_SECONDS = 2.0


class ChildFailed(LlamaforkError):
    """The child ended by itself; its exit code is ours."""

    def __init__(self, what: str, child_code: int, *, why: str = "", do: str = "") -> None:
        super().__init__(what, why=why, do=do)
        self.child_code = child_code

    def as_dict(self) -> dict[str, object]:
        return {**super().as_dict(), "exit": self.child_code}


class Server:
    """A running child. :meth:`step` must be called often: it notices the child's end and acts on signals."""

    def __init__(self, child: subprocess.Popen[bytes], output: Output, log: Path | None, grace: float) -> None:
        self.child, self.output, self.log, self.grace = child, output, log, grace
        self.signals: list[int] = []
        self._stopping_since: float | None = None
        self._killed = False

    @property
    def stopping(self) -> bool:
        """Whether the end was asked for."""
        return self._stopping_since is not None

    def quiet_for(self) -> float:
        return self.output.quiet_for()

    def step(self) -> bool:
        """Pass signals on and end an overdue shutdown. False once the child has ended or is asked to."""
        while self.signals:
            self._on_signal(self.signals.pop(0))
        since = self._stopping_since
        if since is not None and time.monotonic() - since >= self.grace:
            self._kill("the server did not stop in time; killed")
        return self.child.poll() is None and not self.stopping

    def wait(self) -> int:
        """Until the child has ended and its group is gone: its code, 128 + n for signal n."""
        while self.child.poll() is None:
            self.step()
            time.sleep(0.05)
        self.end_group()
        self.output.finish()
        return proc.exit_code(self.child.returncode)

    def stop(self) -> int:
        """Ask the child to end, as a TERM to us would, and wait."""
        self._on_signal(signal.SIGTERM)
        return self.wait()

    def end_group(self) -> None:
        """What the child has left in its group gets a TERM, a moment, and a KILL."""
        if POSIX:
            guard.end(self.child.pid, 0.0 if self._killed else min(LEFTOVER_SECONDS, self.grace))

    def _on_signal(self, number: int) -> None:
        if number == USR1:
            if self.child.poll() is None:
                self.child.send_signal(number)
        elif self._stopping_since is None:
            self._stopping_since = time.monotonic()
            if self.child.poll() is None:
                self.child.send_signal(number)
                tell(f"waiting up to {self.grace:g} s for the server to stop; press Ctrl-C again to kill")
        # A terminal and a launcher such as `uv run` may both deliver the same Ctrl-C.
        elif number == signal.SIGINT and time.monotonic() - self._stopping_since > SAME_KEYPRESS_SECONDS:
            self._kill("killed")

    def _kill(self, text: str) -> None:
        if not self._killed and self.child.poll() is None:
            self._killed = True
            tell(text)
            proc.signal_group(self.child, KILL)


def tell(text: str) -> None:
    """Say something even though the terminal may be gone."""
    try:
        console.say(text, style="yellow")
    except OSError:
        # What is left in the buffer would fail again at exit and turn our exit code into 120.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


@contextmanager
def running(args: Sequence[str], *, logs: Path, grace: float, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Start *args* in a group of its own, signals handled, for the block; nothing of the group outlives the block.

    ``grace``: seconds between the first signal and KILL. Raises :class:`EnvironmentFault` if it cannot be started.
    """
    early: list[int] = []
    with _handlers(early.append), proc.guardian() as name_group:
        sink, log = open_log(logs, f"$ {proc.command_line([normal(word) for word in args])}")
        output = Output(sink)
        child = _spawn(args, env)
        name_group(child.pid)
        server = Server(child, output, log, grace)
        server.signals = early
        assert child.stdout is not None
        assert child.stderr is not None
        output.follow(child.stdout, 2 if console.output.json else 1)
        output.follow(child.stderr, 2)
        try:
            yield server
        except BaseException:
            server.stop()
            raise
        finally:
            server.wait()


def _spawn(args: Sequence[str], env: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            list(args),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=POSIX,
            preexec_fn=_die_with_parent() if sys.platform == "linux" else None,
        )
    except (OSError, subprocess.SubprocessError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise EnvironmentFault(f"cannot start {show(args[0])}", why=why, do="run `llamafork doctor`") from error


def _die_with_parent() -> Callable[[], None]:
    """Linux: the child gets a KILL when we die. Comparing with our own id keeps this right below pid 1, too."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def before_exec() -> None:
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)

    return before_exec


@contextmanager
def _handlers(record: Callable[[int], None]) -> Iterator[None]:
    """INT, TERM and HUP are recorded for the block; those ignored on purpose (nohup, background) stay ignored.

    USR1 too when the server profiles its scheduler, which then prints at that signal and would die of it otherwise.
    """

    def handle(number: int, _: FrameType | None) -> None:
        record(number)

    before = {}
    profiling = os.environ.get("GGML_SCHED_PROF") in ("1", "2")
    for name in ("SIGINT", "SIGTERM", "SIGHUP", *(("SIGUSR1",) if profiling else ())):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def replace_process(args: Sequence[str]) -> int:
    """Become the program *args*, so that terminal, signals and exit code are its own. Returns only on Windows."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        if not POSIX:
            return subprocess.run(list(args), check=False).returncode
        # Python ignores these two; an ignored signal would stay ignored in the program.
        for name in ("SIGPIPE", "SIGXFSZ"):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        os.execv(args[0], list(args))
    except OSError as error:
        raise EnvironmentFault(
            f"cannot start {show(args[0])}", why=error.strerror or str(error), do="run `llamafork doctor`"
        ) from error
