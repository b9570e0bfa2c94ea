"""A model in several files, as upstream's llama-gguf-split lays them out and its loader finds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llamafork.errors import UsageError
from llamafork.synth.table import Tensor

if TYPE_CHECKING:
    from gguf import GGUFWriter

MOST = 99_999  # the number in a name has five digits


@dataclass(frozen=True)
class Place:
    number: int  # from 0
    count: int
    tensors: int  # of all files


def paths(path: Path, count: int) -> list[Path]:
    """*path* itself, or name-00001-of-0000N.gguf and so on."""
    if count == 1:
        return [path]
    stem = path.name.removesuffix(".gguf")
    return [path.with_name(f"{stem}-{number + 1:05d}-of-{count:05d}.gguf") for number in range(count)]


def groups(plan: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """*plan* in *count* runs of about the same size, none empty."""
    if not 1 <= count <= min(len(plan), MOST):
        raise UsageError(f"--split {count} is not possible", do=f"give 1 to {min(len(plan), MOST)}, one tensor a file")
    found: list[list[Tensor]] = [[]]
    whole, done = sum(one.bytes for one in plan), 0
    for index, tensor in enumerate(plan):
        needed = count - len(found)  # files still to begin
        full = done >= whole * len(found) / count
        if needed and found[-1] and (full or len(plan) - index <= needed):
            found.append([])
        found[-1].append(tensor)
        done += tensor.bytes
    return found


def add_keys(writer: GGUFWriter, place: Place) -> None:
    if place.count > 1:
        writer.add_uint16("split.no", place.number)
        writer.add_uint16("split.count", place.count)
        writer.add_int32("split.tensors.count", place.tensors)
