"""Tables of the architectures with linear attention in most layers: qwen35moe, qwen4exp, glm5-next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from llamafork.synth import common
from llamafork.synth.common import (
    AFTER,
    ATTN_NORM,
    BEFORE,
    COMMON,
    FFN_NORM,
    LATENT,
    NEXTN,
    POST_NORM,
    QK_NORM,
    QKV,
    O,
    Parts,
    base,
    latent_metadata,
    matrix,
    moe,
    norm,
    small,
)
from llamafork.synth.table import U64, Layout, Metadata, Role, Row

if TYPE_CHECKING:
    from llamafork.synth.spec import ModelSpec

CONV = 4
QWEN_GATED = (matrix("attn_q", "embd", "q2"), *QKV[1:], *O, *QK_NORM)
QWEN_LINEAR = (
    matrix("attn_qkv", "embd", "conv"),
    matrix("attn_gate", "embd", "q"),
    small("ssm_conv1d.weight", CONV, "conv"),
    small("ssm_dt.bias", "heads", std=0.5),
    small("ssm_a", "heads", mean=-1.0, std=0.1),
    matrix("ssm_beta", "embd", "heads"),
    matrix("ssm_alpha", "embd", "heads"),
    norm("ssm_norm", "head"),
    matrix("ssm_out", "q", "embd"),
)
SHARED_GATE = small("ffn_gate_inp_shexp.weight", "embd")


def interval(spec: ModelSpec) -> int:
    """Every which layer has full attention: as in the real models, but one at least."""
    return min(4, spec.n_layer)


def full(spec: ModelSpec, layer: int) -> bool:
    return layer == spec.n_layer or (layer + 1) % interval(spec) == 0


def _hybrid_dims(spec: ModelSpec) -> Mapping[str, int]:
    size = common.dims(spec)
    return size | {"conv": 2 * size["kv"] + size["q"], "hc_embd": HC * spec.n_embd}


def _qwen35_metadata(spec: ModelSpec) -> Metadata:
    part = spec.head_dim // 8
    return base(spec) | {
        "expert_shared_feed_forward_length": spec.n_ff_exp * spec.n_shared,
        "rope.dimension_sections": [2 * part, part, part, 0],
        "full_attention_interval": interval(spec),
        "ssm.conv_kernel": CONV,
        "ssm.inner_size": spec.n_head * spec.head_dim,
        "ssm.state_size": spec.head_dim,
        "ssm.time_step_rank": spec.n_head,
        "ssm.group_count": spec.n_head_kv,
    }


def _qwen35_layer(spec: ModelSpec, layer: int) -> Parts:
    kind = "attention" if full(spec, layer) else "linear"
    return ("norms", kind, *moe(spec), "shared", *(("nextn",) if layer == spec.n_layer else ()))


QWEN35MOE = Layout(
    before=BEFORE,
    parts=COMMON
    | {
        "norms": (*ATTN_NORM, *POST_NORM),
        "attention": QWEN_GATED,
        "linear": QWEN_LINEAR,
        "shared": (SHARED_GATE, *COMMON["shared"]),
        "nextn": NEXTN,
    },
    layer=_qwen35_layer,
    after=AFTER,
    dims=_hybrid_dims,
    metadata=_qwen35_metadata,
    checks=(common.eighth_head,),
    merged=True,
    shared=(1, 8),
    mtp=True,
    mtp_file=True,
    least_layers=2,
)

HC, LOW = 4, 32  # residual streams, and the rank of what mixes them
NGRAM, PER_NGRAM = 3, 2
PLE_HEADS = (NGRAM - 1) * PER_NGRAM
INDEX_HEADS, POOL, TOP = 4, 4, 2048


def _mixer(name: str) -> tuple[Row, ...]:
    return (
        norm(f"{name}_norm", "embd", HC),
        matrix(f"{name}_down", "hc_embd", LOW),
        matrix(f"{name}_up", LOW, "hc_embd"),
    )


def _qwen4_metadata(spec: ModelSpec) -> Metadata:
    lookup: Metadata = {
        "ple.layers": [0],
        "ple.ngram_size": NGRAM,
        "ple.heads_per_ngram": PER_NGRAM,
        "ple.conv_kernel": CONV,
        "ple.eos_token_id": spec.vocab - 1,
        "embedding_length_per_layer_input": spec.n_embd // PLE_HEADS,
        "ple.layer_multipliers": U64((1, 3, 5)),
        "ple.head_offsets": U64(tuple(head * spec.vocab for head in range(PLE_HEADS))),
        "ple.head_vocab_sizes": U64((spec.vocab,) * PLE_HEADS),
    }
    return _qwen35_metadata(spec) | {
        "hyper_connection.count": HC,
        "hyper_connection.low_rank": LOW,
        "attention.indexer.head_count": INDEX_HEADS,
        "attention.indexer.key_length": spec.head_dim,
        "attention.indexer.top_k": TOP,
        "attention.compress_ratios": [POOL] * spec.n_blocks,
    } | ({} if spec.mtp_only else lookup)  # fmt: skip


def _qwen4_layer(spec: ModelSpec, layer: int) -> Parts:
    kind = ("attention", "indexer") if full(spec, layer) else ("linear",)
    lookup = ("lookup",) if layer == 0 else ()
    return ("mixers", *kind, *lookup, *moe(spec), "shared", *(("nextn",) if layer == spec.n_layer else ()))


QWEN4EXP = Layout(
    before=(
        *BEFORE,
        Row("per_layer_token_embd.weight", ("ple", "ple_rows"), Role.EMBED),
    ),
    parts=COMMON
    | {
        "mixers": (
            *_mixer("hc_attn"),
            matrix("hc_attn_inject", "hc_embd", HC),
            *_mixer("hc_ffn"),
            matrix("hc_ffn_inject", "hc_embd", HC),
        ),
        "attention": QWEN_GATED,
        "indexer": (
            small("indexer.q_proj.weight", "embd", "index"),
            small("indexer.k_proj.weight", "embd", "head"),
            norm("indexer.q_norm", "head"),
            norm("indexer.k_norm", "head"),
        ),
        "linear": QWEN_LINEAR,
        "lookup": (
            matrix("ple_key", "embd", "hc_embd"),
            matrix("ple_value", "embd", "embd"),
            norm("ple_norm_key", "embd", HC),
            norm("ple_norm_query", "embd", HC),
            norm("ple_norm_conv", "embd", HC),
            small("ple_conv1d.weight", CONV, "hc_embd"),
        ),
        "shared": (SHARED_GATE, *COMMON["shared"]),
        "nextn": (
            matrix("nextn.eh_proj", "embd2", "embd", role=Role.MTP),
            norm("nextn.enorm", "embd"),
            norm("nextn.hnorm", "embd", HC),
            *_mixer("nextn.hc_head"),
        ),
    },
    layer=_qwen4_layer,
    after=(*_mixer("output_hc"), AFTER[1]),
    dims=lambda spec: {
        **_hybrid_dims(spec),
        "index": INDEX_HEADS * spec.head_dim,
        "ple": spec.n_embd // PLE_HEADS,
        "ple_rows": PLE_HEADS * spec.vocab,
    },
    metadata=_qwen4_metadata,
    checks=(common.eighth_head,),
    merged=True,
    shared=(1, 8),
    mtp=True,
    mtp_file=True,
    least_layers=2,
)

KEY, KPOOL_HEADS = 128, 32  # the CUDA lightning indexer takes keys of 128 and 32 or 64 heads
MIX = (2 + HC) * HC


def _glm5_layer(spec: ModelSpec, layer: int) -> Parts:
    mixers = () if layer == spec.n_layer else ("mixers",)
    ffn = ("dense",) if layer < spec.n_dense else (*moe(spec), "probs", "shared")
    return (
        "norms",
        *mixers,
        "attention" if full(spec, layer) else "linear",
        *ffn,
        *(("nextn",) if layer == spec.n_layer else ()),
    )


def _glm5_metadata(spec: ModelSpec) -> Metadata:
    size = common.dims(spec)
    return latent_metadata(spec) | {
        "attention.head_count_kv": [1 if full(spec, layer) else 0 for layer in range(spec.n_blocks)],
        "attention.layer_norm_epsilon": 1e-5,
        "attention.key_length": size["kv_lora"],
        "attention.key_length_mla": size["head"],
        "rope.dimension_count": 0,
        "ssm.conv_kernel": CONV,
        "kda.head_dim": spec.head_dim,
        "kda.gate_lower_bound": -5.0,
        "attention.indexer.head_count": KPOOL_HEADS,
        "attention.indexer.key_length": KEY,
        "attention.indexer.top_k": TOP,
        "attention.indexer.kpool": POOL,
        "attention.indexer.kpool_select_tail": True,
        "hyper_connection.count": HC,
        "hyper_connection.sinkhorn_iterations": 4,
        "hyper_connection.epsilon": 1e-6,
    }


# F32 as upstream's quantiser leaves them: mixers, indexer, gates of the linear layers, the latent's own matrices.
GLM5_NEXT = Layout(
    before=BEFORE,
    parts=COMMON
    | {
        "norms": (*ATTN_NORM, *FFN_NORM),
        "mixers": tuple(
            row
            for name in ("hc_attn", "hc_ffn")
            for row in (
                small(f"{name}_fn.weight", "hc_embd", MIX),
                small(f"{name}_base.weight", MIX, std=0.1),
                small(f"{name}_scale.weight", 3, mean=1.0, std=0.1),
            )
        ),
        "linear": (
            small("ssm_conv1d_q.weight", CONV, 1, "q"),
            small("ssm_conv1d_k.weight", CONV, 1, "q"),
            small("ssm_conv1d_v.weight", CONV, 1, "q"),
            *(matrix(f"attn_{one}", "embd", "q") for one in "qkv"),
            small("ssm_f_a.weight", "embd", "head"),
            small("ssm_f_b.weight", "head", "q"),
            small("ssm_beta.weight", "embd", "heads"),
            small("ssm_a", "heads", mean=-1.0, std=0.1),
            small("ssm_dt.bias", "q", std=0.5),
            small("ssm_g_a.weight", "embd", "head"),
            small("ssm_g_b.weight", "head", "q"),
            norm("ssm_norm", "head"),
            *O,
        ),
        "attention": (
            *LATENT[1:],
            small("attn_kv_a_mqa.weight", "embd", "kv_lora"),
            small("attn_k_b.weight", "head", "kv_lora", "heads"),
            small("attn_v_b.weight", "kv_lora", "head", "heads"),
            *O,
            norm("indexer.k_norm", KEY),
            small("indexer.k_norm.bias", KEY, std=0.1),
            small("indexer.proj.weight", "embd", KPOOL_HEADS),
            small("indexer.attn_k.weight", "embd", KEY),
            small("indexer.attn_q_b.weight", "q_lora", KPOOL_HEADS * KEY),
            small("indexer_compressor_gate.weight", "embd", KEY),
            small("indexer_compressor_ape.weight", KEY, POOL),
        ),
        "nextn": NEXTN,
    },
    layer=_glm5_layer,
    after=AFTER,
    dims=lambda spec: {**_hybrid_dims(spec), "q_mla": spec.n_head * spec.head_dim},
    metadata=_glm5_metadata,
    checks=(common.even_head,),
    shared=(1, 8),
    dense=True,
    mtp=True,
    least_layers=2,
)
