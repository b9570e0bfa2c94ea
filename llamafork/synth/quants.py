"""The types that ``--type`` and ``--layer-types`` name, what stands in where a row does not divide, random blocks.

gguf-py quantises only the simple types. For the others blocks are drawn at random: every pattern of code bits is
valid, so only the scales have to be right, and those are chosen for the standard deviation that is wanted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamafork.synth.table import GGML, Role

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Quant:
    """The types a ``--type`` stands for; ``ends`` is for both ends, ``file_type`` llama_ftype of llama.h."""

    ends: str
    matrix: str
    experts: str
    file_type: int

    def of(self, role: Role) -> str:
        if role is Role.EXPERT:
            return self.experts
        return self.ends if role in (Role.EMBED, Role.OUTPUT, Role.MTP) else self.matrix


def _plain(name: str, file_type: int) -> Quant:
    return Quant(name, name, name, file_type)


# MXFP4 is for experts only, as in MXFP4_MOE files. TQ1_0 and TQ2_0 are multiplied by the CPU alone.
# Embedding, output and an MTP block's input stay Q8_0 with coded types: they are not just random.
QUANTS: dict[str, Quant] = {
    "F32": _plain("F32", 0),
    "F16": _plain("F16", 1),
    "BF16": _plain("BF16", 32),
    "Q8_0": _plain("Q8_0", 7),
    "Q4_0": _plain("Q4_0", 2),
    "Q4_1": _plain("Q4_1", 3),
    "Q5_0": _plain("Q5_0", 8),
    "Q5_1": _plain("Q5_1", 9),
    "MXFP4": Quant("Q8_0", "Q8_0", "MXFP4", 38),
    "Q2_K": Quant("Q8_0", "Q2_K", "Q2_K", 10),
    "Q3_K": Quant("Q8_0", "Q3_K", "Q3_K", 12),
    "Q4_K": Quant("Q8_0", "Q4_K", "Q4_K", 15),
    "Q5_K": Quant("Q8_0", "Q5_K", "Q5_K", 17),
    "Q6_K": Quant("Q8_0", "Q6_K", "Q6_K", 18),
    "IQ4_NL": Quant("Q8_0", "IQ4_NL", "IQ4_NL", 25),
    "IQ4_XS": Quant("Q8_0", "IQ4_XS", "IQ4_XS", 30),
    "IQ3_S": Quant("Q8_0", "IQ3_S", "IQ3_S", 26),
    "IQ3_XXS": Quant("Q8_0", "IQ3_XXS", "IQ3_XXS", 23),
    "IQ2_S": Quant("Q8_0", "IQ2_S", "IQ2_S", 28),
    "IQ2_XS": Quant("Q8_0", "IQ2_XS", "IQ2_XS", 20),
    "IQ2_XXS": Quant("Q8_0", "IQ2_XXS", "IQ2_XXS", 19),
    "IQ1_M": Quant("Q8_0", "IQ1_M", "IQ1_M", 31),
    "IQ1_S": Quant("Q8_0", "IQ1_S", "IQ1_S", 24),
    "TQ1_0": Quant("Q8_0", "TQ1_0", "TQ1_0", 36),
    "TQ2_0": Quant("Q8_0", "TQ2_0", "TQ2_0", 37),
    "NVFP4": Quant("Q8_0", "NVFP4", "NVFP4", 39),
    "Q1_0": Quant("Q8_0", "Q1_0", "Q1_0", 40),
    "Q2_0": Quant("Q8_0", "Q2_0", "Q2_0", 41),
}

# As tensor_type_fallback of upstream's llama-quant.cpp, which has none for the last two.
_SMALLER = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL",
            "IQ3_S": "IQ4_NL", "IQ3_XXS": "IQ4_NL", "IQ2_S": "IQ4_NL", "IQ2_XS": "IQ4_NL", "IQ2_XXS": "IQ4_NL",
            "IQ1_M": "IQ4_NL", "IQ1_S": "IQ4_NL", "TQ1_0": "Q4_0", "TQ2_0": "Q4_0", "Q2_0": "Q4_0",
            "NVFP4": "Q4_0", "Q1_0": "Q4_0"}  # fmt: skip


def fitting(name: str, width: int, *, floats: bool) -> str:
    """*name* where rows of *width* are whole blocks, else upstream's substitute; F16 at last, if *floats*."""
    if width % GGML[name].block:
        name = _SMALLER.get(name, name)
    return "F16" if floats and width % GGML[name].block else name


