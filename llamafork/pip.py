"""Files from the user's package index: pip is run, so that index, mirror, proxy and wheel folder settings apply."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from llamafork import proc


def download(into: Path, *words: str | Path) -> proc.Result:
    """``pip download`` of *words* without dependencies into the folder *into*."""
    quiet = ("--disable-pip-version-check", "--no-input")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", *quiet, *_resume(), "-d", into, *words]
    return proc.run(command, guarded=True)


@cache
def _resume() -> tuple[str, ...]:
    """pip 25.1 and newer go on with a download that broke off; older ones begin again."""
    known = proc.run([sys.executable, "-m", "pip", "download", "--help"]).out
    return ("--resume-retries", "5") if "--resume-retries" in known else ()
