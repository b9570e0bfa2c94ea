"""Finished builds: immutable folders side by side, and a pointer to the current one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamafork.errors import BuildError, EnvironmentFault
from llamafork.paths import Paths, remove_tree, write_atomic


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
    def made(self) -> float:
        """Seconds since the epoch at which it was finished."""
        return float(self.info.get("finished", 0.0))

    def program(self, name: str) -> Path:
        """The path of a built program; :class:`BuildError` when this build does not have it."""
        path = self.root / "bin" / name
        if not path.is_file():
            raise BuildError(
                f"build {self.key} has no {name}",
                why=f"it was made for: {self.info.get('targets') or 'all'}",
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
        chosen = current(paths) or next((b for b in builds if b.kind == "fork"), None)
        if chosen is not None:
            return chosen
        raise EnvironmentFault(
            "there is no build yet",
            why=f"nothing in {folder(paths)}",
            do="llamafork build   (about 12 minutes on two cores the first time)",
        )
    same_kind = [b for b in builds if b.kind == wanted]
    if same_kind:
        return same_kind[0]
    matching = [b for b in builds if b.key.startswith(wanted) or b.key.rpartition("-")[2].startswith(wanted)]
    if len(matching) == 1:
        return matching[0]
    names = ", ".join(b.key for b in matching or builds) or "none"
    what = "no build matches" if not matching else "several builds match"
    raise BuildError(f"{what} {wanted!r}", why=f"there are: {names}", do="llamafork builds list")


def remove(build: Build) -> int:
    """Delete a build; returns the bytes freed."""
    size = sum(f.stat().st_size for f in build.root.rglob("*") if f.is_file() and not f.is_symlink())
    remove_tree(build.root)
    return size
