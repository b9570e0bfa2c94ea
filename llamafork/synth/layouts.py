"""What a model's file holds: every tensor's name, shape, type and scale, resolved from its architecture's table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod, sqrt
from typing import TYPE_CHECKING

from llamafork.synth.archs import LAYOUTS
from llamafork.synth.table import Layout, Role, Row, Shape, Tensor

if TYPE_CHECKING:
    from llamafork.synth.spec import ModelSpec

# What a file with the MTP block alone holds beside it, as upstream's convert_hf_to_gguf.py --mtp writes it.
SIDE = frozenset({"token_embd.weight", "output_norm.weight", "output.weight"})


def layout(spec: ModelSpec) -> Layout:
    return LAYOUTS[spec.arch]


def rows(spec: ModelSpec) -> Iterator[tuple[str, Row, int]]:
    """Every tensor's name, row and layer (-1 outside of layers) in file order."""
    table = layout(spec)
    for row in table.before:
        if not spec.mtp_only or row.name in SIDE:
            yield row.name, row, -1
    for layer in spec.layers:
        for part in table.layer(spec, layer):
            yield from ((f"blk.{layer}.{row.name}", row, layer) for row in table.parts[part])
    for row in table.after:
        if not spec.mtp_only or row.name in SIDE:
            yield row.name, row, -1


def shapes(spec: ModelSpec) -> dict[str, Shape]:
    """The table that every tensor is checked against: name to shape."""
    size = layout(spec).dims(spec)
    return {name: _shape(row, size) for name, row, _ in rows(spec)}


def tensors(spec: ModelSpec) -> list[Tensor]:
    """All tensors of *spec* in file order."""
    size = layout(spec).dims(spec)
    found: list[Tensor] = []
    with_experts: list[int] = []
    for name, row, layer in rows(spec):
        if row.role is Role.EXPERT and layer not in with_experts:
            with_experts.append(layer)
        shape = _shape(row, size)
        kind = spec.type_of(row.role, shape[0], with_experts.index(layer) if row.role is Role.EXPERT else 0)
        found.append(_tensor(name, shape, row, kind))
    return found


def _shape(row: Row, size: Mapping[str, int]) -> Shape:
    return tuple(dim if isinstance(dim, int) else size[dim] for dim in row.dims)


def _tensor(name: str, shape: Shape, row: Row, kind: str) -> Tensor:
    """Scales that keep activations near unit variance: 1/sqrt(inputs) for what is multiplied, one for embeddings."""
    if row.role is Role.NORM:
        mean, std = 1.0, 0.1 * row.gain
    else:
        inputs = shape[0] if len(shape) > 1 else prod(shape)
        mean, std = 0.0, row.gain if row.role is Role.EMBED else row.gain / sqrt(inputs)
    return Tensor(
        name,
        shape,
        row.role,
        kind,
        mean if row.mean is None else row.mean,
        std if row.std is None else row.std,
    )
