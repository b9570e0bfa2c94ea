"""What a comparison has done so far, so that an interrupted one goes on where it stopped."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from llamafork.compare.target import Target
from llamafork.facts.gguf_file import SHARD
from llamafork.paths import Paths


class Journal:
    """One line a finished step in a file of the state folder; it is removed when the comparison has ended."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.done: dict[str, Any] = {}
        if file.is_file():
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
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8") as out:
                # begins with the end of a line that an earlier run may have left torn
                out.write("\n" + json.dumps({"step": name, "result": result}) + "\n")
            self.done[name] = result
        return self.done[name]

    def close(self) -> None:
        self.file.unlink(missing_ok=True)


def of(paths: Paths, targets: Sequence[Target], models: Sequence[Path], options: object) -> Journal:
    """The journal of just this comparison: other programs, files or options are another one."""
    facts = [[str(t.folder), _stamp(t.folder)] for t in targets] + [[str(m), _stamp(m)] for m in models]
    key = hashlib.sha256(json.dumps([facts, options], default=str).encode()).hexdigest()[:16]
    return Journal(paths.state / "compare" / f"{key}.jsonl")


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
