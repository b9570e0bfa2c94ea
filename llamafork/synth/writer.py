"""Write a model file: the header with gguf-py, then the weights piece by piece; it gets its name when complete."""

from __future__ import annotations

import contextlib
import errno
import filecmp
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llamafork.errors import EnvironmentFault, LlamaforkError, UsageError, disk_full
from llamafork.paths import atomic, show
from llamafork.synth import bench, layouts, splits, tokenizer, weights
from llamafork.synth.quants import QUANTS
from llamafork.synth.spec import ModelSpec, validate
from llamafork.synth.table import ALLOWED, U64, Role, Shape, Tensor

if TYPE_CHECKING:
    from gguf import GGUFWriter

ALIGNMENT = 32  # GGUF's default, of every tensor's data
HEADER_ROOM = 1 << 26  # more than the header of the largest vocabulary takes


@dataclass(frozen=True)
class Part:
    """All tensors of one role."""

    role: Role
    type: str
    tensors: int
    params: int
    bytes: int


@dataclass(frozen=True)
class FileMade:
    path: Path
    bytes: int
    sha256: str
    tensors: int


@dataclass(frozen=True)
class ModelSummary:
    spec: ModelSpec
    params: int
    active_params: int  # used for one token: all but the experts that it does not choose, and the MTP block
    parts: tuple[Part, ...]
    files: tuple[FileMade, ...]

    @property
    def path(self) -> Path:
        """The file to give to a program: the first one of a split model."""
        return self.files[0].path

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.files)

    @property
    def sha256(self) -> str:
        """Of the first file."""
        return self.files[0].sha256


Progress = Callable[[int, int], None]


def write_model(
    spec: ModelSpec,
    path: Path,
    progress: Progress = lambda done, total: None,
    *,
    split: int = 1,
    force: bool = True,
) -> ModelSummary:
    """Write *spec* to *path*, or as *split* files beside it, replacing what is there only when complete.

    The same spec gives the same bytes. *progress* is called with bytes written and bytes in all. Raises UsageError
    for an impossible spec, or without *force* when a file of another content is there, and EnvironmentFault when the
    disk is too small.
    """
    validate(spec)
    plan = layouts.tensors(spec)
    groups = splits.groups(plan, split)
    paths = splits.paths(path, split)
    _ensure_space(path, sum(_padded(one.bytes) for one in plan))
    vocabulary = tokenizer.build(spec.vocab)
    track = _Tracked(progress, sum(one.bytes for one in plan))
    files: list[FileMade] = []
    try:
        with contextlib.ExitStack() as stack:
            # Left in reverse: the first file, without which nothing can be loaded, gets its name last.
            temporary = [stack.enter_context(atomic(one)) for one in paths]
            for number, group in enumerate(groups):
                at = temporary[number]
                _write_header(spec, group, vocabulary, at, splits.Place(number, split, len(plan)))
                digest = _append_weights(spec, group, vocabulary.scale, at, track)
                if not force and paths[number].exists() and not filecmp.cmp(at, paths[number], shallow=False):
                    raise UsageError(
                        f"{show(paths[number])} exists", do="add --force to replace it, or name another OUT"
                    )
                files.append(FileMade(paths[number], at.stat().st_size, digest, len(group)))
            if split > 1:
                paths[0].unlink(missing_ok=True)  # stopped half-way it must not load with parts of another model
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise disk_full(show(path), error) from error
        raise
    return _summary(spec, plan, tuple(files))


