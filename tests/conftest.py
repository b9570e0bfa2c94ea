"""Fixtures for all tests."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from fake_upstream import World

# A shell's `&` and nohup ignore these two, which every child would inherit; the tests send them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> World:
    made = World(tmp_path, capsys)
    monkeypatch.setenv("LLAMAFORK_HOME", str(made.home))
    monkeypatch.setenv("LLAMAFORK_REPO", str(made.repo))
    monkeypatch.chdir(tmp_path)
    return made


@pytest.fixture
def three(world: World) -> World:
    """A world with three changes: two edit main.cpp far apart, one edits other.cpp and brings a file."""
    world.change("first", {"src/main.cpp": ("int line_3;", "int line_3_first;")}, {"src/first.cpp": "int first;\n"})
    world.change("second", {"src/main.cpp": ("int line_30;", "int line_30_second;")})
    world.change("third", {"src/other.cpp": ("int other_5;", "int other_5_third;")}, {"src/third.h": "int third;\n"})
    return world
