"""Fixtures of the gpu-check tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

from gpu_world import GpuWorld


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GpuWorld:
    return GpuWorld(tmp_path, monkeypatch)