class _Tracked:
    """Counts over all files of a model."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total, self._done = progress, total, 0

    def add(self, size: int) -> None:
        self._done += size
        self._progress(min(self._done, self._total), self._total)


def _ensure_space(path: Path, weights_size: int) -> None:
    at = next(folder for folder in path.absolute().parents if folder.exists())
    free = shutil.disk_usage(at).free
    if weights_size + HEADER_ROOM > free:
        raise EnvironmentFault(
            f"the model takes {_gb(weights_size + HEADER_ROOM)} while written, but {show(at)} has {_gb(free)} free",
            do="make it smaller (--layers, --experts, --ff, --embd, --type), free some space, or name another OUT",
        )


def _gb(size: int) -> str:
    return f"{size / 1e9:,.2f} GB"


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _write_header(
    spec: ModelSpec, plan: Sequence[Tensor], vocabulary: tokenizer.Vocabulary, path: Path, place: splits.Place
) -> None:
    from gguf import GGUFWriter

    expected = layouts.shapes(spec)
    with contextlib.closing(GGUFWriter(path, spec.arch)) as writer:
        if place.number == 0:
            _add_metadata(writer, spec)
            _add_tokenizer(writer, vocabulary)
        else:
            writer.kv_data[0].clear()  # upstream's llama-gguf-split leaves the later parts without even this
        splits.add_keys(writer, place)
        for tensor in plan:
            add_tensor(writer, tensor, expected)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()


def _add_metadata(writer: GGUFWriter, spec: ModelSpec) -> None:
    writer.add_type("model")
    writer.add_name(spec.title)
    writer.add_description(f"random weights, seed {spec.seed}, made by llamafork make-model")
    writer.add_file_type(QUANTS[spec.quant].file_type)
    writer.add_quantization_version(2)
    for key, value in layouts.layout(spec).metadata(spec).items():
        _add_value(writer, f"{spec.arch}.{key}", value)


def _add_value(writer: GGUFWriter, key: str, value: bool | int | float | Sequence[int] | U64) -> None:
    from gguf import GGUFValueType

    if isinstance(value, U64):
        writer.add_key_value(key, list(value.values), GGUFValueType.ARRAY, sub_type=GGUFValueType.UINT64)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_array(key, list(value))


def _add_tokenizer(writer: GGUFWriter, vocabulary: tokenizer.Vocabulary) -> None:
    writer.add_tokenizer_model(tokenizer.MODEL)
    writer.add_tokenizer_pre(tokenizer.PRE)
    writer.add_token_list(vocabulary.tokens)
    writer.add_token_types(vocabulary.types)
    writer.add_token_merges(vocabulary.merges)
    writer.add_bos_token_id(vocabulary.id_of(tokenizer.END))
    writer.add_eos_token_id(vocabulary.id_of(tokenizer.STOP))
    writer.add_eot_token_id(vocabulary.id_of(tokenizer.STOP))
    writer.add_pad_token_id(vocabulary.id_of(tokenizer.END))
    writer.add_add_bos_token(False)
    writer.add_chat_template(tokenizer.CHAT_TEMPLATE)


def add_tensor(writer: GGUFWriter, tensor: Tensor, expected: Mapping[str, Shape]) -> None:
    """The only way for a tensor into a file: its type must suit its role and its shape the architecture's table."""
    import numpy as np

    if tensor.type not in ALLOWED[tensor.role]:
        raise LlamaforkError(
            f"refusing to write {tensor.name} as {tensor.type}",
            why=f"upstream computes {tensor.role} only in {', '.join(sorted(ALLOWED[tensor.role]))}",
        )
    if expected.get(tensor.name) != tensor.shape:
        raise LlamaforkError(
            f"refusing to write {tensor.name} with shape {tensor.shape}",
            why=f"the architecture's table says {expected.get(tensor.name, 'that there is no such tensor')}",
        )
    kind = weights.ggml_id(tensor.type)
    writer.add_tensor_info(tensor.name, tensor.shape[::-1], np.dtype(np.float32), tensor.bytes, raw_dtype=kind)


def _append_weights(
    spec: ModelSpec, plan: Sequence[Tensor], scale: Sequence[float], path: Path, track: _Tracked
) -> str:
    """Append every tensor's data to the header in *path*; return the SHA-256 of the whole file."""
    digest = hashlib.sha256(path.read_bytes())
    with path.open("ab") as out:
        for piece in _pieces(spec, plan, scale, out.tell()):
            out.write(piece)
            digest.update(piece)
            track.add(len(piece))
    return digest.hexdigest()


def _pieces(spec: ModelSpec, plan: Sequence[Tensor], scale: Sequence[float], at: int) -> Iterator[bytes]:
    yield bytes(_padded(at) - at)
    for tensor in plan:
        size = 0
        made = bench.stream(spec, tensor, scale) if spec.bench else weights.stream(tensor, spec.seed, scale)
        for piece in made:
            size += len(piece)
            yield piece
        if size != tensor.bytes:
            raise LlamaforkError(f"{tensor.name} became {size} bytes", why=f"its header says {tensor.bytes}")
        yield bytes(_padded(size) - size)


def _summary(spec: ModelSpec, plan: Sequence[Tensor], files: tuple[FileMade, ...]) -> ModelSummary:
    parts = [_part(role, [one for one in plan if one.role is role]) for role in Role]
    params = sum(part.params for part in parts)
    block = f"blk.{spec.n_layer}."
    aside = sum(one.params for one in plan if one.name.startswith(block))
    experts = sum(one.params for one in plan if one.role is Role.EXPERT and not one.name.startswith(block))
    active = params - aside - experts + experts // spec.n_expert * spec.n_expert_used
    return ModelSummary(spec, params, active, tuple(part for part in parts if part.tensors), files)


def _part(role: Role, members: Sequence[Tensor]) -> Part:
    kinds = "/".join(dict.fromkeys(one.type for one in members))
    return Part(role, kinds, len(members), sum(one.params for one in members), sum(one.bytes for one in members))
