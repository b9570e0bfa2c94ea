"""The script that trains the model of tests/data: a few steps on a little text, and a file that can be loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from llamafork.facts.gguf_file import check_model

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("LLAMAFORK_TORCH_PYTHON", sys.executable)


def has_torch() -> bool:
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    return subprocess.run([PYTHON, "-c", look]).returncode == 0


def read(path: Path) -> gguf.GGUFReader:
    check_model(path)
    return gguf.GGUFReader(path)


needs_torch = pytest.mark.skipif(
    not has_torch(),
    reason="no PyTorch; pip install torch==2.13.0 gguf, and name that Python in LLAMAFORK_TORCH_PYTHON to un-skip",
)


@needs_torch
def test_a_few_steps_give_a_model_that_can_be_loaded(tmp_path: Path) -> None:
    out, exact = tmp_path / "new" / "m.gguf", tmp_path / "exact.gguf"
    words = ["--minutes", "0.05", "--text", "5000", "--out", str(out), "--exact", str(exact)]
    script = [PYTHON, str(ROOT / "scripts/train-test-model"), *words]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    facts = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    assert facts["steps"] > 0
    assert facts["text"]["train"] == facts["text"]["held_out"] == 5000
    assert 0 < facts["bits_torch"]["128"] < 10  # uniform: 8.02
    made, plain, shipped = (read(path) for path in (out, exact, ROOT / "tests/data/moe-small.gguf"))
    facts_of = [[(one.name, one.tensor_type, tuple(one.shape)) for one in file.tensors] for file in (made, shipped)]
    assert facts_of[0] == facts_of[1]
    assert {key: made.fields[key].contents() for key in made.fields if key != "GGUF.kv_count"} == {
        key: shipped.fields[key].contents() for key in shipped.fields if key != "GGUF.kv_count"
    }
    for one, other in zip(made.tensors, plain.tensors, strict=True):
        values = gguf.dequantize(one.data, one.tensor_type)
        assert other.tensor_type == gguf.GGMLQuantizationType.F32
        assert np.isfinite(other.data).all()
        assert np.abs(values - other.data).max() <= np.abs(other.data).max() / 127, one.name  # half a step of Q8_0


@needs_torch
def test_too_little_text_is_refused(tmp_path: Path) -> None:
    script = [PYTHON, str(ROOT / "scripts/train-test-model"), "--text", "100", "--out", str(tmp_path / "m")]
    done = subprocess.run(script, capture_output=True, text=True)
    assert (done.returncode, "4200 or more" in done.stderr) == (2, True)
