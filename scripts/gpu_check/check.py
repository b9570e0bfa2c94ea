"""The half that runs on the machine with the GPU: unpack, run the stages, record."""

from __future__ import annotations

import os
import shlex
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from gpu_check import archive, machine, runner
from gpu_check.programs import Log
from gpu_check.record import Record
from gpu_check.stage import Context, Options, Stage, choose
from gpu_check.stages import STAGES
from llamafork.errors import Exit, UsageError


def check(
    options: Options,
    packed: Path,
    out: Path,
    *,
    command: Sequence[str],
    work: Path | None = None,
    names: Sequence[str] = (),
    table: Sequence[Stage] = (),
) -> int:
    """Run the stages *names* (default: all). Returns the exit code; the record is in *out* whatever happens."""
    ends = time.monotonic() + 60 * options.minutes
    stages = choose(table or STAGES, names)
    found = archive.read(packed)
    if options.backend == "cuda" and any(stage.name == "devices" for stage in stages):
        machine.require_gpu()
    folder = _private(work or Path(tempfile.gettempdir()) / "gpu-check")
    _ensure_apart(out, folder)
    with terminable():
        log = Log(out / "log.txt")
        log.say(f"{options.backend}, {options.minutes:g} minutes: {', '.join(stage.name for stage in stages)}")
        record = Record(out, _head(options, found, command), [stage.name for stage in stages])
        ctx = Context(options, found, out.absolute(), folder, log, ends)
        try:
            runner.run(stages, ctx, record)
        except KeyboardInterrupt:
            return Exit.INTERRUPTED
        except SystemExit:
            return Exit.TERMINATED
        finally:
            record.head["minutes_used"] = round((time.monotonic() - log.started) / 60, 2)
            record.write()
            print(f"\n{record.markdown()}", flush=True)
    return Exit.OK if record.ok else Exit.FAILED


def _head(options: Options, found: archive.Archive, command: Sequence[str]) -> dict[str, Any]:
    pin, stock = found.manifest["pin"], found.manifest["stock"][options.backend]
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": shlex.join(["scripts/gpu-check", *command]),
        "series": {"tree": found.manifest["series"], "changes": found.manifest["changes"]},
        "pin": {"version": pin["version"], "tree": pin["tree"]},
        "stock": stock["tree"],
        "archive": found.sha256,
        "backend": options.backend,
        "budget_minutes": options.minutes,
        "machine": machine.facts(),
    }


def _private(folder: Path) -> Path:
    """What is kept here is run again by a later call, so nobody else may have written it."""
    folder = folder.absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.lstat()
    if folder.is_symlink() or state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise UsageError(f"{folder} is open to other users", do="name another folder: --work DIR")
    return folder


def _ensure_apart(out: Path, work: Path) -> None:
    """What lies in *out* is carried home; builds and a model of gigabytes are not meant for that."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is a file", do="name a folder")
    if work == out.absolute() or out.absolute() in work.parents:
        raise UsageError("--work is inside --out", do="name a folder elsewhere for builds and the model")


@contextmanager
def terminable() -> Iterator[None]:
    """TERM ends us like Ctrl-C: with the record written, and nothing left at work."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(Exit.TERMINATED)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
