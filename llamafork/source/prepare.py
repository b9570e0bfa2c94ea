"""From pin and series to a patched tree in the object store: what `build` compiles and `patch apply` checks out."""

from __future__ import annotations

import re
from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from llamafork import console, proc
from llamafork.errors import PatchError, SourceError, UsageError
from llamafork.paths import Paths
from llamafork.source import fetch, pin, replay, series
from llamafork.source.fetch import Fetched
from llamafork.source.git import Git
from llamafork.source.pin import Pin, Source
from llamafork.source.series import Series


@dataclass(frozen=True)
class Stack:
    """A base and the changes replayed on it. ``repo`` is the store that holds all of it."""

    repo: Git
    base: Fetched
    series: Series
    applied: tuple[replay.Applied, ...]

    @property
    def tip(self) -> str:
        return self.applied[-1].commit if self.applied else self.base.commit

    @property
    def tree(self) -> str:
        return self.applied[-1].tree if self.applied else self.base.tree

    @property
    def trees(self) -> dict[str, str]:
        return {a.change.name: a.tree for a in self.applied}

    def before(self, name: str) -> str:
        """The commit that change *name* is replayed on."""
        commits = [self.base.commit, *(a.commit for a in self.applied)]
        return commits[[a.change.name for a in self.applied].index(name)]


def locked(paths: Paths) -> AbstractContextManager[None]:
    """One lock for store and work tree; taking it again in the same process is fine."""
    paths.cache.mkdir(parents=True, exist_ok=True)
    return proc.lock(paths.cache / "source.lock")


def pinned(paths: Paths, *, offline: bool = False) -> Fetched:
    return fetch.fetch(paths, pin.load(paths.pin), offline=offline)


def stack(paths: Paths, *, offline: bool = False, check_lock: bool = True) -> Stack:
    """The pin with the whole series applied, exactly. Replayed once; afterwards read back by the series' digest."""
    with locked(paths):
        base, loaded = pinned(paths, offline=offline), series.load(paths.patches)
        repo = fetch.store(paths)
        ref = f"refs/series/{base.tree[:16]}-{loaded.digest[:40]}"
        made = _read_back(repo, base, loaded, ref)
        if made is None:
            made = Stack(repo, base, loaded, tuple(replay.replay(repo, base.commit, loaded.changes)))
            if made.applied:
                repo.run("update-ref", ref, made.tip)
        if check_lock:
            compare_lock(made)
        return made


def _read_back(repo: Git, base: Fetched, loaded: Series, ref: str) -> Stack | None:
    tip = repo.resolve(ref)
    if tip is None:
        return None
    lines = repo.text("log", "--reverse", "--format=%H %T", f"{base.commit}..{tip}").splitlines()
    if len(lines) != len(loaded.changes):
        return None
    pairs = [line.split() for line in lines]
    return Stack(
        repo,
        base,
        loaded,
        tuple(
            replay.Applied(change, commit, tree, "clean")
            for change, (commit, tree) in zip(loaded.changes, pairs, strict=True)
        ),
    )


def stock(paths: Paths, backends: Collection[str], *, offline: bool = False) -> Stack:
    """The pin as it is, but for the changes that bring a backend of *backends*: nothing else can build that one."""
    with locked(paths):
        made = stack(paths, offline=offline)
        wanted = made.series.instruments(backends)
        applied = replay.replay(made.repo, made.base.commit, wanted, three_way=True)
        if applied:
            made.repo.run("update-ref", f"refs/stock/{applied[-1].tree[:16]}", applied[-1].commit)
        return replace(made, applied=tuple(applied))


def compare_lock(made: Stack) -> None:
    """Raise :class:`PatchError` when series.lock names other tree hashes than the ones just made."""
    lock = made.series.lock
    wanted = {"pin": made.base.tree, **made.trees}
    if not lock:
        raise PatchError(
            "patches/series.lock is missing",
            why="nothing proves that this series is the one reviewed",
            do="llamafork patch refresh writes it",
        )
    for name, tree in wanted.items():
        if lock.get(name) != tree:
            raise PatchError(
                f"series.lock does not match at {name}",
                why=f"lock {lock.get(name)}, applied {tree}",
                do="restore patches/, or run llamafork patch refresh if the edit is yours",
            )
    if set(lock) != set(wanted):
        extra = ", ".join(sorted(set(lock) - set(wanted)))
        raise PatchError(f"series.lock names changes that are not in the series: {extra}", do="llamafork patch refresh")


def upstream_pin(paths: Paths, where: str, number: int | None) -> Pin:
    """The pin for ``--upstream``: ``sdist:BUILD``, URL@REF, an archive or a folder.

    The build number comes from the name (``b11401``, ``11401.0.0``) or from *number*; unknown is a usage error,
    because a program that calls itself build 0 is of no use in a bug report.
    """
    ours = pin.load(paths.pin)
    if where.startswith("sdist:"):
        source, named = _sdist(ours, where.removeprefix("sdist:"))
    elif "://" in where or where.startswith("git@"):
        url, _, ref = where.rpartition("@")
        if not url or "/" in ref:
            raise UsageError(
                f"--upstream {where} names no ref", do="write URL@TAG, such as https://host/llama.cpp@b11401"
            )
        source, named = Source("git", url=url, ref=ref), _number(ref)
    else:
        path = Path(where).expanduser().absolute()
        if not path.exists():
            raise SourceError(
                f"--upstream: no such file or folder: {where}", do="name a folder, an archive, or URL@REF"
            )
        source, named = Source("folder" if path.is_dir() else "archive", path=str(path)), _number(path.name)
    build = number or named
    if build is None or build < 2:
        raise UsageError(
            f"the build number of {where} is not known", why="its name does not carry one", do="add --upstream-build N"
        )
    return replace(
        ours,
        build=build,
        version=f"b{build}-upstream" if source.kind != "sdist" else f"b{build}",
        tree="",
        sources=(source,),
    )


def _sdist(ours: Pin, word: str) -> tuple[Source, int | None]:
    build = int(word.removeprefix("b")) if word.removeprefix("b").isdigit() else _number(word)
    for known, source in ours.known:
        if known == build:
            return source, known
    raise UsageError(f"no hash is on record for build {word}", do="add it to [[known]] in vendor/upstream.toml")


def _number(name: str) -> int | None:
    """The build number in a name: only as bN or N.0.0, since other numbers may be a year or a version."""
    found = re.search(r"(?<![0-9A-Za-z])(?:b(\d{4,6})(?![0-9A-Za-z.])|(\d{4,6})\.0\.0(?![0-9.]))", name)
    return int(found[1] or found[2]) if found else None


def on_upstream(paths: Paths, where: str, number: int | None, *, offline: bool = False) -> Stack:
    """The series on another upstream, by git's own 3-way merge; raises :class:`replay.Conflict` when it fails."""
    with locked(paths):
        ours = stack(paths, offline=offline)  # its blobs are what the 3-way merge starts from
        chosen = upstream_pin(paths, where, number)
        if chosen.sources[0].kind != "sdist" and not offline:
            ours.repo.run("update-ref", "-d", chosen.ref)  # a folder or a branch may have moved on
        other = fetch.fetch(paths, chosen, offline=offline)
        applied = replay.replay(ours.repo, other.commit, ours.series.changes, three_way=True)
        for one in applied:
            console.detail(f"{one.change.name}: {one.how}")
        if applied:
            ours.repo.run("update-ref", f"refs/upstream/{other.tree[:16]}", applied[-1].commit)
        return Stack(ours.repo, other, ours.series, tuple(applied))
