"""What each architecture's file holds: tensor names, shapes, roles and metadata, as upstream's loader wants them.

An architecture is one :class:`Layout`: tables of :class:`Row` plus three small functions. Shapes are in ggml order,
the row width first. To add one, write its tables from ``src/models/<arch>.cpp`` and enter it in :data:`LAYOUTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod, sqrt
from typing import TYPE_CHECKING

from llamafork.errors import UsageError
from llamafork.facts.ggml_types import TYPES, GgmlType

if TYPE_CHECKING:
    from llamafork.synth.spec import ModelSpec

Shape = tuple[int, ...]
Metadata = dict[str, int | float]  # int is written as u32, float as f32; keys lack the "<arch>." in front
GGML: dict[str, GgmlType] = {one.name: one for one in TYPES.values()}


class Role(StrEnum):
    NORM = "norms"
    ROUTER = "router"
    EMBED = "embedding"
    OUTPUT = "output"
    ATTN = "attention"
    EXPERT = "experts"


# What upstream can multiply on every backend, per role. F64 and the I* types are in none of these.
MATRIX = frozenset({"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"})
ALLOWED: dict[Role, frozenset[str]] = {
    Role.NORM: frozenset({"F32"}),
    Role.ROUTER: frozenset({"F32"}),
    Role.EMBED: MATRIX,
    Role.OUTPUT: MATRIX,
    Role.ATTN: MATRIX,
    Role.EXPERT: MATRIX | {"MXFP4"},
}


@dataclass(frozen=True)
class Row:
    """One line of a layout; ``dims`` are names resolved by the layout's ``dims``, ``gain`` scales the weights."""

    name: str
    dims: tuple[str, ...]
    role: Role
    gain: float = 1.0


@dataclass(frozen=True)
class Layout:
    before: tuple[Row, ...]
    block: tuple[Row, ...]  # once per layer, each name below "blk.<i>."
    after: tuple[Row, ...]
    dims: Callable[[ModelSpec], Mapping[str, int]]
    metadata: Callable[[ModelSpec], Metadata]
    check: Callable[[ModelSpec], None]

    def rows(self, n_layer: int) -> Iterator[tuple[str, Row]]:
        yield from ((row.name, row) for row in self.before)
        for layer in range(n_layer):
            yield from ((f"blk.{layer}.{row.name}", row) for row in self.block)
        yield from ((row.name, row) for row in self.after)


@dataclass(frozen=True)
class Tensor:
    """One tensor of a model: weights are drawn with this mean and standard deviation."""

    name: str
    shape: Shape
    role: Role
    type: str
    mean: float
    std: float

    @property
    def params(self) -> int:
        return prod(self.shape)

    @property
    def row_bytes(self) -> int:
        kind = GGML[self.type]
        return self.shape[0] // kind.block * kind.size

    @property
    def bytes(self) -> int:
        return prod(self.shape[1:]) * self.row_bytes


def shapes(spec: ModelSpec) -> dict[str, Shape]:
    """The table that every tensor is checked against: name to shape."""
    layout = LAYOUTS[spec.arch]
    size = layout.dims(spec)
    return {name: tuple(size[dim] for dim in row.dims) for name, row in layout.rows(spec.n_layer)}


def tensors(spec: ModelSpec) -> list[Tensor]:
    """All tensors of *spec* in file order."""
    shape = shapes(spec)
    return [_tensor(name, shape[name], row, spec) for name, row in LAYOUTS[spec.arch].rows(spec.n_layer)]


def _tensor(name: str, shape: Shape, row: Row, spec: ModelSpec) -> Tensor:
    """Scales that keep activations near unit variance: 1/sqrt(inputs) for what is multiplied, one for embeddings."""
    kind = spec.type_of(row.role)
    if row.role is Role.NORM:
        return Tensor(name, shape, row.role, kind, 1.0, 0.1 * row.gain)
    std = row.gain if row.role is Role.EMBED else row.gain / sqrt(shape[0])
    return Tensor(name, shape, row.role, kind, 0.0, std)


def _qwen3moe_dims(spec: ModelSpec) -> Mapping[str, int]:
    return {
        "embd": spec.n_embd,
        "q": spec.n_head * spec.head_dim,
        "kv": spec.n_head_kv * spec.head_dim,
        "head": spec.head_dim,
        "ff": spec.n_ff_exp,
        "experts": spec.n_expert,
        "vocab": spec.vocab,
    }


def _qwen3moe_metadata(spec: ModelSpec) -> Metadata:
    return {
        "block_count": spec.n_layer,
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


def _qwen3moe_check(spec: ModelSpec) -> None:
    if spec.head_dim % 2:
        raise UsageError(
            f"--head-dim {spec.head_dim} is odd",
            why="rotary position encoding turns pairs of values",
            do=f"--head-dim {spec.head_dim + 1}",
        )


# src/models/qwen3moe.cpp: load_arch_tensors. Output gain 2: logits with enough spread for a clear greedy choice.
QWEN3MOE = Layout(
    before=(Row("token_embd.weight", ("embd", "vocab"), Role.EMBED),),
    block=(
        Row("attn_norm.weight", ("embd",), Role.NORM),
        Row("attn_q.weight", ("embd", "q"), Role.ATTN),
        Row("attn_k.weight", ("embd", "kv"), Role.ATTN),
        Row("attn_v.weight", ("embd", "kv"), Role.ATTN),
        Row("attn_output.weight", ("q", "embd"), Role.ATTN),
        Row("attn_q_norm.weight", ("head",), Role.NORM),
        Row("attn_k_norm.weight", ("head",), Role.NORM),
        Row("ffn_norm.weight", ("embd",), Role.NORM),
        Row("ffn_gate_inp.weight", ("embd", "experts"), Role.ROUTER),
        Row("ffn_gate_exps.weight", ("embd", "ff", "experts"), Role.EXPERT),
        Row("ffn_up_exps.weight", ("embd", "ff", "experts"), Role.EXPERT),
        Row("ffn_down_exps.weight", ("ff", "embd", "experts"), Role.EXPERT, 2.0),
    ),
    after=(
        Row("output_norm.weight", ("embd",), Role.NORM),
        Row("output.weight", ("embd", "vocab"), Role.OUTPUT, 2.0),
    ),
    dims=_qwen3moe_dims,
    metadata=_qwen3moe_metadata,
    check=_qwen3moe_check,
)

LAYOUTS: dict[str, Layout] = {"qwen3moe": QWEN3MOE}
