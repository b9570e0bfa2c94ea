"""What a layout is made of: roles, rows, tensors, and the types that upstream can multiply in each role."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import TYPE_CHECKING

from llamafork.facts.ggml_types import TYPES, GgmlType

if TYPE_CHECKING:
    from llamafork.synth.spec import ModelSpec

Shape = tuple[int, ...]


@dataclass(frozen=True)
class U64:
    """An array that upstream reads as unsigned 64-bit numbers."""

    values: tuple[int, ...]


# A bool is written as such, int as u32, float as f32, a sequence as an array; keys lack the "<arch>." in front.
Metadata = dict[str, bool | int | float | Sequence[int] | U64]
GGML: dict[str, GgmlType] = {one.name: one for one in TYPES.values()}


class Role(StrEnum):
    NORM = "norms"
    ROUTER = "router"
    STATE = "small parts"  # biases, sinks, convolutions, mixers: what upstream's quantiser leaves alone
    EMBED = "embedding"
    OUTPUT = "output"
    MTP = "MTP input"
    ATTN = "attention"
    DENSE = "dense and shared"
    EXPERT = "experts"


# What upstream can multiply, per role. F64 and the I* types are in none of these.
MATRIX = frozenset({"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"})
CODED = frozenset({"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS",
                   "IQ2_XXS", "IQ1_S", "IQ1_M", "TQ1_0", "TQ2_0", "NVFP4", "Q1_0", "Q2_0"})  # fmt: skip
FLOAT = frozenset({"F32"})
ALLOWED: dict[Role, frozenset[str]] = {
    Role.NORM: FLOAT,
    Role.ROUTER: FLOAT,
    Role.STATE: FLOAT,
    Role.EMBED: MATRIX,
    Role.OUTPUT: MATRIX,
    Role.MTP: MATRIX,
    Role.ATTN: MATRIX | CODED,
    Role.DENSE: MATRIX | CODED,
    Role.EXPERT: MATRIX | CODED | {"MXFP4"},
}
FLOAT_ONLY = frozenset(role for role, types in ALLOWED.items() if types == FLOAT)


@dataclass(frozen=True)
class Row:
    """One line of a layout; ``dims`` are names resolved by the layout's ``dims``, or numbers.

    ``gain`` scales the weights; ``mean`` and ``std``, where given, replace what their role would get.
    """

    name: str
    dims: tuple[str | int, ...]
    role: Role
    gain: float = 1.0
    mean: float | None = None
    std: float | None = None


@dataclass(frozen=True)
class Layout:
    """An architecture. ``layer`` names the parts of a layer; layer number ``n_layer`` is the MTP block."""

    before: tuple[Row, ...]
    parts: Mapping[str, tuple[Row, ...]]
    layer: Callable[[ModelSpec, int], tuple[str, ...]]
    after: tuple[Row, ...]
    dims: Callable[[ModelSpec], Mapping[str, int]]
    metadata: Callable[[ModelSpec], Metadata]
    checks: tuple[Callable[[ModelSpec], None], ...] = ()
    all_heads: bool = False  # by default as many key/value heads as query heads
    merged: bool = False  # upstream's loader takes one tensor for gate and up
    shared: tuple[int, int] = (0, 0)  # least and most shared experts
    dense: bool = False  # has layers without experts before the first one with
    mtp: bool = False  # upstream loads an MTP block in the model's file
    mtp_file: bool = False  # and one in a file of its own
    least_layers: int = 1


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
