"""Routing traces: which experts each token used in each MoE layer. Written by llama-expert-trace, read here.

The file: 8 bytes ``LFTRACE1``; a little-endian u32, the length of a JSON header; the header; then one record a token:
i32 token, u8 phase (0 prompt, 1 decode), and for each layer of the header's ``layers``, ``n_used`` expert ids as
u8 or u16 (``width`` 1 or 2). A file that was cut off in the middle of a record is read up to the last whole one.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamafork.errors import ModelError
from llamafork.paths import show, write_atomic

MAGIC = b"LFTRACE1"
HEADER_LIMIT = 1 << 20
PROMPT, DECODE = 0, 1


@dataclass(frozen=True)
class Trace:
    """``tokens`` [n], ``phases`` [n], ``experts`` [n, layers, n_used]; ``layers`` are the model's layer numbers."""

    layers: tuple[int, ...]
    n_expert: int
    n_used: int
    model: str
    tokens: NDArray[np.int32]
    phases: NDArray[np.uint8]
    experts: NDArray[np.uint16]
    cut: bool = False

    def __len__(self) -> int:
        return len(self.tokens)

    def decode_only(self) -> Trace:
        """The tokens that were generated: what a decode cache sees."""
        chosen = self.phases == DECODE
        return Trace(self.layers, self.n_expert, self.n_used, self.model, self.tokens[chosen], self.phases[chosen],
                     self.experts[chosen], self.cut)  # fmt: skip


def _record(layers: int, used: int, width: int) -> np.dtype[Any]:
    kind = "<u1" if width == 1 else "<u2"
    return np.dtype([("token", "<i4"), ("phase", "u1"), ("experts", kind, (layers, used))])


def load(path: Path) -> Trace:
    """Read a trace. Raises :class:`ModelError` for a file that is none, with the part that is wrong."""
    if path.exists() and not path.is_file():
        raise ModelError(
            f"{show(path)} is not a routing trace", why="it is no file", do="name one of llamafork trace record"
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelError(
            f"cannot read the trace {show(path)}",
            why=error.strerror or str(error),
            do="make one with llamafork trace record",
        ) from error
    if data[:8] != MAGIC or len(data) < 12:
        raise ModelError(f"{show(path)} is not a routing trace", do="make one with llamafork trace record")
    (length,) = struct.unpack_from("<I", data, 8)
    header = _header(path, data[12 : 12 + length] if length <= HEADER_LIMIT else b"")
    layers, n_expert, used, width = header["layers"], header["n_expert"], header["n_used"], header["width"]
    kind = _record(len(layers), used, width)
    body = memoryview(data)[12 + length :]
    count = len(body) // kind.itemsize
    rows = np.frombuffer(body, dtype=kind, count=count)
    experts = rows["experts"].astype(np.uint16)
    if count and int(experts.max()) >= n_expert:
        raise ModelError(f"{show(path)} names expert {int(experts.max())} of {n_expert}", why="the file is damaged")
    cut = len(body) != count * kind.itemsize
    return Trace(tuple(layers), n_expert, used, str(header.get("model", "")), rows["token"].astype(np.int32),
                 rows["phase"].copy(), experts, cut)  # fmt: skip


def _header(path: Path, text: bytes) -> Mapping[str, Any]:
    try:
        header = json.loads(text)
        layers: Sequence[int] = header["layers"]
        numbers = [header["n_expert"], header["n_used"], header["width"], *layers]
        sound = all(isinstance(n, int) and n >= 0 for n in numbers) and header["width"] in (1, 2) and bool(layers)
        if sound and 0 < header["n_used"] <= header["n_expert"] <= 1 << 16:
            return dict(header)
    except (ValueError, KeyError, TypeError):
        pass
    raise ModelError(f"the header of the trace {show(path)} is damaged", do="record it again")


def save(path: Path, trace: Trace) -> None:
    """Write *trace*; the file appears whole or not at all."""
    width = 1 if trace.n_expert <= 256 else 2
    header = json.dumps({"layers": list(trace.layers), "n_expert": trace.n_expert, "n_used": trace.n_used,
                         "width": width, "model": trace.model}).encode()  # fmt: skip
    rows = np.zeros(len(trace), dtype=_record(len(trace.layers), trace.n_used, width))
    rows["token"], rows["phase"], rows["experts"] = trace.tokens, trace.phases, trace.experts
    write_atomic(path, MAGIC + struct.pack("<I", len(header)) + header + rows.tobytes())
