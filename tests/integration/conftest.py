"""Real builds and a real model, made once and kept in the user's own cache: minutes cold, seconds warm."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_builds import find, llamafork

from llamafork.build.store import Build


@pytest.fixture(scope="session")
def stock() -> Build:
    return find("--stock")


@pytest.fixture(scope="session")
def fork(stock: Build) -> Build:
    return find()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "small moe.gguf"
    llamafork("make-model", str(out), "--seed", "7")
    return out
