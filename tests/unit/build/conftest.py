"""Fixtures of the build tests."""

from __future__ import annotations

import pytest
from fake_tools import Fakes
from fake_upstream import World


@pytest.fixture
def fakes(three: World, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(three, monkeypatch)
