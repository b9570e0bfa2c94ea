"""Impossible models are refused with the option to change; possible ones pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import _type_traits, dequantize

from llamafork.errors import Exit, UsageError
from llamafork.synth.archs import LAYOUTS
from llamafork.synth.layouts import tensors
from llamafork.synth.quants import CODES, QUANTS, blocks, fitting
from llamafork.synth.spec import ModelSpec, sized, validate
from llamafork.synth.table import ALLOWED, GGML, Role

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
    ({"quant": "Q8_K"}, "--type Q8_K is not supported"),
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


def test_types_are_gguf_types_that_can_be_made() -> None:
    for name, quant in QUANTS.items():
        for one in (quant.ends, quant.matrix, quant.experts):
            if one == "Q2_0" and one not in gguf.GGMLQuantizationType.__members__:
                continue  # newer than gguf 0.19; test_models_real lets upstream read it
            kind = gguf.GGMLQuantizationType[one]
            assert (GGML[one].block, GGML[one].size) == gguf.GGML_QUANT_SIZES[kind]
            assert one in ("F32", "F16") or one in CODES or "quantize_blocks" in vars(_type_traits[kind])
        wanted = {"MXFP4": "MXFP4_MOE", "Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}.get(name, name)
        if name != "Q2_0":
            assert gguf.LlamaFileType(quant.file_type).name.endswith(wanted)


def test_whitelists_hold_no_type_that_upstream_cannot_multiply() -> None:
    for role, names in ALLOWED.items():
        assert not any(name in ("F64", "Q8_K", "Q8_1") for name in names)
        assert not any(name.startswith("I") and not name.startswith("IQ") for name in names)
        assert role not in (Role.NORM, Role.ROUTER) or names == {"F32"}
        for quant in QUANTS:
            for width in (256, 96):
                assert ModelSpec(quant=quant).type_of(role, width) in names


@pytest.mark.parametrize(
    ("name", "width", "floats", "found"),
    [
        ("Q4_K", 512, True, "Q4_K"),
        ("Q4_K", 96, True, "Q5_0"),
        ("Q6_K", 32, False, "Q8_0"),
        ("IQ2_XXS", 160, True, "IQ4_NL"),
        ("Q8_0", 16, True, "F16"),
        ("Q8_0", 16, False, "Q8_0"),
        ("F32", 3, True, "F32"),
    ],
)
def test_upstreams_substitutes_where_rows_do_not_divide(name: str, width: int, floats: bool, found: str) -> None:
    assert fitting(name, width, floats=floats) == found


def decoded(name: str, made: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """By the package, or as upstream's dequantize_row_* where the package has nothing."""
    if name == "Q1_0":
        bits = np.unpackbits(made[:, 2:], axis=1, bitorder="little").astype(np.float32)
        return made[:, :2].copy().view("<f2").astype(np.float32) * (2 * bits - 1)
    if name == "Q2_0":
        codes = (made[:, 2:, None] >> np.array([0, 2, 4, 6], dtype=np.uint8)) & 3
        return made[:, :2].copy().view("<f2").astype(np.float32) * (codes.reshape(len(made), -1).astype(np.float32) - 1)
    return dequantize(made, gguf.GGMLQuantizationType[name])


@pytest.mark.parametrize("name", CODES)
def test_random_blocks_decode_to_what_was_asked(name: str) -> None:
    made = blocks(name, np.random.PCG64(1), 4000, 0.05)
    values = decoded(name, made)
    assert made.shape == (4000, GGML[name].size)
    assert abs(float(values.mean())) < 0.1 * 0.05
    assert float(values.std()) == pytest.approx(0.05, rel=0.07 if name == "NVFP4" else 0.05)  # its scales have 3 bits
    assert len(np.unique(made, axis=0)) > 3990


@pytest.mark.parametrize("arch", LAYOUTS)
def test_every_architecture_passes_as_it_is(arch: str) -> None:
    validate(sized(arch))
    validate(sized(arch, quant="IQ4_XS", layer_types=("Q4_K", "MXFP4")))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3moe", {"merged": True}, "qwen3moe has no --gate-up merged"),
    ("qwen3moe", {"mtp": True}, "qwen3moe has no --mtp"),
    ("glm5-next", {"mtp_only": True}, "glm5-next has no --mtp-file"),
    ("olmoe", {"n_dense": 1}, "olmoe has no --dense"),
    ("gpt-oss", {"n_shared": 1}, "--shared 1 is not possible with gpt-oss"),
    ("llama4", {"n_shared": 0}, "--shared 0 is not possible with llama4"),
    ("deepseek2", {"n_dense": 4}, "--dense 4 leaves no layer with experts"),
    ("deepseek2", {"mtp": True, "n_layer": 512}, "leaves no room"),
    ("deepseek2", {"head_dim": 34}, "--head-dim 34 is not a multiple of 4"),
    ("qwen35moe", {"n_layer": 1}, "--layers 1 is too few"),
    ("llama4", {"n_layer": 3}, "--layers 3 is too few"),
    ("olmoe", {"n_head": 2, "n_head_kv": 2}, "olmoe wants --heads times --head-dim"),
    ("qwen3moe", {"layer_types": ("Q4_K", "F64")}, "--layer-types F64 is not supported"),
    ("qwen3moe", {"layer_types": ("F16", "Q8_0"), "n_ff_exp": 34}, "--ff is 34, not a multiple of 32"),
]


@pytest.mark.parametrize(("arch", "change", "what"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_an_architecture_lacks_is_refused(arch: str, change: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError) as caught:
        validate(sized(arch, **change))
    assert what in caught.value.what
    assert caught.value.do


def test_types_of_layers_go_round_over_those_with_experts() -> None:
    spec = sized("deepseek2", layer_types=("Q4_K", "Q8_0"), n_layer=5, n_ff_exp=256)
    found = {one.name: one.type for one in tensors(spec) if one.role is Role.EXPERT}
    assert "blk.0.ffn_down_exps.weight" not in found
    assert [found[f"blk.{i}.ffn_down_exps.weight"] for i in range(1, 5)] == ["Q4_K", "Q8_0", "Q4_K", "Q8_0"]


def test_defaults_follow_the_architecture_and_what_is_given() -> None:
    assert (sized("deepseek2").n_dense, sized("deepseek2").n_shared) == (1, 1)
    assert sized("deepseek2", n_layer=1).n_dense == 0
    assert sized("deepseek2", n_dense=2).n_dense == 2
    assert (sized("qwen3moe").n_dense, sized("qwen3moe").n_shared) == (0, 0)
    assert (sized("olmoe", n_head=8).n_head_kv, sized("olmoe", n_head=8, n_head_kv=2).n_head_kv) == (8, 2)
    assert sized("qwen3moe") == ModelSpec()
