"""Impossible models are refused with the option to change; possible ones pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gguf
import pytest
from gguf.quants import _type_traits

from llamafork.errors import Exit, UsageError
from llamafork.synth.layouts import ALLOWED, GGML, Role, tensors
from llamafork.synth.spec import QUANTS, ModelSpec, validate

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"n_expert_used": 17}, "--used 17 is more than --experts 16"),
    ({"n_head": 3}, "--heads 3 is not a multiple of --kv-heads 2"),
    ({"n_embd": 100}, "--embd is 100, not a multiple of 32"),
    ({"n_ff_exp": 100, "quant": "MXFP4"}, "--ff is 100, not a multiple of 32"),
    ({"n_ff_exp": 33, "quant": "F16"}, "--ff is 33, not a multiple of 2"),
    ({"head_dim": 6}, "--heads times --head-dim is 24, not a multiple of 32"),
    ({"head_dim": 33}, "--head-dim 33 is odd"),
    ({"vocab": 259}, "--vocab 259 is out of range"),
    ({"n_ctx_train": 255}, "--ctx 255 is out of range"),
    ({"seed": -1}, "--seed -1 is out of range"),
    ({"seed": 1 << 63}, "is out of range"),
    ({"n_layer": 513}, "--layers 513 is out of range"),
    ({"n_expert": 1025}, "--experts 1025 is out of range"),
    ({"n_embd": 1 << 40}, "is out of range"),
    ({"arch": "gpt5"}, "--arch gpt5 is not supported"),
    ({"quant": "Q4_K"}, "--type Q4_K is not supported"),
    ({"name": "../x"}, "cannot be a file name"),
    ({"name": ".hidden"}, "cannot be a file name"),
    *[
        ({field: value}, f"{value} is out of range")
        for field in ("n_layer", "n_embd", "n_head", "n_head_kv", "head_dim", "n_ff_exp", "n_expert", "n_expert_used")
        for value in (0, -1)
    ],
    *[({field: -5}, "-5 is out of range") for field in ("n_ctx_train", "vocab")],
]


@pytest.mark.parametrize(("change", "what"), WRONG, ids=lambda value: str(value)[:40])
def test_refused(change: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError) as caught:
        validate(replace(ModelSpec(), **change))
    assert what in caught.value.what
    assert caught.value.do
    assert caught.value.code == Exit.USAGE


@pytest.mark.parametrize("quant", QUANTS)
def test_default_passes_with_every_type(quant: str) -> None:
    validate(ModelSpec(quant=quant))


def test_default_size() -> None:
    spec = ModelSpec()
    assert 5e6 < sum(one.bytes for one in tensors(spec)) < 10e6
    assert spec.n_layer >= 4
    assert (spec.n_expert, spec.n_expert_used, spec.n_ctx_train) == (16, 4, 4096)


def test_title_names_what_distinguishes() -> None:
    assert ModelSpec().title == "qwen3moe-4l-16x4-q8_0"
    assert ModelSpec(seed=7, quant="F16").title == "qwen3moe-4l-16x4-f16-s7"
    assert ModelSpec(name="mine").title == "mine"


def test_types_are_gguf_types_that_can_be_quantised() -> None:
    for quant in QUANTS.values():
        for name in (quant.matrix, quant.experts):
            kind = gguf.GGMLQuantizationType[name]
            assert (GGML[name].block, GGML[name].size) == gguf.GGML_QUANT_SIZES[kind]
            assert name in ("F32", "F16") or "quantize_blocks" in vars(_type_traits[kind])
        assert gguf.LlamaFileType(quant.file_type).name.endswith(
            quant.experts if quant.experts != "MXFP4" else "MXFP4_MOE"
        )


def test_whitelists_hold_no_type_that_upstream_cannot_multiply() -> None:
    for role, names in ALLOWED.items():
        assert not any(name == "F64" or name.startswith("I") for name in names)
        assert role not in (Role.NORM, Role.ROUTER) or names == {"F32"}
        for quant in QUANTS:
            assert ModelSpec(quant=quant).type_of(role) in names
