"""What is written is what was asked for: read back with gguf's reader, twice the same, whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import shutil
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamafork.errors import EnvironmentFault, LlamaforkError, UsageError
from llamafork.synth import layouts, tokenizer, weights
from llamafork.synth.quants import CODES, QUANTS, fitting
from llamafork.synth.spec import ModelSpec
from llamafork.synth.table import ALLOWED, GGML, Role, Tensor
from llamafork.synth.writer import add_tensor, write_model

PINNED = "072df23e6de5ccbe83e5ae3f1fd661bf"
TINY = ModelSpec(
    n_layer=2, n_embd=64, n_head=2, n_head_kv=1, head_dim=32, n_ff_exp=32, n_expert=4, n_expert_used=2, vocab=300
)

# As in load_arch_tensors of upstream's src/models/qwen3moe.cpp, for TINY.
TOP = {"token_embd.weight": (64, 300), "output_norm.weight": (64,), "output.weight": (64, 300)}
BLOCK = {
    "attn_norm.weight": (64,),
    "attn_q.weight": (64, 64),
    "attn_k.weight": (64, 32),
    "attn_v.weight": (64, 32),
    "attn_output.weight": (64, 64),
    "attn_q_norm.weight": (32,),
    "attn_k_norm.weight": (32,),
    "ffn_norm.weight": (64,),
    "ffn_gate_inp.weight": (64, 4),
    "ffn_gate_exps.weight": (64, 32, 4),
    "ffn_up_exps.weight": (64, 32, 4),
    "ffn_down_exps.weight": (32, 64, 4),
}


def read(path: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(path)


def value(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    assert field is not None, key
    return field.contents()


# gguf 0.19 has no name for Q2_0; test_models_real lets upstream read it.
READABLE = sorted(name for name in QUANTS if name in gguf.GGMLQuantizationType.__members__)


def weights_of(reader: gguf.GGUFReader, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    tensor = next(one for one in reader.tensors if one.name == name)
    return dequantize(tensor.data, tensor.tensor_type)


@pytest.mark.parametrize("quant", READABLE)
def test_every_tensor_has_the_shape_and_type_upstream_wants(quant: str, tmp_path: Path) -> None:
    made = write_model(replace(TINY, quant=quant), tmp_path / "m.gguf")
    reader = read(made.path)
    expected = TOP | {f"blk.{i}.{name}": shape for i in range(2) for name, shape in BLOCK.items()}
    assert {one.name: tuple(int(n) for n in one.shape) for one in reader.tensors} == expected
    roles = {one.name: one.role for one in layouts.tensors(TINY)}
    for one in reader.tensors:
        wide = "norm" in one.name or "gate_inp" in one.name
        wanted = "F32" if wide else QUANTS[quant].of(roles[one.name])
        wanted = fitting(wanted, int(one.shape[0]), floats=False)
        assert one.tensor_type.name == wanted, one.name
        assert np.isfinite(dequantize(one.data, one.tensor_type)).all()
    assert made.params == sum(int(one.n_elements) for one in reader.tensors)
    assert sum(part.bytes for part in made.parts) == sum(int(one.n_bytes) for one in reader.tensors)


def test_metadata(tmp_path: Path) -> None:
    reader = read(write_model(TINY, tmp_path / "m.gguf").path)
    assert value(reader, "general.architecture") == "qwen3moe"
    assert value(reader, "general.file_type") == gguf.LlamaFileType.MOSTLY_Q8_0
    assert value(reader, "qwen3moe.block_count") == 2
    assert value(reader, "qwen3moe.expert_count") == 4
    assert value(reader, "qwen3moe.expert_used_count") == 2
    assert value(reader, "qwen3moe.expert_feed_forward_length") == 32
    assert value(reader, "qwen3moe.attention.key_length") == 32
    assert value(reader, "qwen3moe.context_length") == 4096
    field = reader.get_field("qwen3moe.block_count")
    assert field is not None
    assert field.types == [gguf.GGUFValueType.UINT32]


def test_tokenizer_in_the_file(tmp_path: Path) -> None:
    reader = read(write_model(TINY, tmp_path / "m.gguf").path)
    tokens = value(reader, "tokenizer.ggml.tokens")
    assert len(tokens) == TINY.vocab
    assert tokens[value(reader, "tokenizer.ggml.eos_token_id")] == tokenizer.STOP
    assert tokens[value(reader, "tokenizer.ggml.eot_token_id")] == tokenizer.STOP
    assert value(reader, "tokenizer.chat_template") == tokenizer.CHAT_TEMPLATE
    assert value(reader, "tokenizer.ggml.merges")


def test_same_spec_same_bytes_other_seed_other_bytes(tmp_path: Path) -> None:
    one, two = write_model(TINY, tmp_path / "1.gguf"), write_model(TINY, tmp_path / "2.gguf")
    other = write_model(replace(TINY, seed=1, name=TINY.title), tmp_path / "3.gguf")
    assert one.path.read_bytes() == two.path.read_bytes()
    assert one.sha256 == hashlib.sha256(one.path.read_bytes()).hexdigest()
    assert one.bytes == one.path.stat().st_size
    assert one.sha256 != other.sha256
    assert not np.array_equal(
        weights_of(read(one.path), "output.weight"), weights_of(read(other.path), "output.weight")
    )


def test_weights_are_pinned() -> None:
    """Numbers from PCG64's raw stream: another numpy or machine must give the same."""
    tensor = Tensor("token_embd.weight", (4, 1), Role.EMBED, "F32", 0.0, 1.0)
    piece = b"".join(weights.stream(tensor, 0, []))
    assert piece.hex() == PINNED


