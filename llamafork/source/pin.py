"""The pin: which upstream build we stand on, where it comes from, and which of its files are kept."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from llamafork.console import hide_userinfo
from llamafork.errors import SourceError

REQUIRED = ("CMakeLists.txt", "ggml/CMakeLists.txt", "src/CMakeLists.txt", "common/CMakeLists.txt")


@dataclass(frozen=True)
class Source:
    kind: str  # sdist, git, archive or folder
    name: str = ""  # sdist: project name
    version: str = ""  # sdist: version
    sha256: str = ""  # sdist and archive
    subfolder: str = ""
    url: str = ""  # git
    ref: str = ""  # git
    path: str = ""  # archive and folder

    def __str__(self) -> str:
        named = {"sdist": f"{self.name} {self.version}", "git": f"{hide_userinfo(self.url)} {self.ref}"}
        return f"{self.kind} {named.get(self.kind, self.path)}"


@dataclass(frozen=True)
class Pin:
    """One upstream build and the selection of its files that we keep.

    ``tree`` is the git tree hash of the selection with modes derived from content; empty when not known
    beforehand (a user's own upstream).
    """

    build: int
    version: str
    tree: str
    folders: tuple[str, ...]
    top_level_files: bool
    sources: tuple[Source, ...]
    known: tuple[tuple[int, Source], ...] = ()
    required: tuple[str, ...] = REQUIRED

    @property
    def ref(self) -> str:
        """The ref that holds this pin's root commit, the same in the cache and in a work tree."""
        return f"refs/pins/{self.version}"

    def keeps(self, path: str) -> bool:
        parts = PurePosixPath(path).parts
        if len(parts) == 1:
            return self.top_level_files and not parts[0].startswith(".")
        return parts[0] in self.folders


def load(path: Path) -> Pin:
    """Read vendor/upstream.toml; a broken file is a :class:`SourceError` that names the key."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SourceError(f"cannot read the pin {path}", why=str(error), do="restore vendor/upstream.toml") from error
    try:
        sources = tuple(Source(**entry) for entry in data["source"])
        first = next((s for s in sources if s.kind == "sdist"), Source("sdist"))
        known = tuple(
            (int(k["build"]), Source("sdist", first.name, k["version"], k["sha256"], first.subfolder))
            for k in data.get("known", [])
        )
        return Pin(
            int(data["build"]),
            data["version"],
            data.get("tree", ""),
            tuple(data["folders"]),
            bool(data["top_level_files"]),
            sources,
            known,
            tuple(data.get("required", REQUIRED)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SourceError(
            f"the pin {path} is incomplete", why=f"{type(error).__name__}: {error}", do="restore vendor/upstream.toml"
        ) from error
