"""The text: what ships with Python, its manual and its library, as byte tokens, with a part held out."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SPACE_E = 256  # the vocabulary's one merge: a space and an e
VOCAB = 260  # of the trained model, which uses 257 of them
HELD_OUT = 20  # one file in so many
SKIP = ("test", "tests", "site-packages", "idlelib", "lib2to3", "encodings", "__pycache__", "turtledemo", "ensurepip")
LIMIT = 60_000  # bytes of one file, so that none dominates


@dataclass(frozen=True)
class Text:
    train: NDArray[np.int64]
    held: NDArray[np.int64]
    files: int
    sha256: str  # of all bytes used, in order


def encode(data: bytes) -> NDArray[np.int64]:
    """As llama.cpp does with the vocabulary of ``synth.tokenizer.build(260)``."""
    raw = np.frombuffer(data, dtype=np.uint8).astype(np.int64)
    merged = np.flatnonzero((raw[:-1] == ord(" ")) & (raw[1:] == ord("e")))
    raw[merged] = SPACE_E
    return np.delete(raw, merged + 1)


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
    return Text(encode(bytes(train)), encode(bytes(held)), len(files), total.hexdigest())


def trigram_bits(train: NDArray[np.int64], held: NDArray[np.int64]) -> NDArray[np.float64]:
    """Bits of each token of *held* but the first two, for an interpolated trigram model of *train*.

    Weights 0.7, 0.25 and 0.049 for three, two and one token, the rest uniform.
    """
    a, b, c = (train[i : len(train) - 2 + i] for i in range(3))
    x, y, z = (held[i : len(held) - 2 + i] for i in range(3))
    three = np.bincount((a * VOCAB + b) * VOCAB + c, minlength=VOCAB**3)
    pairs, two = (np.bincount(u * VOCAB + v, minlength=VOCAB**2) for u, v in ((a, b), (b, c)))
    singles, one = (np.bincount(u, minlength=VOCAB) for u in (b, c))
    single = one[z] / len(train)
    double = np.where(singles[y] > 0, two[y * VOCAB + z] / np.maximum(singles[y], 1), single)
    seen = pairs[x * VOCAB + y]
    triple = np.where(seen > 0, three[(x * VOCAB + y) * VOCAB + z] / np.maximum(seen, 1), double)
    bits: NDArray[np.float64] = -np.log2(0.7 * triple + 0.25 * double + 0.049 * single + 0.001 / 257)
    return bits


def second_halves(bits: NDArray[np.float64], length: int, first: int) -> float:
    """The mean over what llama-perplexity looks at: the second half of each whole window of *length* tokens.

    ``bits[0]`` belongs to token number *first*.
    """
    at = np.arange(first, first + len(bits))
    whole = (first + len(bits)) // length * length
    return float(bits[(at % length > length // 2) & (at < whole)].mean())
