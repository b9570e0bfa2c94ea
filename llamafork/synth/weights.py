"""Random weights, the same on every machine: integer arithmetic on PCG64's raw stream, one float product per weight."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from llamafork.errors import EnvironmentFault
from llamafork.facts.ggml_types import TYPES
from llamafork.synth.quants import CODES, blocks
from llamafork.synth.table import GGML, Role, Tensor

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGMLQuantizationType
    from numpy.typing import NDArray

CHUNK = 1 << 20  # weights made at a time; bounds the memory at about 64 MB
_UNIT = math.sqrt(4 * (65536.0**2 - 1) / 12)  # standard deviation of the sum of four uniform 16-bit numbers


def ggml_id(name: str) -> GGMLQuantizationType:
    """For a header: the number is all that is written, and the gguf package may lack a name for the newest types."""
    return cast("GGMLQuantizationType", next(number for number, one in TYPES.items() if one.name == name))


def ggml_type(name: str) -> GGMLQuantizationType:
    from gguf import GGMLQuantizationType

    found: GGMLQuantizationType | None = GGMLQuantizationType.__members__.get(name)
    if found is None:
        raise EnvironmentFault(
            f"the installed gguf package cannot make {name}", do="pip install --upgrade gguf, or choose another --type"
        )
    return found


def stream(tensor: Tensor, seed: int, scale: Sequence[float]) -> Iterator[bytes]:
    """The tensor's bytes, piece by piece; *scale* multiplies the rows of the output matrix."""
    import numpy as np
    from gguf import quants

    width = tensor.shape[0]
    rows = tensor.params // width
    drawn = source(tensor.name, seed)
    if tensor.type in CODES:
        total, step = tensor.params // GGML[tensor.type].block, CHUNK // GGML[tensor.type].block
        for first in range(0, total, step):
            yield blocks(tensor.type, drawn, min(step, total - first), tensor.std).tobytes()
        return
    kind = ggml_type(tensor.type)
    factors = np.asarray(scale, dtype=np.float32)[:, None] if tensor.role is Role.OUTPUT else None
    step = max(1, CHUNK // width)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        values = normal(drawn, count * width, tensor.mean, tensor.std).reshape(count, width)
        if factors is not None:
            values *= factors[first : first + count]
        yield little_endian(quants.quantize(values, kind))


def normal(source: np.random.PCG64, count: int, mean: float, std: float) -> NDArray[np.float32]:
    """*count* numbers close to normal (Irwin-Hall of four). Only PCG64's raw stream is promised to stay the same."""
    import numpy as np

    raw = source.random_raw(count)
    low = np.uint64(0x0000FFFF0000FFFF)
    halves = (raw & low) + ((raw >> np.uint64(16)) & low)
    total = ((halves & np.uint64(0xFFFFFFFF)) + (halves >> np.uint64(32))).astype(np.int32) - np.int32(2 * 65535)
    values = total.astype(np.float32)
    values *= np.float32(std / _UNIT)
    values += np.float32(mean)
    return values


def source(name: str, seed: int) -> np.random.PCG64:
    """A stream of its own per tensor, independent of order and type."""
    import numpy as np

    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.PCG64(int.from_bytes(digest[:16], "little"))


def little_endian(data: NDArray[Any]) -> bytes:
    return data.astype(data.dtype.newbyteorder("<"), copy=False).tobytes()
