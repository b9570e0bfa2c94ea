"""Is this file a model that can be loaded? Asked before launch, so that the answer can be a sentence."""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from llamafork.errors import ModelError
from llamafork.facts import gguf_header
from llamafork.facts.gguf_header import Damaged, Header, Short, Tensor, Value
from llamafork.paths import show

MAGIC = b"GGUF"
NEWEST = 3
NEWEST_PLAUSIBLE = 255
OLD = {name: name.decode() for name in (b"ggml", b"ggmf", b"ggjt", b"ggla")}
OLD |= {name[::-1]: text for name, text in OLD.items()}
SHARD = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$", re.DOTALL)
CONVERT = "convert the original model again with this llama.cpp (convert_hf_to_gguf.py), or download a current GGUF"
AGAIN = "download it again, or resume the download"


@dataclass(frozen=True)
class GgufFile:
    """Facts of one GGUF file; sizes in bytes. ``expected_size`` is what the tensor table needs at least."""

    path: Path
    version: int
    size: int
    n_tensors: int = 0
    n_kv: int = 0
    architecture: str = ""
    name: str = ""
    expert_count: int = 0
    split_no: int = 0
    split_count: int = 0
    expected_size: int = 0
    data_offset: int = 0
    tensors: tuple[Tensor, ...] = field(default=(), repr=False)
    values: Mapping[str, Value] = field(default_factory=dict, repr=False)
    warnings: tuple[str, ...] = ()


def inspect(path: Path | str) -> GgufFile:
    """Read the header of one GGUF file and compare it with the file's size. Raises :class:`ModelError`."""
    path = Path(path)
    size = _size(path)
    try:
        with path.open("rb") as stream:
            head = stream.read(4096)
            version = _version(path, head, size)
            if version > NEWEST:
                note = f"{show(path)} is GGUF version {version}, newer than the {NEWEST} known here; it is not checked"
                return GgufFile(path, version, size, warnings=(note,))
            return _facts(path, size, _header(path, stream, size, version))
    except OSError as error:
        raise ModelError(f"cannot read the model {show(path)}", why=error.strerror or str(error)) from error


def check_model(path: Path | str) -> tuple[GgufFile, ...]:
    """Inspect a model with all its shards, in order; any shard may be given. Raises :class:`ModelError`."""
    path = Path(path)
    given = inspect(path)
    if given.split_count <= 1:
        return (given,)
    named = SHARD.match(path.name)
    if named is None or int(named["count"]) != given.split_count:
        raise ModelError(
            f"{show(path)} is part {given.split_no + 1} of {given.split_count}, but its name does not say so",
            why="the other parts are found by name",
            do=f"name the parts NAME-00001-of-{given.split_count:05d}.gguf and so on",
        )
    paths = [
        path.with_name(f"{named['stem']}-{number:05d}-of-{given.split_count:05d}.gguf")
        for number in range(1, given.split_count + 1)
    ]
    _all_there(paths)
    return tuple(_shard(part, number, given.split_count) for number, part in enumerate(paths))


def _all_there(paths: list[Path]) -> None:
    missing = [show(part.name) for part in paths if not part.exists()]
    if missing:
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        raise ModelError(
            f"the model has {len(paths)} parts and {len(missing)} of them are missing",
            why=f"not in {show(paths[0].parent)}: {', '.join(missing[:10])}{more}",
            do="download the missing parts into the same folder",
        )


def _shard(path: Path, number: int, count: int) -> GgufFile:
    part = inspect(path)
    if (part.split_no, part.split_count) != (number, count):
        raise ModelError(
            f"{show(path)} does not belong to the other parts",
            why=f"it is part {part.split_no + 1} of {part.split_count} by content and {number + 1} of {count} by name",
            do="download this part again",
        )
    return part


def _size(path: Path) -> int:
    try:
        found = path.stat()
    except FileNotFoundError as error:
        raise _missing(path) from error
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        do = "check its name and who may read it"
        raise ModelError(f"cannot read the model {show(path)}", why=why, do=do) from error
    if stat.S_ISDIR(found.st_mode):
        raise ModelError(f"the model {show(path)} is a folder", do="name the .gguf file in it (its first part)")
    if not stat.S_ISREG(found.st_mode):
        raise ModelError(f"the model {show(path)} is not a regular file", do="name a .gguf file")
    if found.st_size == 0:
        raise ModelError(f"the model {show(path)} is empty", why="the download did not start or failed", do=AGAIN)
    return found.st_size


def _missing(path: Path) -> ModelError:
    if path.is_symlink():
        target = show(path.readlink())
        return ModelError(f"the model {show(path)} is a link to {target}, which is gone", do=AGAIN)
    return ModelError(
        f"there is no model {show(path)}",
        why="no such file",
        do="check the name and the folder; `llamafork serve` without arguments lists the models found here",
    )


