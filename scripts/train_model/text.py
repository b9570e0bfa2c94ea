"""The text: what ships with Python, its manual and its library, as byte tokens, with a part held out."""

from __future__ import annotations

import hashlib
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SPACE_E = 256  # the vocabulary's one merge: a space and an e
HELD_OUT = 20  # one file in so many
SKIP = ("test", "tests", "site-packages", "idlelib", "lib2to3", "encodings", "__pycache__", "turtledemo", "ensurepip")
LIMIT = 60_000  # bytes of one file, so that none dominates


@dataclass(frozen=True)
class Text:
    train: NDArray[np.int64]
    held: NDArray[np.int64]
    files: int
    sha256: str  # of all bytes used, in order


def encode(data: bytes) -> list[int]:
    """As llama.cpp does with the vocabulary of ``synth.tokenizer.build(260)``."""
    out: list[int] = []
    at = 0
    while at < len(data):
        if data[at : at + 2] == b" e":
            out.append(SPACE_E)
            at += 2
        else:
            out.append(data[at])
            at += 1
    return out


def decode(tokens: NDArray[np.int64]) -> bytes:
    """The bytes that :func:`encode` makes *tokens* of."""
    return b"".join(b" e" if token == SPACE_E else bytes((token,)) for token in tokens.tolist())


def load() -> Text:
    """The manual's topics and the modules of the standard library, in the order of their names' hashes."""
    library = Path(os.__file__).parent
    files = [p for p in library.rglob("*.py") if not set(p.relative_to(library).parts[:-1]) & set(SKIP)]
    files.sort(key=lambda p: hashlib.sha256(p.relative_to(library).as_posix().encode()).digest())
    train, held, total = bytearray(), bytearray(), hashlib.sha256()
    for number, file in enumerate(files):
        whole = file.read_bytes()
        data = whole if file.name == "topics.py" else whole[:LIMIT]
        total.update(data)
        (held if number % HELD_OUT == 0 and file.name != "topics.py" else train).extend(data + b"\n\n")
    as_array = lambda data: np.array(encode(bytes(data)), dtype=np.int64)  # noqa: E731
    return Text(as_array(train), as_array(held), len(files), total.hexdigest())


def trigram_bits(train: Sequence[int], held: Sequence[int]) -> NDArray[np.float64]:
    """Bits of each token of *held* but the first two, for an interpolated trigram model of *train*.

    Weights 0.7, 0.25 and 0.049 for three, two and one token, the rest uniform.
    """
    three, two, one = Counter(), Counter(), Counter()  # type: ignore[var-annotated]
    pairs, singles = Counter(), Counter()  # type: ignore[var-annotated]
    tokens = list(map(int, train))
    for a, b, c in zip(tokens, tokens[1:], tokens[2:], strict=False):
        three[a, b, c] += 1
        pairs[a, b] += 1
        two[b, c] += 1
        singles[b] += 1
        one[c] += 1
    n = len(tokens)
    bits = []
    text = list(map(int, held))
    for a, b, c in zip(text, text[1:], text[2:], strict=False):
        single = one[c] / n
        double = two[b, c] / singles[b] if singles[b] else single
        triple = three[a, b, c] / pairs[a, b] if pairs[a, b] else double
        bits.append(-math.log2(0.7 * triple + 0.25 * double + 0.049 * single + 0.001 / 257))
    return np.array(bits)


def second_halves(bits: NDArray[np.float64], length: int, first: int) -> float:
    """The mean over what llama-perplexity looks at: the second half of each whole window of *length* tokens.

    ``bits[0]`` belongs to token number *first*.
    """
    at = np.arange(first, first + len(bits))
    whole = (first + len(bits)) // length * length
    return float(bits[(at % length > length // 2) & (at < whole)].mean())