def test_piece_size_does_not_change_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = layouts.tensors(TINY)[-1]
    scale = tokenizer.build(TINY.vocab).scale
    whole = b"".join(weights.stream(tensor, 0, scale))
    monkeypatch.setattr(weights, "CHUNK", 7 * 64)
    assert b"".join(weights.stream(tensor, 0, scale)) == whole


def test_all_types_that_are_quantised_hold_the_same_weights(tmp_path: Path) -> None:
    exact = weights_of(read(write_model(replace(TINY, quant="F32"), tmp_path / "F32").path), "blk.1.ffn_up_exps.weight")
    for quant in set(QUANTS) - set(CODES):
        path = write_model(replace(TINY, quant=quant), tmp_path / quant).path
        error = weights_of(read(path), "blk.1.ffn_up_exps.weight") - exact
        assert float(np.std(error) / np.std(exact)) < 0.2, quant


def test_weights_are_near_normal() -> None:
    values = weights.normal(np.random.PCG64(1), 200_000, 0.5, 0.25)
    assert values.dtype == np.float32
    assert abs(float(values.mean()) - 0.5) < 0.005
    assert abs(float(values.std()) - 0.25) < 0.005


def test_tokens_choose_different_experts(tmp_path: Path) -> None:
    """The first router, fed with the bare embeddings."""
    reader = read(write_model(ModelSpec(quant="F32"), tmp_path / "m.gguf").path)
    embedded = weights_of(reader, "token_embd.weight")
    rms = np.sqrt((embedded**2).mean(axis=1, keepdims=True))
    normed = embedded / rms * weights_of(reader, "blk.0.ffn_norm.weight")
    logits = normed @ weights_of(reader, "blk.0.ffn_gate_inp.weight").T
    chosen = np.sort(np.argsort(-logits, axis=1)[:, :4], axis=1)
    assert len(np.unique(chosen, axis=0)) > 300
    counts = np.bincount(chosen.ravel(), minlength=16)
    assert counts.min() > counts.mean() / 2
    assert counts.max() < counts.mean() * 2


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    quant = draw(st.sampled_from(READABLE))
    block = 32 if QUANTS[quant].experts not in ("F32", "F16", "BF16") else 2
    kv = draw(st.integers(1, 2))
    experts = draw(st.integers(1, 5))
    return ModelSpec(
        n_layer=draw(st.integers(1, 3)),
        n_embd=block * draw(st.integers(1, 3)),
        n_head=kv * draw(st.integers(1, 2)),
        n_head_kv=kv,
        head_dim=block * draw(st.integers(1, 2)),
        n_ff_exp=block * draw(st.integers(1, 3)),
        n_expert=experts,
        n_expert_used=draw(st.integers(1, experts)),
        vocab=draw(st.integers(tokenizer.MIN_VOCAB, 400)),
        quant=quant,
        seed=draw(st.integers(0, 2**63 - 1)),
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(specs())
def test_any_valid_spec_gives_only_types_upstream_can_multiply(tmp_path: Path, spec: ModelSpec) -> None:
    reader = read(write_model(spec, tmp_path / "m.gguf").path)
    shapes = layouts.shapes(spec)
    roles = {one.name: one.role for one in layouts.tensors(spec)}
    for one in reader.tensors:
        assert one.tensor_type.name in ALLOWED[roles[one.name]]
        assert tuple(int(n) for n in one.shape) == shapes[one.name]
        assert one.n_bytes == one.n_elements // GGML[one.tensor_type.name].block * GGML[one.tensor_type.name].size
    end = max(int(one.data_offset) + -(-int(one.n_bytes) // 32) * 32 for one in reader.tensors)
    assert end == (tmp_path / "m.gguf").stat().st_size


class Recorder:
    def __init__(self) -> None:
        self.added: list[str] = []

    def add_tensor_info(self, name: str, *_: object, **__: object) -> None:
        self.added.append(name)


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("kind", ["F64", "I8", "I16", "I32", "I64", "Q8_1", "Q8_K"])
def test_the_guard_refuses_types(role: Role, kind: str) -> None:
    recorder: Any = Recorder()
    with pytest.raises(LlamaforkError, match=f"refusing to write x as {kind}"):
        add_tensor(recorder, Tensor("x", (32,), role, kind, 0.0, 1.0), {"x": (32,)})
    assert recorder.added == []


@pytest.mark.parametrize("role", [Role.NORM, Role.ROUTER])
def test_the_guard_keeps_norms_and_router_in_f32(role: Role) -> None:
    recorder: Any = Recorder()
    for kind in sorted({one.name for one in Type if one.name in GGML} - {"F32"}):
        with pytest.raises(LlamaforkError):
            add_tensor(recorder, Tensor("x", (256,), role, kind, 0.0, 1.0), {"x": (256,)})
    assert recorder.added == []


@pytest.mark.parametrize("table", [{}, {"x": (64,)}, {"x": (32, 1)}])
def test_the_guard_refuses_shapes(table: dict[str, tuple[int, ...]]) -> None:
    recorder: Any = Recorder()
    with pytest.raises(LlamaforkError, match="with shape"):
        add_tensor(recorder, Tensor("x", (32,), Role.NORM, "F32", 1.0, 0.1), table)
    assert recorder.added == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), MemoryError()])
