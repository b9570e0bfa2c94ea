"""A verb, or any work, killed where it opens, makes, renames or removes a file, in a process of its own."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from llamafork import cli, proc

CHANGES = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")


Work = list[str] | Callable[[], object]


def apart(work: Work, at: int, below: Path, sent: signal.Signals = signal.SIGKILL) -> int:
    """Run *work* (words of the command line, or a call), with *sent* at the *at*-th change of a file in *below*.

    Returns the exit status, 0 if there are fewer changes.
    """
    return forked(work, lambda: sys.addaudithook(_hook(at, str(below), sent)))


def forked(work: Work, prepare: Callable[[], object]) -> int:
    """Run *work* in a process of its own, after *prepare* there. Returns the exit status."""
    pid = os.fork()  # a new interpreter each time would cost half a minute in all
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 99
    try:
        proc._file_lock.cache_clear()  # filelock refuses one from before the fork
        prepare()
        code = cli.main(work) if isinstance(work, list) else int(work() is None)
    finally:
        os._exit(code)


def _hook(at: int, below: str, sent: signal.Signals) -> Callable[[str, tuple[object, ...]], None]:
    seen = 0

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal seen
        if event in CHANGES and str(args[0]).startswith(below) and not (event == "open" and args[1] in ("r", "rb")):
            seen += 1
            if seen == at:
                os.kill(os.getpid(), sent)

    return hook


def everywhere(work: Work, below: Path, sent: signal.Signals = signal.SIGKILL) -> Iterator[int]:
    """Kill *work* at its first change, its second and so on, until it ends undisturbed; the caller resets between."""
    at = 1
    while apart(work, at, below, sent) != 0:
        yield at
        at += 1
        assert at < 500
