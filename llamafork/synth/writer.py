"""Write a model file: the header with gguf-py, then the weights piece by piece; it gets its name when complete."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llamafork.errors import EnvironmentFault, LlamaforkError, disk_full
from llamafork.paths import atomic, show
from llamafork.synth import layouts, tokenizer, weights
from llamafork.synth.layouts import ALLOWED, LAYOUTS, Role, Shape, Tensor
from llamafork.synth.spec import QUANTS, ModelSpec, validate

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
class ModelSummary:
    path: Path
    spec: ModelSpec
    bytes: int
    sha256: str
    params: int
    active_params: int  # used for one token: all but the experts that it does not choose
    parts: tuple[Part, ...]


def write_model(
    spec: ModelSpec, path: Path, progress: Callable[[int, int], None] = lambda done, total: None
) -> ModelSummary:
    """Write *spec* to *path*, replacing what is there only when complete. The same spec gives the same bytes.

    *progress* is called with bytes written and bytes in all. Raises UsageError for an impossible spec and
    EnvironmentFault when the disk is too small.
    """
    validate(spec)
    plan = layouts.tensors(spec)
    _ensure_space(path, sum(_padded(one.bytes) for one in plan))
    vocabulary = tokenizer.build(spec.vocab)
    try:
        with atomic(path) as temporary:
            _write_header(spec, plan, vocabulary, temporary)
            digest = _append_weights(spec, plan, vocabulary.scale, temporary, progress)
            size = temporary.stat().st_size
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise disk_full(show(path), error) from error
        raise
    return _summary(spec, plan, path, size, digest)


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


def _write_header(spec: ModelSpec, plan: Sequence[Tensor], vocabulary: tokenizer.Vocabulary, path: Path) -> None:
    from gguf import GGUFWriter

    expected = layouts.shapes(spec)
    with contextlib.closing(GGUFWriter(path, spec.arch)) as writer:
        _add_metadata(writer, spec)
        _add_tokenizer(writer, vocabulary)
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
    for key, value in LAYOUTS[spec.arch].metadata(spec).items():
        if isinstance(value, float):
            writer.add_float32(f"{spec.arch}.{key}", value)
        else:
            writer.add_uint32(f"{spec.arch}.{key}", value)


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
    kind = weights.ggml_type(tensor.type)
    writer.add_tensor_info(tensor.name, tensor.shape[::-1], np.dtype(np.float32), tensor.bytes, raw_dtype=kind)


def _append_weights(
    spec: ModelSpec, plan: Sequence[Tensor], scale: Sequence[float], path: Path, progress: Callable[[int, int], None]
) -> str:
    """Append every tensor's data to the header in *path*; return the SHA-256 of the whole file."""
    digest = hashlib.sha256(path.read_bytes())
    done, total = 0, sum(one.bytes for one in plan)
    with path.open("ab") as out:
        for piece in _pieces(spec, plan, scale, out.tell()):
            out.write(piece)
            digest.update(piece)
            done += len(piece)
            progress(min(done, total), total)
    return digest.hexdigest()


def _pieces(spec: ModelSpec, plan: Sequence[Tensor], scale: Sequence[float], at: int) -> Iterator[bytes]:
    yield bytes(_padded(at) - at)
    for tensor in plan:
        size = 0
        for piece in weights.stream(tensor, spec.seed, scale):
            size += len(piece)
            yield piece
        if size != tensor.bytes:
            raise LlamaforkError(f"{tensor.name} became {size} bytes", why=f"its header says {tensor.bytes}")
        yield bytes(_padded(size) - size)


def _summary(spec: ModelSpec, plan: Sequence[Tensor], path: Path, size: int, digest: str) -> ModelSummary:
    parts = [_part(role, [one for one in plan if one.role is role]) for role in Role]
    params = sum(part.params for part in parts)
    experts = sum(part.params for part in parts if part.role is Role.EXPERT)
    active = params - experts + experts // spec.n_expert * spec.n_expert_used
    return ModelSummary(path, spec, size, digest, params, active, tuple(part for part in parts if part.tensors))


def _part(role: Role, members: Sequence[Tensor]) -> Part:
    kinds = "/".join(dict.fromkeys(one.type for one in members))
    return Part(role, kinds, len(members), sum(one.params for one in members), sum(one.bytes for one in members))
