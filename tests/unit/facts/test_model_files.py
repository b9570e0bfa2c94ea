"""Which models are found, where, and which files are none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from llamafork.facts import model_files
from llamafork.facts.model_files import cache_folder, hub_folder, known_models
from llamafork.paths import Paths


def paths_in(root: Path) -> Paths:
    return Paths(root / "cache", root / "data", root / "state", None, root)


def put(path: Path, size: int = 10) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return path


def test_the_order_of_the_hub_variables() -> None:
    env = {
        "LLAMA_CACHE": "/1",
        "HF_HUB_CACHE": "/2",
        "HUGGINGFACE_HUB_CACHE": "/3",
        "HF_HOME": "/4",
        "XDG_CACHE_HOME": "/5",
        "HOME": "/6",
    }
    folders = []
    for name in list(env):
        folders.append(str(hub_folder(env)))
        env[name] = ""
        if name == "XDG_CACHE_HOME":
            continue
    assert folders == ["/1", "/2", "/3", "/4/hub", "/5/huggingface/hub", "/6/.cache/huggingface/hub"]


@pytest.mark.parametrize(
    ("platform", "env", "folder"),
    [
        ("linux", {"HOME": "/h"}, "/h/.cache/llama.cpp"),
        ("linux", {"HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/x/llama.cpp"),
        ("darwin", {"HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/h/Library/Caches/llama.cpp"),
        ("win32", {"LOCALAPPDATA": "/l"}, "/l/llama.cpp"),
        ("linux", {"LLAMA_CACHE": "/c"}, "/c"),
    ],
)
def test_the_cache_of_llama_cpp(platform: str, env: dict[str, str], folder: str) -> None:
    assert cache_folder(env, platform) == Path(folder)


@pytest.mark.skipif(
    sys.platform != "linux", reason="the cache folder is another one elsewhere; run on Linux to un-skip"
)
def test_models_are_found_once_with_their_parts_and_without_projectors(tmp_path: Path) -> None:
    here, home = tmp_path / "here", tmp_path / "home"
    hub = home / ".cache/huggingface/hub/models--u--m"
    blob = put(hub / "blobs/abc", 7)
    snapshot = hub / "snapshots/1/m-Q4_0.gguf"
    snapshot.parent.mkdir(parents=True)
    snapshot.symlink_to(blob)
    wanted = [
        put(here / "a b.gguf"),
        put(here / "s-00001-of-00002.gguf"),
        put(tmp_path / "data/models/own/x.gguf"),
        put(home / ".cache/llama.cpp/c.gguf"),
        snapshot,
    ]
    put(here / "s-00002-of-00002.gguf", 5)
    put(here / "mmproj-f16.gguf")
    put(here / "a.txt")
    put(here / "deeper/no.gguf")
    (here / "again.gguf").symlink_to(wanted[2])
    (here / "broken.gguf").symlink_to("nowhere")
    found = known_models(paths_in(tmp_path), {"HOME": str(home)}, here)
    by_path = {model.path: model for model in found}
    assert set(by_path) == {*wanted[:2], here / "again.gguf", *wanted[3:]}
    assert (by_path[wanted[1]].size, by_path[wanted[1]].parts) == (15, 2)
    assert by_path[snapshot].size == 7


def test_the_walk_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        put(tmp_path / f"{number:02d}.gguf")
    env = {"HOME": str(tmp_path / "none")}
    monkeypatch.setattr(model_files, "MOST_ENTRIES", 5)
    assert len(known_models(paths_in(tmp_path), env, tmp_path)) == 5
    monkeypatch.setattr(model_files, "MOST_MODELS", 3)
    assert len(known_models(paths_in(tmp_path), env, tmp_path)) == 3


def test_folders_that_cannot_be_read_are_skipped(tmp_path: Path) -> None:
    assert known_models(paths_in(tmp_path / "none"), {"HOME": str(tmp_path / "no")}, tmp_path / "gone") == []
