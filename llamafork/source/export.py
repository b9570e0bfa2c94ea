"""Writing the series out: canonical folders, and standard mails for `git am`."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llamafork.errors import UsageError
from llamafork.paths import write_atomic
from llamafork.source import replay, series
from llamafork.source.prepare import Stack

MAIL = (
    "--no-signature",
    "--zero-commit",
    "--no-stat",
    "--no-numbered",
    "--no-cover-letter",
    "--no-attach",
    "--full-index",
    "--binary",
    "--no-renames",
    "--diff-algorithm=myers",
    "--no-indent-heuristic",
)


def canonical(made: Stack) -> list[series.Change]:
    """Each change as re-derived from its commit."""
    return [
        replay.to_change(made.repo, a.change.name, made.before(a.change.name), a.commit, a.change.message)
        for a in made.applied
    ]


def check(made: Stack) -> list[str]:
    """Files whose bytes would change if the series were exported again; empty when it round-trips."""
    different: list[str] = []
    for ours, again in zip(made.series.changes, canonical(made), strict=True):
        before, after = series.files_of(ours), series.files_of(again)
        different += [f"{ours.name}/{p}" for p in sorted(before.keys() | after.keys()) if before.get(p) != after.get(p)]
    lock = made.series.folder / "series.lock"
    if lock.read_bytes() != series.lock_text(made.base.tree, made.trees).encode():
        different.append("series.lock")
    return different


def folders(made: Stack, target: Path) -> list[Path]:
    """Write the canonical series into an empty *target* folder, in the format of patches/."""
    with _filling(target) as folder:
        for change in canonical(made):
            series.save(folder, change)
        write_atomic(folder / "series", "".join(f"{c.name}\n" for c in made.series.changes))
        write_atomic(folder / "series.lock", series.lock_text(made.base.tree, made.trees))
    return sorted(target.iterdir())


def mbox(made: Stack, target: Path) -> list[Path]:
    """One mail a change, as `git format-patch` writes them, numbered in order, into an empty *target* folder."""
    with _filling(target) as folder:
        if made.applied:
            made.repo.run("format-patch", "-q", *MAIL, "-o", str(folder.absolute()), f"{made.base.commit}..{made.tip}")
    return sorted(target.iterdir())


@contextmanager
def _filling(target: Path) -> Iterator[Path]:
    """A folder beside *target* that takes its name when the block ends: an interrupted export leaves nothing there."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} is not an empty folder", do="name a new folder")
    part = target.with_name(f".part-{target.name}")
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)
    try:
        yield part
        if target.exists():
            target.rmdir()
        part.rename(target)
    finally:
        if part.exists():
            shutil.rmtree(part)
