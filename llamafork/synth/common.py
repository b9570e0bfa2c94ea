"""Rows, sizes, metadata and checks that several architectures share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamafork.errors import UsageError
from llamafork.synth.table import Metadata, Role, Row

if TYPE_CHECKING:
    from llamafork.synth.spec import ModelSpec

Parts = tuple[str, ...]
SIGMOID = 2  # llama_expert_gating_func_type


def matrix(name: str, *dims: str | int, role: Role = Role.ATTN, gain: float = 1.0) -> Row:
    return Row(f"{name}.weight", dims, role, gain)


def norm(name: str, *dims: str | int) -> Row:
    return Row(f"{name}.weight", dims, Role.NORM)


def small(name: str, *dims: str | int, mean: float | None = None, std: float | None = None) -> Row:
    return Row(name, dims, Role.STATE, mean=mean, std=std)


BEFORE = (Row("token_embd.weight", ("embd", "vocab"), Role.EMBED),)
# Output gain 2: logits with enough spread for a clear greedy choice.
AFTER = (norm("output_norm", "embd"), Row("output.weight", ("embd", "vocab"), Role.OUTPUT, 2.0))
ATTN_NORM = (norm("attn_norm", "embd"),)
POST_NORM = (norm("post_attention_norm", "embd"),)
FFN_NORM = (norm("ffn_norm", "embd"),)
QKV = (matrix("attn_q", "embd", "q"), matrix("attn_k", "embd", "kv"), matrix("attn_v", "embd", "kv"))
O = (matrix("attn_output", "q", "embd"),)  # noqa: E741
ATTN = (*ATTN_NORM, *QKV, *O)
QK_NORM = (norm("attn_q_norm", "head"), norm("attn_k_norm", "head"))
BIAS = tuple(small(f"attn_{name}.bias", dim, std=0.1) for name, dim in (("q", "q"), ("k", "kv"), ("v", "kv")))
SINKS = (small("attn_sinks.weight", "heads", std=1.0),)
EXPERTS = (
    matrix("ffn_gate_exps", "embd", "ff", "experts", role=Role.EXPERT),
    matrix("ffn_up_exps", "embd", "ff", "experts", role=Role.EXPERT),
    matrix("ffn_down_exps", "ff", "embd", "experts", role=Role.EXPERT, gain=2.0),
)
MERGED = (matrix("ffn_gate_up_exps", "embd", "ff2", "experts", role=Role.EXPERT), EXPERTS[2])
NEXTN = (
    matrix("nextn.eh_proj", "embd2", "embd", role=Role.MTP),
    norm("nextn.enorm", "embd"),
    norm("nextn.hnorm", "embd"),
    norm("nextn.shared_head_norm", "embd"),
)
LATENT = (
    *ATTN_NORM,
    norm("attn_q_a_norm", "q_lora"),
    norm("attn_kv_a_norm", "kv_lora"),
    matrix("attn_q_a", "embd", "q_lora"),
    matrix("attn_q_b", "q_lora", "q_mla"),
)

COMMON: dict[str, tuple[Row, ...]] = {
    "router": (matrix("ffn_gate_inp", "embd", "experts", role=Role.ROUTER),),
    "probs": (Row("exp_probs_b.bias", ("experts",), Role.ROUTER, std=0.02),),
    "experts": EXPERTS,
    "merged": MERGED,
    "shared": (
        matrix("ffn_gate_shexp", "embd", "ff_shared", role=Role.DENSE),
        matrix("ffn_up_shexp", "embd", "ff_shared", role=Role.DENSE),
        matrix("ffn_down_shexp", "ff_shared", "embd", role=Role.DENSE, gain=2.0),
    ),
    "dense": (
        matrix("ffn_gate", "embd", "ff_dense", role=Role.DENSE),
        matrix("ffn_up", "embd", "ff_dense", role=Role.DENSE),
        matrix("ffn_down", "ff_dense", "embd", role=Role.DENSE, gain=2.0),
    ),
}


def dims(spec: ModelSpec) -> dict[str, int]:
    q, kv = spec.n_head * spec.head_dim, spec.n_head_kv * spec.head_dim
    rope, kv_lora = spec.head_dim // 2, 4 * spec.head_dim  # DeepSeek-V3's proportions, as is a quarter of the width:
    return {
        "embd": spec.n_embd,
        "embd2": 2 * spec.n_embd,
        "q": q,
        "q2": 2 * q,
        "kv": kv,
        "qkv": q + 2 * kv,
        "head": spec.head_dim,
        "heads": spec.n_head,
        "rope": rope,
        "q_lora": max(32, spec.n_embd // 128 * 32),
        "kv_lora": kv_lora,
        "kv_lora_rope": kv_lora + rope,
        "ff": spec.n_ff_exp,
        "ff2": 2 * spec.n_ff_exp,
        "ff_shared": spec.n_ff_exp * spec.n_shared,
        "ff_dense": spec.n_ff_exp * spec.n_expert_used,
        "experts": spec.n_expert,
        "vocab": spec.vocab,
    }


def base(spec: ModelSpec) -> Metadata:
    found: Metadata = {
        "block_count": spec.n_blocks,
        "context_length": spec.n_ctx_train,
        "embedding_length": spec.n_embd,
        "feed_forward_length": spec.n_ff_exp * spec.n_expert_used,
        "attention.head_count": spec.n_head,
        "attention.head_count_kv": spec.n_head_kv,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.dimension_count": spec.head_dim,
        "rope.freq_base": 1e6,
        "vocab_size": spec.vocab,
        "expert_count": spec.n_expert,
        "expert_used_count": spec.n_expert_used,
        "expert_feed_forward_length": spec.n_ff_exp,
    }
    if spec.n_blocks > spec.n_layer:
        found["nextn_predict_layers"] = spec.n_blocks - spec.n_layer
    return found


def _head_multiple(spec: ModelSpec, of: int, why: str) -> None:
    if spec.head_dim % of:
        is_odd = "is odd" if of == 2 else f"is not a multiple of {of}"
        raise UsageError(
            f"--head-dim {spec.head_dim} {is_odd}", why=why, do=f"--head-dim {-(-spec.head_dim // of) * of}"
        )


def even_head(spec: ModelSpec) -> None:
    _head_multiple(spec, 2, "rotary position encoding turns pairs of values")


def quarter_head(spec: ModelSpec) -> None:
    _head_multiple(spec, 4, f"{spec.arch} turns pairs of values in half of a head")


def eighth_head(spec: ModelSpec) -> None:
    _head_multiple(spec, 8, f"{spec.arch} encodes positions in sections of an eighth of a head")


def full_attention(spec: ModelSpec) -> None:
    """olmoe's norms of queries and keys are as wide as the embedding."""
    if spec.n_head * spec.head_dim != spec.n_embd or spec.n_head_kv != spec.n_head:
        raise UsageError(
            f"{spec.arch} wants --heads times --head-dim to be --embd ({spec.n_head} times {spec.head_dim} is not"
            f" {spec.n_embd}) and --kv-heads to be --heads ({spec.n_head_kv} and {spec.n_head})",
            do=f"--heads {max(1, spec.n_embd // spec.head_dim)} --kv-heads {max(1, spec.n_embd // spec.head_dim)}",
        )


def moe(spec: ModelSpec) -> Parts:
    return ("router", "merged" if spec.merged else "experts")


def grouped(spec: ModelSpec) -> Metadata:
    """How DeepSeek and its kin route."""
    return {
        "expert_shared_count": spec.n_shared,
        "leading_dense_block_count": spec.n_dense,
        "expert_gating_func": SIGMOID,
        "expert_weights_norm": True,
        "expert_weights_scale": 1.5,
    }


def latent_metadata(spec: ModelSpec) -> Metadata:
    size = dims(spec)
    return base(spec) | grouped(spec) | {
        "attention.head_count_kv": 1,
        "attention.key_length": size["kv_lora_rope"],
        "attention.value_length": size["kv_lora"],
        "attention.key_length_mla": size["head"] + size["rope"],
        "attention.value_length_mla": size["head"],
        "attention.q_lora_rank": size["q_lora"],
        "attention.kv_lora_rank": size["kv_lora"],
        "rope.dimension_count": size["rope"],
    }  # fmt: skip
