"""GGUF files that are already on this machine: here, in our folder, in llama.cpp's and Hugging Face's caches."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from llamafork.facts.gguf_file import SHARD
from llamafork.paths import Paths

DEEPEST, MOST_ENTRIES, MOST_MODELS = 6, 20_000, 200
HUB = (
    ("LLAMA_CACHE", ()),
    ("HF_HUB_CACHE", ()),
    ("HUGGINGFACE_HUB_CACHE", ()),
    ("HF_HOME", ("hub",)),
    ("XDG_CACHE_HOME", ("huggingface", "hub")),
)


@dataclass(frozen=True)
class ModelFile:
    """A model found, its first part if it has several; ``size`` in bytes is of all parts."""

    path: Path
    size: int
    parts: int = 1


def known_models(paths: Paths, env: Mapping[str, str] = os.environ, here: Path | None = None) -> list[ModelFile]:
    """Models in the usual places, each once, without projectors. The walk is bounded."""
    roots = ((here or Path(), 1), (paths.data / "models", DEEPEST), (cache_folder(env), 2), (hub_folder(env), DEEPEST))
    found: dict[Path, ModelFile] = {}
    for root, depth in roots:
        for path in _gguf_files(root, depth):
            real = Path(os.path.realpath(path))
            if real not in found and len(found) < MOST_MODELS:
                found[real] = ModelFile(path, *_extent(path))
    return list(found.values())


def hub_folder(env: Mapping[str, str]) -> Path:
    """The Hugging Face cache that llama.cpp will use: the first variable that is set (common/hf-cache.cpp)."""
    for name, below in HUB:
        if env.get(name):
            return Path(env[name]).joinpath(*below)
    return _home(env) / ".cache" / "huggingface" / "hub"


def cache_folder(env: Mapping[str, str], platform: str = sys.platform) -> Path:
    """llama.cpp's own download cache (fs_get_cache_directory in common/common.cpp)."""
    if env.get("LLAMA_CACHE"):
        return Path(env["LLAMA_CACHE"])
    if platform == "win32":
        return Path(env.get("LOCALAPPDATA") or _home(env)) / "llama.cpp"
    if platform == "darwin":
        return _home(env) / "Library" / "Caches" / "llama.cpp"
    return Path(env.get("XDG_CACHE_HOME") or _home(env) / ".cache") / "llama.cpp"


def _home(env: Mapping[str, str]) -> Path:
    return Path(env.get("HOME") or env.get("USERPROFILE") or Path("~").expanduser())


def _gguf_files(root: Path, depth: int) -> Iterator[Path]:
    """Breadth-first, sorted, without following links to folders, at most MOST_ENTRIES entries."""
    folders, seen = [(root, 1)], 0
    while folders:
        folder, level = folders.pop(0)
        for entry in _entries(folder):
            seen += 1
            if seen > MOST_ENTRIES:
                return
            if _is_folder(entry):
                if level < depth and not entry.name.startswith("."):
                    folders.append((folder / entry.name, level + 1))
            elif _is_model(entry):
                yield folder / entry.name


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _is_model(entry: os.DirEntry[str]) -> bool:
    if not entry.name.endswith(".gguf") or entry.name.startswith("mmproj"):
        return False
    shard = SHARD.match(entry.name)
    if shard and int(shard["number"]) != 1:
        return False
    try:
        return entry.is_file()
    except OSError:
        return False


def _extent(path: Path) -> tuple[int, int]:
    """Bytes and number of the parts that are there."""
    shard = SHARD.match(path.name)
    count = int(shard["count"]) if shard else 1
    sizes = [_size(path)]
    for number in range(2, min(count, 1000) + 1):
        assert shard is not None
        sizes.append(_size(path.with_name(f"{shard['stem']}-{number:05d}-of-{shard['count']}.gguf")))
    return sum(sizes), count


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
