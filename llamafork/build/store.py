"""Finished builds: immutable folders side by side, and a pointer to the current one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamafork.errors import BuildError, EnvironmentFault, PatchError
from llamafork.paths import Paths, remove_tree, write_atomic
from llamafork.source.series import read_lock


@dataclass(frozen=True)
class Build:
    """One finished build. ``info`` is its build.json."""

    key: str
    root: Path
    info: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return str(self.info.get("kind", ""))

    @property
    def profile(self) -> str:
        return str(self.info.get("profile", ""))

    @property
    def targets(self) -> tuple[str, ...]:
        """What was asked for by name; empty when it was everything."""
        return tuple(self.info.get("targets") or ())

    @property
    def why_not_current(self) -> str:
        """Why a build like this becomes the current one only when it is chosen; "" when it may by itself."""
        if self.kind != "fork":
            return f"its kind is {self.kind}"
        if self.profile != "release":
            return f"its profile is {self.profile}"
        return f"it has only {', '.join(self.targets)}" if self.targets else ""

    @property
    def made(self) -> float:
        """Seconds since the epoch at which it was finished."""
        return float(self.info.get("finished", 0.0))

    def program(self, name: str) -> Path:
        """The path of a built program; :class:`BuildError` when this build does not have it."""
        path = self.root / "bin" / name
        if not path.is_file():
            raise BuildError(
                f"build {self.key} has no {name}",
                why=f"it was made for: {', '.join(self.targets) or 'all'}",
                do="llamafork build, or choose another with --build",
            )
        return path


def folder(paths: Paths) -> Path:
    return paths.data / "builds"


def load_all(paths: Paths) -> list[Build]:
    """All finished builds, newest first; folders without a readable build.json are not builds."""
    found = []
    for file in folder(paths).glob("[!.]*/build.json"):
        try:
            found.append(Build(file.parent.name, file.parent, json.loads(file.read_text(encoding="utf-8"))))
        except (OSError, ValueError):
            continue
    return sorted(found, key=lambda b: (-b.made, b.key))


def find(paths: Paths, key: str) -> Build | None:
    root = folder(paths) / key
    try:
        return Build(key, root, json.loads((root / "build.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def current(paths: Paths) -> Build | None:
    try:
        key = (folder(paths) / "current").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return find(paths, key) if key else None


def use(paths: Paths, build: Build) -> None:
    write_atomic(folder(paths) / "current", f"{build.key}\n")


def resolve(paths: Paths, wanted: str | None = None) -> Build:
    """The build meant by *wanted*: a key, its first letters, a kind (``stock``); None means the current one.

    Raises :class:`EnvironmentFault` when there is no build, :class:`BuildError` when none or several match.
    """
    builds = load_all(paths)
    if wanted is None:
        chosen = _default(paths, builds)
        if chosen is not None:
            return chosen
        raise EnvironmentFault(
            "there is no current build" if builds else "there is no build yet",
            why=f"there are only: {', '.join(b.key for b in builds)}" if builds else f"nothing in {folder(paths)}",
            do="llamafork build   (about 12 minutes on two cores the first time)"
            + (", or llamafork builds use KEY" if builds else ""),
        )
    if wanted == "stock" and (found := twin(builds, _default(paths, builds))):
        return found
    same_kind = [b for b in builds if b.kind == wanted]
    if same_kind:
        return same_kind[0]
    matching = [b for b in builds if b.key == wanted] or [
        b for b in builds if b.key.startswith(wanted) or b.key.rpartition("-")[2].startswith(wanted)
    ]
    if len(matching) == 1:
        return matching[0]
    names = ", ".join(b.key for b in matching or builds) or "none"
    what = "no build matches" if not matching else "several builds match"
    raise BuildError(f"{what} {wanted!r}", why=f"there are: {names}", do="llamafork builds list")


def _default(paths: Paths, builds: Sequence[Build]) -> Build | None:
    return current(paths) or next((b for b in builds if not b.why_not_current), None)


def alike(one: Build, other: Build) -> bool:
    """Of the same profile and backends."""
    return one.profile == other.profile and set(one.info.get("backends", [])) == set(other.info.get("backends", []))


def twin(builds: Sequence[Build], of: Build | None) -> Build | None:
    """The stock build to compare *of* with: same profile and backends, then same targets, then the newest."""

    def likeness(one: Build) -> tuple[bool, bool]:
        if of is None:
            return False, False
        return alike(one, of), set(one.targets) == set(of.targets)

    newest_first = sorted((b for b in builds if b.kind == "stock"), key=lambda b: -b.made)
    return max(newest_first, key=likeness, default=None)


def stale(paths: Paths, build: Build) -> str | None:
    """A warning when a fork build was made from another series than this checkout's; the pointer is the user's."""
    if build.kind != "fork":
        return None
    try:
        trees = list(read_lock(paths.patches / "series.lock").values())
    except PatchError:
        return None
    if not trees or build.info.get("tree") == trees[-1]:
        return None
    return (
        f"build {build.key} was made from another series (tree {str(build.info.get('tree'))[:12]}) "
        f"than this checkout has ({trees[-1][:12]}); llamafork build makes one of this series"
    )


def publish(staging: Path, target: Path) -> None:
    """Rename *staging* to *target*, whole: whoever looks sees the old build, none for a moment, or the new one."""
    old = target.with_name(f".old-{target.name}")
    if old.exists():  # an earlier run was killed here
        remove_tree(old)
    if target.exists():
        target.rename(old)
    staging.replace(target)
    if old.exists():
        remove_tree(old)


def remove(build: Build) -> int:
    """Delete a build; returns the bytes freed (files that the cache holds too free none)."""
    files = (f.stat() for f in build.root.rglob("*") if f.is_file() and not f.is_symlink())
    size = sum(s.st_size for s in files if s.st_nlink == 1)
    remove_tree(build.root)
    return size
