"""The world of run_world.py as a fixture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from run_world import World


@pytest.fixture
def world(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path, tmp_path_factory.getbasetemp() / "bytecode")
    yield made
    made.clean_up()
