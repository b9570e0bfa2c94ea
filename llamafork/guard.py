"""Outlives a killed wrapper just long enough to end the server's process group.

Run by path with a pipe as stdin, stdlib only. The wrapper writes the group's number, and ``done`` when it has
cleaned up itself; the end of the pipe without ``done`` means that the wrapper was killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time

GRACE_SECONDS = 1.0


def alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def end(group: int, grace: float) -> None:
    """TERM to the group, up to *grace* seconds, KILL to what is left."""
    try:
        os.killpg(group, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while alive(group) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    words = sys.stdin.read().split()
    if words and words[-1] != "done":
        end(int(words[0]), GRACE_SECONDS)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
