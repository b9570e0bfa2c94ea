"""What a comparison has done so far, so that an interrupted one goes on where it stopped."""

from __future__ import annotations

import glob
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from llamafork.compare.target import Target
from llamafork.facts.gguf_file import SHARD
from llamafork.paths import Paths
from llamafork.proc import POSIX

KEPT_DAYS = 30


class Journal:
    """One line a finished step in a file of the state folder; it is removed when the comparison has ended.

    Until then it is held, so that :func:`prune` leaves it alone.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.done: dict[str, Any] = {}
        self._held: IO[bytes] | None = None
        if file.is_file():
            self._hold()
            for line in file.read_text(encoding="utf-8").splitlines():
                try:
                    entry = json.loads(line)
                    self.done[entry["step"]] = entry["result"]
                except (ValueError, KeyError, TypeError):
                    continue  # the line that was being written when it was stopped

    def step(self, name: str, work: Callable[[], Any]) -> Any:
        """The result of *work*, from the journal if it is there. Results must survive JSON."""
        if name not in self.done:
            result = json.loads(json.dumps(work()))
            out = self._hold()
            # begins with the end of a line that an earlier run may have left torn
            out.write(("\n" + json.dumps({"step": name, "result": result}) + "\n").encode())
            out.flush()
            self.done[name] = result
        return self.done[name]

    def close(self) -> None:
        if self._held is not None:
            self._held.close()
        self.file.unlink(missing_ok=True)

    def _hold(self) -> IO[bytes]:
        if self._held is None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._held = self.file.open("ab")
            _lock(self._held, alone=False)
        return self._held


def _lock(handle: IO[bytes], *, alone: bool) -> None:
    """Until *handle* is closed; *alone*: :class:`OSError` if anyone else holds it."""
    if POSIX:  # elsewhere an open file cannot be removed anyway
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)


def prune(folder: Path, *, but: Path) -> None:
    """Remove journals whose last step is :data:`KEPT_DAYS` ago, but those in use and the one that is wanted now."""
    for file in folder.glob("*.jsonl"):
        with suppress(OSError):  # held, gone meanwhile, or not ours: there is another time
            if file != but and file.stat().st_mtime < time.time() - KEPT_DAYS * 86400:
                with file.open("ab") as handle:
                    _lock(handle, alone=True)
                    file.unlink()


def of(paths: Paths, targets: Sequence[Target], models: Sequence[Path], options: object) -> Journal:
    """The journal of just this comparison: other programs, files or options are another one. Old ones are removed."""
    facts = [[str(t.folder), _stamp(t.folder)] for t in targets] + [[str(m), _stamp(m)] for m in models]
    key = hashlib.sha256(json.dumps([facts, options], default=str).encode()).hexdigest()[:16]
    file = paths.state / "compare" / f"{key}.jsonl"
    prune(file.parent, but=file)
    return Journal(file)


def _stamp(path: Path) -> list[tuple[str, int, int]]:
    """Of a folder of programs with its libraries beside; of a file with the other parts of a split model."""
    if path.is_dir():
        beside = path.parent / "lib"
        files = [*sorted(path.iterdir()), *(sorted(beside.iterdir()) if beside.is_dir() else [])]
    else:
        shard = SHARD.match(path.name)
        files = (
            sorted(path.parent.glob(f"{glob.escape(shard['stem'])}-*-of-{shard['count']}.gguf")) if shard else [path]
        )
    return [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()]
