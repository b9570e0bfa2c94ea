"""Real builds and a real model, made once and kept in the user's own cache: minutes cold, seconds warm."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from real_builds import ROOT, find

from llamafork.build.store import Build


@pytest.fixture(scope="session")
def stock() -> Build:
    return find("--stock")


@pytest.fixture(scope="session")
def fork(stock: Build) -> Build:
    return find()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained one, whose text and routing are plausible, under a name with a space."""
    out = tmp_path_factory.mktemp("model") / "small moe.gguf"
    shutil.copyfile(ROOT / "tests/data/moe-small.gguf", out)
    return out
