"""A bounded reader of GGUF headers: every length is checked against the file before anything is allocated."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import BinaryIO

from llamafork.facts.ggml_types import TYPES

Value = int | float | bool | str
DEFAULT_ALIGNMENT = 32
KEY_BYTES, NAME_BYTES, TEXT_BYTES = 65_535, 63, 4096
MOST_PAIRS, MOST_TENSORS, MOST_STRINGS = 1 << 20, 1 << 20, 1 << 26
CHUNK = 1 << 20
STRING, ARRAY, UINT32, BOOL = 8, 9, 4, 7
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}


class Damaged(Exception):
    """The header contradicts itself."""


class Short(Exception):
    """The file ends inside the header."""


@dataclass(frozen=True)
class Tensor:
    """``offset`` is in bytes from the start of the data section; ``size`` is None for an unknown type."""

    name: str
    type: int
    shape: tuple[int, ...]
    offset: int
    size: int | None


@dataclass(frozen=True)
class Header:
    """``data`` is where the data section starts, in bytes from the start of the file."""

    version: int
    tensors: tuple[Tensor, ...]
    n_kv: int
    alignment: int
    data: int
    values: Mapping[str, Value] = field(default_factory=dict)


class Reader:
    """Reads forward through *stream* of *size* bytes in chunks; asks for what lies beyond the end raise Short."""

    def __init__(self, stream: BinaryIO, size: int) -> None:
        self._stream, self.size = stream, size
        self._chunk, self._at, self._start = b"", 0, 0

    @property
    def position(self) -> int:
        return self._start + self._at

    @property
    def left(self) -> int:
        return self.size - self.position

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise Short
        end = self._at + count
        if end > len(self._chunk):
            self._refill(max(count, min(CHUNK, self.left)))
            end = count
        piece = self._chunk[self._at : end]
        if len(piece) != count:
            raise Short
        self._at = end
        return piece

    def skip(self, count: int) -> None:
        if count > self.left:
            raise Short
        self._at += count
        if self._at > len(self._chunk):
            self._start += self._at
            self._chunk, self._at = b"", 0
            self._stream.seek(self._start)

    def skip_texts(self, count: int) -> None:
        """Skip *count* strings; a vocabulary has 10⁵ of them, so those within the chunk take the short way."""
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if self._at + 8 <= len(self._chunk):
                length = length_at(self._chunk, self._at)[0]
                self._at += 8
            else:
                length = self.number("<Q")
            if self._at + length <= len(self._chunk):
                self._at += length
            else:
                self.skip(length)

    def _refill(self, count: int) -> None:
        self._start += self._at
        self._at = 0
        self._stream.seek(self._start)
        self._chunk = self._stream.read(count)

    def number(self, code: str) -> int:
        return int(struct.unpack(code, self.take(struct.calcsize(code)))[0])

    def text(self, limit: int, what: str) -> str:
        length = self.number("<Q")
        if length > self.left:
            raise Short
        if length > limit:
            raise Damaged(f"{what} has {length} bytes; at most {limit} are possible")
        return self.take(length).decode("utf-8", "backslashreplace")


def read(stream: BinaryIO, size: int, version: int) -> Header:
    """The header behind magic and version of a little-endian GGUF v2 or v3. Raises Short or Damaged."""
    reader = Reader(stream, size)
    reader.skip(8)
    n_tensors, n_kv = reader.number("<Q"), reader.number("<Q")
    if n_tensors > MOST_TENSORS or n_kv > MOST_PAIRS:
        raise Damaged(f"it claims {n_tensors} tensors and {n_kv} metadata entries")
    values = _pairs(reader, n_kv)
    alignment = _alignment(values)
    tensors = tuple(_tensors(reader, n_tensors))
    data = reader.position + (-reader.position % alignment if tensors else 0)
    _check_offsets(tensors, alignment)
    return Header(version, tensors, n_kv, alignment, data, values)


def _pairs(reader: Reader, count: int) -> dict[str, Value]:
    values: dict[str, Value] = {}
    seen: set[str] = set()
    for number in range(count):
        key = reader.text(KEY_BYTES, f"metadata key {number}")
        if not key or key in seen:
            raise Damaged(f"metadata key {number} is {'there twice' if key else 'empty'}")
        seen.add(key)
        kind = reader.number("<I")
        value = _value(reader, kind, key)
        if key == "general.alignment" and kind != UINT32:
            raise Damaged("general.alignment has the wrong type")
        if value is not None:
            values[key] = value
    return values


def _value(reader: Reader, kind: int, key: str) -> Value | None:
    """A scalar or short text; None for arrays and long texts, which are skipped."""
    if kind == ARRAY:
        _skip_array(reader, key)
        return None
    if kind == STRING:
        return _short_text(reader)
    code = SCALARS.get(kind)
    if code is None:
        raise Damaged(f"metadata key {key[:80]} has the unknown type {kind}")
    value: int | float = struct.unpack(code, reader.take(struct.calcsize(code)))[0]
    return bool(value) if kind == BOOL else value


def _short_text(reader: Reader) -> str | None:
    length = reader.number("<Q")
    if length > TEXT_BYTES:
        reader.skip(length)
        return None
    return reader.take(length).decode("utf-8", "backslashreplace")


def _skip_array(reader: Reader, key: str) -> None:
    kind, count = reader.number("<I"), reader.number("<Q")
    if kind == STRING:
        if count > MOST_STRINGS:
            raise Damaged(f"metadata key {key[:80]} claims {count} strings")
        if count * 8 > reader.left:
            raise Short
        reader.skip_texts(count)
    elif kind in SCALARS:
        reader.skip(count * struct.calcsize(SCALARS[kind]))
    else:
        raise Damaged(f"metadata key {key[:80]} is an array of the unknown type {kind}")


def _alignment(values: Mapping[str, Value]) -> int:
    alignment = int(values.get("general.alignment", DEFAULT_ALIGNMENT))
    if alignment <= 0 or alignment & (alignment - 1):
        raise Damaged(f"general.alignment is {alignment}, which is not a power of two")
    return alignment


def _tensors(reader: Reader, count: int) -> list[Tensor]:
    tensors: list[Tensor] = []
    seen: set[str] = set()
    for number in range(count):
        name = reader.text(NAME_BYTES, f"the name of tensor {number}")
        if name in seen:
            raise Damaged(f"tensor {name} is there twice")
        seen.add(name)
        dims = reader.number("<I")
        if dims > 4:
            raise Damaged(f"tensor {name} claims {dims} dimensions")
        shape = struct.unpack(f"<{dims}q", reader.take(8 * dims))
        kind, offset = reader.number("<I"), reader.number("<Q")
        tensors.append(Tensor(name, kind, shape, offset, _size(name, kind, shape)))
    return tensors


def _size(name: str, kind: int, shape: tuple[int, ...]) -> int | None:
    """Bytes of a tensor, without padding."""
    elements = 1
    for length in shape:
        elements *= length
        if length < 0 or elements >= 1 << 63:
            raise Damaged(f"tensor {name} has the impossible shape {shape}")
    known = TYPES.get(kind)
    if known is None:
        return None
    if (shape[0] if shape else 1) % known.block:
        raise Damaged(f"tensor {name}: {known.name} rows are multiples of {known.block} elements, not {shape[0]}")
    return elements // known.block * known.size


def _check_offsets(tensors: tuple[Tensor, ...], alignment: int) -> None:
    """The engine wants tensors back to back; behind one of unknown size, only the order can be checked."""
    expected: int | None = 0
    last = -1
    for tensor in tensors:
        wrong = tensor.offset < last or tensor.offset % alignment or tensor.offset >= 1 << 63
        if wrong or (expected is not None and tensor.offset != expected):
            raise Damaged(f"tensor {tensor.name} starts at {tensor.offset}, where it cannot be")
        last = tensor.offset
        expected = None if tensor.size is None else tensor.offset + tensor.size + -tensor.size % alignment
