"""How much memory this process may still take: what the machine has free, or what its cgroup leaves if that is less."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil


@dataclass(frozen=True)
class _Version:
    """The files of one cgroup version. ``stat`` names counters of memory.stat that can be given back at once."""

    limit: str
    use: str
    stat: tuple[str, ...]


V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
V2 = _Version("memory.max", "memory.current", ("active_file", "inactive_file"))


def available(root: Path = Path("/")) -> int:
    """Bytes. *root* is where ``proc`` and ``sys`` are looked for."""
    return min([int(psutil.virtual_memory().available), *cgroup_left(root)])


def cgroup_left(root: Path = Path("/")) -> Iterator[int]:
    """What each cgroup with a limit leaves: this process's own and all above it."""
    for base, path, version in _memberships(root):
        # A container may see the host's path while its own group is mounted at the top, so the top counts too.
        for group in (path, *path.parents):
            left = _left(base / group.relative_to("/"), version)
            if left is not None:
                yield left


def _memberships(root: Path) -> Iterator[tuple[Path, PurePosixPath, _Version]]:
    top = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, name = [*line.split(":", 2), "", ""][:3]
        path = PurePosixPath("/", *(p for p in PurePosixPath(name).parts if p not in ("..", "/")))
        if not controllers:
            yield top, path, V2
            yield top / "unified", path, V2
        elif "memory" in controllers.split(","):
            yield top / "memory", path, V1


def _left(folder: Path, version: _Version) -> int | None:
    limit, use = _read(folder / version.limit).strip(), _read(folder / version.use).strip()
    if not limit.isdecimal() or not use.isdecimal():
        return None
    pairs = (line.split() for line in _read(folder / "memory.stat").splitlines())
    # The page cache counts as use, and the kernel drops it before it refuses memory.
    cached = sum(int(words[1]) for words in pairs if len(words) == 2 and words[0] in version.stat)
    return max(0, int(limit) - max(0, int(use) - cached))


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
