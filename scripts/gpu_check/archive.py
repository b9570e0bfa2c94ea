"""One .tar.xz with everything a machine without a network needs; the same content gives the same bytes."""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from llamafork.errors import LlamaforkError, UsageError

LIMIT = 20_000_000
EPOCH = 1767225600  # 2026-01-01T00:00:00Z: when a file was written must not change the archive
MANIFEST = "manifest.json"
SCHEMA = "llamafork.gpu-check-archive/1"


@dataclass(frozen=True)
class Archive:
    """Read into memory. Below ``src`` is the fork's tree; ``stock/BACKEND`` holds what its twin has otherwise."""

    sha256: str
    files: Mapping[str, bytes]

    @cached_property
    def manifest(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.files[MANIFEST])
        return found

    def below(self, top: str) -> dict[str, bytes]:
        return {name[len(top) + 1 :]: data for name, data in self.files.items() if name.startswith(f"{top}/")}

    def source(self, kind: str, backend: str) -> dict[str, bytes]:
        """All files of the ``fork``, or of its ``stock`` twin for *backend*."""
        files = self.below("src")
        if kind == "stock":
            for name in self.manifest["stock"][backend]["removed"]:
                del files[name]
            files |= self.below(f"stock/{backend}")
        return files


def write(target: Path, files: Mapping[str, bytes], *, limit: int = LIMIT) -> int:
    """Write *files* (path to content) and return the size; more than *limit* bytes is refused."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(files):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.mode = len(files[name]), EPOCH, _mode(files[name])
            tar.addfile(entry, io.BytesIO(files[name]))
    data = lzma.compress(made.getvalue(), preset=6)
    if len(data) > limit:
        largest = sorted(files, key=lambda name: len(files[name]))[-3:]
        raise LlamaforkError(
            f"the archive takes {len(data) / 1e6:.1f} MB, more than {limit / 1e6:.0f} MB",
            why=f"the largest files: {', '.join(reversed(largest))}",
            do="leave out what no build reads: DROPPED in scripts/gpu_check/contents.py",
        )
    replace(target, data)
    return len(data)


def read(path: Path) -> Archive:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"cannot read the archive {path}", why=error.strerror or "", do="make it: scripts/gpu-check pack"
        ) from error
    try:
        files = _members(lzma.decompress(data))
        found = Archive(hashlib.sha256(data).hexdigest(), files)
        known = found.manifest["schema"] == SCHEMA
    except (lzma.LZMAError, tarfile.TarError, KeyError, ValueError, TypeError) as error:
        raise _foreign(path, f"{type(error).__name__}: {error}") from error
    if not known:
        raise _foreign(path, f"its form is {found.manifest['schema']}, and this script reads {SCHEMA}")
    return found


def _members(data: bytes) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for entry in tar:
            parts = PurePosixPath(entry.name)
            content = tar.extractfile(entry)
            if content is None or parts.is_absolute() or ".." in parts.parts:
                raise ValueError(f"{entry.name!r} is no plain file inside it")
            files[entry.name] = content.read()
    return files


def _foreign(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is not an archive of this script", why=why, do="make it: scripts/gpu-check pack")


def sync(folder: Path, files: Mapping[str, bytes]) -> int:
    """Make *folder* hold just *files*; returns how many were written or removed.

    What is right already is not touched: its time decides what is compiled again.
    """
    changed = 0
    for path in [p for p in sorted(folder.rglob("*")) if not p.is_dir() or p.is_symlink()]:
        if path.relative_to(folder).as_posix() not in files:
            path.unlink()
            changed += 1
    for name, data in files.items():
        path = folder / name
        if not path.is_file() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            path.chmod(_mode(data))
            changed += 1
    return changed


def digest(files: Mapping[str, bytes]) -> str:
    """Changes with any name or content."""
    parts = (f"{name}\0{hashlib.sha256(files[name]).hexdigest()}\n" for name in sorted(files))
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def _mode(data: bytes) -> int:
    return 0o755 if data[:2] == b"#!" else 0o644


def replace(target: Path, data: bytes) -> None:
    """Readers of *target* see the old content or the new, never a part."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    part.write_bytes(data)
    part.replace(target)