@pytest.mark.parametrize("before", [None, b"old"])
def test_an_interrupted_write_leaves_what_was_there(
    error: BaseException, before: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "m.gguf"
    if before is not None:
        target.write_bytes(before)
    whole = weights.stream

    def breaks(tensor: Tensor, seed: int, scale: Any) -> Iterator[bytes]:
        if tensor.name == "blk.1.attn_q.weight":
            raise error
        yield from whole(tensor, seed, scale)

    monkeypatch.setattr(weights, "stream", breaks)
    with pytest.raises(type(error)):
        write_model(TINY, target)
    assert [one.name for one in tmp_path.iterdir()] == ([] if before is None else ["m.gguf"])
    assert before is None or target.read_bytes() == before


def test_a_full_disk_is_an_environment_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Iterator[bytes]:
        raise OSError(errno.ENOSPC, "No space left on device")
        yield b""

    monkeypatch.setattr(weights, "stream", full)
    with pytest.raises(EnvironmentFault, match="no space left"):
        write_model(TINY, tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def test_more_than_the_disk_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    huge = replace(TINY, n_layer=512, n_embd=65_536, n_ff_exp=262_144, n_expert=1024)
    with pytest.raises(EnvironmentFault, match="GB"):
        write_model(huge, tmp_path / "new" / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def test_room_is_looked_for_where_the_file_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def usage(at: Path) -> SimpleNamespace:
        asked.append(at)
        return SimpleNamespace(free=0)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(EnvironmentFault):
        write_model(TINY, tmp_path / "a" / "b" / "m.gguf")
    assert asked == [tmp_path]


def test_an_invalid_spec_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        write_model(replace(TINY, n_expert_used=5), tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def test_memory_is_bounded_by_a_piece_not_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "CHUNK", 1 << 13)
    spec = replace(TINY, n_expert=256, quant="Q4_0")
    write_model(TINY, tmp_path / "warm.gguf")
    tracemalloc.start()
    try:
        write_model(spec, tmp_path / "m.gguf")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * 32 * 256 * 4 / 2


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_model(TINY, tmp_path / "m.gguf", lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1]