@dataclass(frozen=True)
class Code:
    """A coded type: where its f16 scale is, that of the minima and its size in scales; the deviation at scale 1."""

    scale: int
    deviation: float
    minimum: int = -1
    ratio: float = 0.0


CODES: dict[str, Code] = {
    "Q2_K": Code(80, 9.834, 82, 1.5),
    "Q3_K": Code(108, 43.44),
    "Q4_K": Code(0, 168.4, 2, 7.5),
    "Q5_K": Code(0, 337.9, 2, 15.5),
    "Q6_K": Code(208, 1365.0),
    "IQ4_NL": Code(0, 67.24),
    "IQ4_XS": Code(0, 1247.0),
    "IQ3_S": Code(0, 140.7),
    "IQ3_XXS": Code(0, 142.6),
    "IQ2_S": Code(0, 56.39),
    "IQ2_XS": Code(0, 55.76),
    "IQ2_XXS": Code(0, 53.48),
    "IQ1_M": Code(48, 7.204),
    "IQ1_S": Code(0, 7.185),
    "TQ1_0": Code(52, math.sqrt(2 / 3)),
    "TQ2_0": Code(64, math.sqrt(1 / 2)),
    "NVFP4": Code(0, math.sqrt(34.25)),
    "Q1_0": Code(0, 1.0),
    "Q2_0": Code(0, math.sqrt(1 / 2)),
}


def blocks(name: str, source: np.random.PCG64, count: int, std: float) -> NDArray[np.uint8]:
    """*count* random blocks of a coded type, one a row, that decode to zero mean and deviation *std*."""
    import numpy as np

    size, code = GGML[name].size, CODES[name]
    words = source.random_raw(-(-count * size // 8)).astype("<u8", copy=False)
    found = words.view(np.uint8)[: count * size].reshape(count, size).copy()
    if name == "Q2_K":  # the minimum's four bits as the scale's, so that the mean is zero
        found[:, :16] = (found[:, :16] & 15) * 17
    elif code.minimum >= 0:  # as above, six bits each, packed: get_scale_min_k4 of ggml-quants.c
        found[:, 8:12] = found[:, 4:8]
        found[:, 12:16] = (found[:, 12:16] & 15) * 17
    elif name in ("TQ2_0", "Q2_0"):  # the sum of two bits minus one: codes of zero mean, and none is 3
        found = (found & 0x55) + (found >> 1 & 0x55)
    elif name == "NVFP4":
        found[:, :4] = _ue4m3(std / code.deviation)
        return found
    scale = np.float16(std / code.deviation)
    if name == "IQ1_M":  # the scale is in the upper four bits of four words
        bits = int(scale.view(np.uint16))
        for i in range(4):
            high = found[:, code.scale + 2 * i + 1]
            high[:] = (high & 15) | (bits >> 4 * i & 15) << 4
        return found
    _put(found, code.scale, scale)
    if code.minimum >= 0:
        _put(found, code.minimum, np.float16(std / code.deviation * code.ratio))
    return found


def _ue4m3(value: float) -> int:
    """The nearest scale of NVFP4: four bits of exponent, three of mantissa, half of what they would be as a float."""
    decoded = [(m / 8 if e == 0 else 1 + m / 8) * 2.0 ** (max(e, 1) - 8) for e in range(16) for m in range(8)]
    return min(range(1, 127), key=lambda code: abs(decoded[code] - value))


def _put(found: NDArray[np.uint8], at: int, value: np.float16) -> None:
    import numpy as np

    found[:, at : at + 2] = np.frombuffer(value.astype("<f2").tobytes(), dtype=np.uint8)