def _version(path: Path, head: bytes, size: int) -> int:
    """The version of a little-endian GGUF this program may read, or the reason why not."""
    if head[:4] != MAGIC:
        raise _not_gguf(path, head, size)
    if len(head) < 8:
        raise _cut(path, size)
    little, big = int.from_bytes(head[4:8], "little"), int.from_bytes(head[4:8], "big")
    if little & 0xFFFF == 0 and little:
        raise ModelError(
            f"{show(path)} is a big-endian GGUF (version {big})",
            why="it was made for another kind of machine",
            do="convert it with gguf-convert-endian (Python package gguf) or download the usual little-endian file",
        )
    if little == 1:
        raise ModelError(f"{show(path)} is GGUF version 1, which llama.cpp no longer reads", do=CONVERT)
    if little == 0 or little > NEWEST_PLAUSIBLE:
        raise ModelError(f"{show(path)} is damaged", why=f"it claims to be GGUF version {little}", do=AGAIN)
    return little


def _not_gguf(path: Path, head: bytes, size: int) -> ModelError:
    old = OLD.get(head[:4])
    if old:
        return ModelError(f"{show(path)} is in the old format {old}, which llama.cpp no longer reads", do=CONVERT)
    kind, do = _kind(head, size)
    return ModelError(f"{show(path)} is not a GGUF model: {kind}", do=do)


def _kind(head: bytes, size: int) -> tuple[str, str]:
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if head.startswith(b"version https://git-lfs"):
        named = re.search(rb"^size (\d{1,20})$", head, re.MULTILINE)
        real = f" for a file of {int(named[1])} bytes" if named else ""
        return f"a git-LFS pointer ({size} bytes){real}", "fetch the real file: git lfs pull"
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        return "a web page", "download the file itself, not the page about it (a login may be needed)"
    if head.startswith(b"PK\x03\x04"):
        return "a zip archive (a PyTorch checkpoint, or still packed)", f"unpack it, or {CONVERT}"
    if head[8:10] == b'{"':
        return "a safetensors file", CONVERT
    if not head.strip(b"\0"):
        return "it begins with zeros only", AGAIN
    return f"it begins with {show(head[:4].decode('ascii', 'backslashreplace'))!r}", "name a .gguf file"


def _cut(path: Path, size: int) -> ModelError:
    return ModelError(
        f"{show(path)} is cut off inside its header",
        why=f"the file has {size} bytes and its header is longer than that, or damaged",
        do=AGAIN,
    )


def _header(path: Path, stream: BinaryIO, size: int, version: int) -> Header:
    try:
        return gguf_header.read(stream, size, version)
    except Short as error:
        raise _cut(path, size) from error
    except Damaged as error:
        raise ModelError(f"the header of {show(path)} is damaged", why=str(error), do=AGAIN) from error


def _facts(path: Path, size: int, header: Header) -> GgufFile:
    expected = _check_data(path, size, header)
    values = header.values
    architecture = str(values.get("general.architecture", ""))
    return GgufFile(
        path,
        header.version,
        size,
        n_tensors=len(header.tensors),
        n_kv=header.n_kv,
        architecture=architecture,
        name=str(values.get("general.name", "")),
        expert_count=_integer(values, f"{architecture}.expert_count"),
        split_no=_integer(values, "split.no"),
        split_count=_integer(values, "split.count"),
        expected_size=expected,
        data_offset=header.data,
        tensors=header.tensors,
        values=values,
        warnings=_warnings(path, size, expected, header),
    )


def _integer(values: Mapping[str, Value], key: str) -> int:
    value = values.get(key, 0)
    return value if isinstance(value, int) and 0 <= value < 1 << 16 else 0


def _end(header: Header, tensor: Tensor) -> int:
    """Where a tensor's data ends in the file; of an unknown type, at least one byte is there."""
    return header.data + tensor.offset + (1 if tensor.size is None else tensor.size)


def _check_data(path: Path, size: int, header: Header) -> int:
    expected = max((_end(header, tensor) for tensor in header.tensors), default=0)
    if expected <= size:
        return expected
    first = next(tensor for tensor in header.tensors if _end(header, tensor) > size)
    raise ModelError(
        f"{show(path)} is incomplete: {size} of at least {expected} bytes",
        why=f"{expected - size} bytes are missing; the first tensor affected is {first.name}",
        do=AGAIN,
    )


def _warnings(path: Path, size: int, expected: int, header: Header) -> tuple[str, ...]:
    notes = []
    unknown = sorted({tensor.type for tensor in header.tensors if tensor.size is None})
    if unknown:
        numbers = ", ".join(map(str, unknown))
        notes.append(f"{show(path)} has tensors of unknown type {numbers}; the end of the file is unchecked")
    extra = size - (expected + -(expected - header.data) % header.alignment)
    if header.tensors and header.tensors[-1].size is not None and extra > 0:
        notes.append(f"{show(path)} has {extra} bytes behind its last tensor; they are ignored")
    return tuple(notes)
