"""One table per architecture, as upstream's ``src/models/<arch>.cpp`` loads it.

Shapes are in ggml order, the row width first. To add one, write its parts, how a layer is put together and its
metadata, and enter it in :data:`LAYOUTS`. What several share is in :mod:`llamafork.synth.common`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamafork.synth import common
from llamafork.synth.common import (
    AFTER,
    ATTN,
    ATTN_NORM,
    BEFORE,
    BIAS,
    COMMON,
    FFN_NORM,
    LATENT,
    NEXTN,
    POST_NORM,
    QK_NORM,
    SINKS,
    O,
    Parts,
    base,
    grouped,
    latent_metadata,
    matrix,
    moe,
    norm,
    small,
)
from llamafork.synth.hybrids import GLM5_NEXT, QWEN4EXP, QWEN35MOE
from llamafork.synth.table import Layout, Metadata, Role, Row

if TYPE_CHECKING:
    from llamafork.synth.spec import ModelSpec

WINDOW = 128

# -- attention in every layer: qwen3moe, olmoe, glm4moe, gpt-oss, mimo2, llama4


def _plain_layer(spec: ModelSpec, _: int) -> Parts:
    return ("attention", *moe(spec))


def _olmoe_metadata(spec: ModelSpec) -> Metadata:
    return base(spec) | {"feed_forward_length": spec.n_ff_exp}


QWEN3MOE = Layout(
    before=BEFORE,
    parts=COMMON | {"attention": (*ATTN, *QK_NORM, *FFN_NORM)},
    layer=_plain_layer,
    after=AFTER,
    dims=common.dims,
    metadata=base,
    checks=(common.even_head,),
)

OLMOE = Layout(
    before=BEFORE,
    parts=COMMON | {"attention": (*ATTN, norm("attn_q_norm", "embd"), norm("attn_k_norm", "embd"), *FFN_NORM)},
    layer=_plain_layer,
    after=AFTER,
    dims=common.dims,
    metadata=_olmoe_metadata,
    checks=(common.even_head, common.full_attention),
    all_heads=True,
)


def _glm4moe_layer(spec: ModelSpec, layer: int) -> Parts:
    if layer < spec.n_dense:
        return ("attention", "dense")
    shared = ("shared",) if spec.n_shared else ()
    return ("attention", *moe(spec), "probs", *shared, *(("nextn",) if layer == spec.n_layer else ()))


def _glm4moe_metadata(spec: ModelSpec) -> Metadata:
    return base(spec) | grouped(spec) | {"rope.dimension_count": spec.head_dim // 2}


GLM4MOE = Layout(
    before=BEFORE,
    parts=COMMON | {"attention": (*ATTN, *BIAS, *POST_NORM), "nextn": NEXTN},
    layer=_glm4moe_layer,
    after=AFTER,
    dims=common.dims,
    metadata=_glm4moe_metadata,
    checks=(common.quarter_head,),
    shared=(0, 8),
    dense=True,
    mtp=True,
    mtp_file=True,
)


def _gptoss_metadata(spec: ModelSpec) -> Metadata:
    return base(spec) | {"attention.sliding_window": WINDOW}


GPT_OSS = Layout(
    before=BEFORE,
    parts=COMMON
    | {
        "attention": (*ATTN, *BIAS, small("attn_output.bias", "embd", std=0.1), *SINKS, *POST_NORM),
        "expert biases": (
            Row("ffn_gate_inp.bias", ("experts",), Role.ROUTER, std=0.1),
            small("ffn_gate_exps.bias", "ff", "experts", std=0.1),
            small("ffn_up_exps.bias", "ff", "experts", std=0.1),
            small("ffn_down_exps.bias", "embd", "experts", std=0.1),
        ),
    },
    layer=lambda spec, _: ("attention", *moe(spec), "expert biases"),
    after=AFTER,
    dims=common.dims,
    metadata=_gptoss_metadata,
    checks=(common.even_head,),
)


def _mimo2_layer(spec: ModelSpec, layer: int) -> Parts:
    if layer == spec.n_layer:
        return ("mtp attention", "dense", "nextn")
    return ("attention", "dense") if layer < spec.n_dense else ("attention", *moe(spec), "probs")


def _mimo2_metadata(spec: ModelSpec) -> Metadata:
    swa = [1 if layer % 2 or layer == spec.n_layer else 0 for layer in range(spec.n_blocks)]
    return base(spec) | {"attention.sliding_window": WINDOW, "attention.sliding_window_pattern": swa}


MIMO2 = Layout(
    before=BEFORE,
    parts=COMMON
    | {
        "attention": (*ATTN, *SINKS, *FFN_NORM),
        "mtp attention": (*ATTN_NORM, matrix("attn_qkv", "embd", "qkv"), *O, *SINKS, *FFN_NORM),
        "nextn": (*NEXTN, norm("layer_output_norm", "embd")),
    },
    layer=_mimo2_layer,
    after=AFTER,
    dims=common.dims,
    metadata=_mimo2_metadata,
    checks=(common.even_head,),
    dense=True,
    mtp=True,
    mtp_file=True,
)


def _llama4_layer(spec: ModelSpec, layer: int) -> Parts:
    if (layer + 1) % (spec.n_dense + 1):
        return ("attention", "dense")
    return ("attention", *moe(spec), "shared")


def _llama4_metadata(spec: ModelSpec) -> Metadata:
    return base(spec) | {"interleave_moe_layer_step": spec.n_dense + 1}


LLAMA4 = Layout(
    before=BEFORE,
    parts=COMMON | {"attention": (*ATTN, *FFN_NORM)},
    layer=_llama4_layer,
    after=AFTER,
    dims=common.dims,
    metadata=_llama4_metadata,
    checks=(common.even_head,),
    shared=(1, 1),
    dense=True,
    least_layers=4,  # every fourth has no positions; with none such, upstream's input for it is never allocated
)


def _deepseek2_layer(spec: ModelSpec, layer: int) -> Parts:
    if layer < spec.n_dense:
        return ("attention", "dense")
    return ("attention", *moe(spec), "probs", "shared", *(("nextn",) if layer == spec.n_layer else ()))


DEEPSEEK2 = Layout(
    before=BEFORE,
    parts=COMMON
    | {
        "attention": (
            *LATENT,
            matrix("attn_kv_a_mqa", "embd", "kv_lora_rope"),
            matrix("attn_k_b", "head", "kv_lora", "heads"),
            matrix("attn_v_b", "kv_lora", "head", "heads"),
            *O,
            *FFN_NORM,
        ),
        "nextn": NEXTN,
    },
    layer=_deepseek2_layer,
    after=AFTER,
    dims=lambda spec: (size := common.dims(spec)) | {"q_mla": size["heads"] * (size["head"] + size["rope"])},
    metadata=latent_metadata,
    checks=(common.quarter_head,),
    merged=True,
    shared=(1, 8),
    dense=True,
    mtp=True,
    mtp_file=True,
)

LAYOUTS: dict[str, Layout] = {
    "qwen3moe": QWEN3MOE,
    "olmoe": OLMOE,
    "qwen35moe": QWEN35MOE,
    "qwen4exp": QWEN4EXP,
    "glm4moe": GLM4MOE,
    "glm5-next": GLM5_NEXT,
    "mimo2": MIMO2,
    "deepseek2": DEEPSEEK2,
    "gpt-oss": GPT_OSS,
    "llama4": LLAMA4,
}
