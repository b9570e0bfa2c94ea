"""C2 and C3: a damaged, short or foreign file is a ModelError with a sentence, whatever its bytes are."""

from __future__ import annotations

import os
import re
import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamafork.errors import ModelError
from llamafork.facts import gguf_header
from llamafork.facts.ggml_types import TYPES
from llamafork.facts.gguf_file import GgufFile, check_model, inspect

U8, U16, U32, I32, F32, BOOL, STRING, ARRAY, U64 = 0, 2, 4, 5, 6, 7, 8, 9, 10
Pair = tuple[str, int, bytes]
F32_TYPE, Q4_0 = 0, 2


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def string(key: str, value: str) -> Pair:
    return key, STRING, text(value)


def number(key: str, value: int, kind: int = U32) -> Pair:
    return key, kind, struct.pack({U16: "<H", U32: "<I", U64: "<Q"}[kind], value)


PAIRS: tuple[Pair, ...] = (
    string("general.architecture", "qwen3moe"),
    string("general.name", "tiny"),
    number("qwen3moe.expert_count", 8),
    ("tokens", ARRAY, struct.pack("<IQ", STRING, 3) + text("a") + text("bb") + text("")),
    ("scores", ARRAY, struct.pack("<IQ", F32, 2) + struct.pack("<2f", 0.5, 1.0)),
    ("flag", BOOL, b"\1"),
)


def gguf(
    pairs: Sequence[Pair] = PAIRS,
    tensors: Sequence[tuple[str, int, tuple[int, ...], int]] = (("a", F32_TYPE, (3,), 12), ("b", Q4_0, (32, 4), 72)),
    *,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """A GGUF; tensors are (name, type, shape, bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs))
    head += b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in pairs)
    data = b""
    for name, kind, shape, size in tensors:
        head += text(name) + struct.pack(f"<I{len(shape)}qIQ", len(shape), *shape, kind, len(data))
        data += b"\1" * size + b"\0" * (-size % alignment)
    return head + b"\0" * (-len(head) % alignment if tensors else 0) + data


def write(folder: Path, content: bytes, name: str = "x.gguf") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        check_model(path)
    error = caught.value
    assert int(error.code) == 6
    return f"{error.what}\n{error.why}\n{error.do}"


@pytest.mark.parametrize("version", [2, 3])
def test_a_good_file(tmp_path: Path, version: int) -> None:
    content = gguf(version=version)
    (found,) = check_model(write(tmp_path, content))
    assert found == GgufFile(
        tmp_path / "x.gguf",
        version,
        len(content),
        n_tensors=2,
        n_kv=6,
        architecture="qwen3moe",
        name="tiny",
        expert_count=8,
        expected_size=len(content) - 24,
        data_offset=len(content) - 128,
        tensors=found.tensors,
        values=found.values,
    )
    assert [(t.name, t.shape, t.offset, t.size) for t in found.tensors] == [("a", (3,), 0, 12), ("b", (32, 4), 32, 72)]
    assert found.values["flag"] is True


def test_the_alignment_of_the_file_is_respected(tmp_path: Path) -> None:
    found = inspect(write(tmp_path, gguf([number("general.alignment", 256)], alignment=256)))
    assert found.data_offset % 256 == 0
    assert found.tensors[1].offset == 256


@pytest.mark.parametrize("value", [0, 3, 48])
def test_an_impossible_alignment(tmp_path: Path, value: int) -> None:
    assert "not a power of two" in refused(write(tmp_path, gguf([number("general.alignment", value)])))


def test_sizes_agree_with_the_gguf_library() -> None:
    constants = pytest.importorskip("gguf.constants")
    for kind, (block, size) in constants.GGML_QUANT_SIZES.items():
        if kind.name == "Q8_1":  # older releases of the library count its two halves as floats; ggml does not
            continue
        assert (TYPES[int(kind)].block, TYPES[int(kind)].size) == (block, size), kind


def test_a_missing_padding_at_the_end_is_fine(tmp_path: Path) -> None:
    found = inspect(write(tmp_path, gguf()[:-24]))
    assert found.size == found.expected_size
    assert found.warnings == ()


@pytest.mark.parametrize(("cut", "tensor"), [(25, "b"), (24 + 72, "b"), (24 + 72 + 21, "a")])
def test_a_short_data_section(tmp_path: Path, cut: int, tensor: str) -> None:
    content = gguf()
    said = refused(write(tmp_path, content[:-cut]))
    assert f"{len(content) - cut} of at least {len(content) - 24} bytes" in said
    assert f"first tensor affected is {tensor}" in said
    assert "resume the download" in said


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    content = gguf()
    for length in range(1, len(content) - 24, 3):
        assert "again" in refused(write(tmp_path, content[:length])) or length < 4


def test_a_huge_string_is_not_allocated(tmp_path: Path) -> None:
    huge = struct.pack("<Q", 1 << 60)
    bad_values = [
        gguf([("general.name", STRING, huge)]),
        gguf([("t", ARRAY, struct.pack("<IQ", STRING, 1 << 20) + huge)]),
        gguf([("t", ARRAY, struct.pack("<IQ", STRING, 1 << 60))]),
        gguf([("t", ARRAY, struct.pack("<IQ", F32, 1 << 60))]),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + huge,
        b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + huge,
    ]
    for content in bad_values:
        path = write(tmp_path, content)
        tracemalloc.start()
        refused(path)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
        tracemalloc.stop()


def test_a_sparse_file_of_zeros_behind_the_header_ends_quickly(tmp_path: Path) -> None:
    path = write(tmp_path, gguf([], [])[:8] + struct.pack("<QQ", 1 << 20, 1 << 20))
    os.truncate(path, 1 << 40)
    assert "empty" in refused(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gguf([string("a", "1"), string("a", "2")]), "there twice"),
        (gguf([("a", 77, b"")]), "unknown type 77"),
        (gguf([("a", ARRAY, struct.pack("<IQ", ARRAY, 1))]), "array of the unknown type"),
        (gguf([], [("a", 0, (1,), 4), ("a", 0, (1,), 4)]), "there twice"),
        (gguf([], [("a", 0, (1, 1, 1, 1, 1), 4)]), "5 dimensions"),
        (gguf([], [("a", 0, (-1,), 4)]), "impossible shape"),
        (gguf([], [("a", 0, (1 << 40, 1 << 40), 4)]), "impossible shape"),
        (gguf([], [("a", Q4_0, (33,), 18)]), "multiples of 32"),
        (gguf([], [("a", 0, (1,), 4), ("b", 0, (1,), 4)]).replace(b" " + bytes(7), b"@" + bytes(7)), "starts at 64"),
        (gguf([], [("n" * 64, 0, (1,), 4)]), "at most 63"),
        (gguf([number("general.alignment", 32, U64)]), "wrong type"),
    ],
)  # fmt: skip
def test_a_damaged_header(tmp_path: Path, content: bytes, said: str) -> None:
    assert said in refused(write(tmp_path, content))


def test_extra_bytes_are_a_warning(tmp_path: Path) -> None:
    found = inspect(write(tmp_path, gguf() + b"12345"))
    assert "has 5 bytes behind its last tensor" in found.warnings[0]


def test_a_tensor_type_from_the_future(tmp_path: Path) -> None:
    content = gguf([], [("a", 999, (5,), 40), ("b", F32_TYPE, (8,), 32)])
    found = inspect(write(tmp_path, content))
    assert found.tensors[0].size is None
    assert "unknown type 999" in found.warnings[0]
    assert "first tensor affected is b" in refused(write(tmp_path, content[:-1]))
    last = gguf([], [("a", F32_TYPE, (8,), 32), ("b", 999, (5,), 40)])
    assert inspect(write(tmp_path, last + b"1" * 500)).warnings[1:] == ()
    assert "first tensor affected is b" in refused(write(tmp_path, last[:-64]))


@pytest.mark.parametrize("magic", [b"ggml", b"ggmf", b"ggjt", b"ggla", b"lmgg", b"fmgg", b"tjgg", b"algg"])
def test_old_containers_are_named(tmp_path: Path, magic: bytes) -> None:
    said = refused(write(tmp_path, magic + b"\1\0\0\0" + b"x" * 100))
    assert re.search(r"old format gg(ml|mf|jt|la)", said)
    assert "convert the original model again" in said


def test_versions_and_byte_orders(tmp_path: Path) -> None:
    one = refused(write(tmp_path, b"GGUF" + struct.pack("<III", 1, 0, 0)))
    assert "version 1" in one
    assert "convert the original model again" in one
    big = refused(write(tmp_path, b"GGUF" + struct.pack(">IQQ", 3, 0, 0)))
    assert "big-endian GGUF (version 3)" in big
    assert "damaged" in refused(write(tmp_path, b"GGUF" + struct.pack("<IQQ", 0, 0, 0)))
    assert "damaged" in refused(write(tmp_path, b"GGUF" + struct.pack("<IQQ", 99_999, 0, 0)))


def test_a_newer_version_is_a_warning(tmp_path: Path) -> None:
    (found,) = check_model(write(tmp_path, b"GGUF" + struct.pack("<I", 4) + b"who knows"))
    assert found.version == 4
    assert "GGUF version 4, newer than" in found.warnings[0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"GG", "is not a GGUF"),
        (b"GGUF", "cut off inside its header"),
        (b"PK\x03\x04" + b"x" * 50, "zip archive"),
        (b"\n <!DOCTYPE html><html>", "web page"),
        (b"<html>", "web page"),
        (struct.pack("<Q", 80) + b'{"__metadata__":{}}', "safetensors"),
        (b"\0" * 5000, "zeros"),
        (b"\xff\xfe\x00\x01abc", "begins with"),
    ],
)
def test_other_files_are_recognised(tmp_path: Path, content: bytes, said: str) -> None:
    assert said in refused(write(tmp_path, content))


def test_a_git_lfs_pointer_says_the_real_size(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 4081004224\n"
    said = refused(write(tmp_path, pointer))
    assert "git-LFS pointer (73 bytes) for a file of 4081004224 bytes" in said


def test_no_regular_file(tmp_path: Path) -> None:
    assert "is a folder" in refused(tmp_path)
    assert "there is no model" in refused(tmp_path / "none.gguf")
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in refused(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nowhere")
    assert "is a link to nowhere" in refused(tmp_path / "link")
    (tmp_path / "loop").symlink_to("loop")
    assert "cannot read" in refused(tmp_path / "loop")
    assert "cannot read" in refused(write(tmp_path, b"x") / "below")


def test_a_cache_blob_behind_a_link_without_suffix(tmp_path: Path) -> None:
    blob = write(tmp_path, gguf(), "3f786850e387550fdab836ed7e6dc881de23001b")
    (tmp_path / "snapshot").symlink_to(blob)
    assert check_model(tmp_path / "snapshot")[0].name == "tiny"
    assert check_model(blob)[0].n_tensors == 2


def shards(folder: Path, count: int, claims: dict[int, tuple[int, int]] | None = None) -> list[Path]:
    paths = []
    for index in range(count):
        no, total = (claims or {}).get(index, (index, count))
        pairs = [number("split.no", no, U16), number("split.count", total, U16)]
        paths.append(write(folder, gguf(pairs), f"big model-{index + 1:05d}-of-{count:05d}.gguf"))
    return paths


@pytest.mark.parametrize("given_part", [0, 1, 2])
def test_any_part_of_a_split_model_will_do(tmp_path: Path, given_part: int) -> None:
    paths = shards(tmp_path, 3)
    assert [part.path for part in check_model(paths[given_part])] == paths


def test_missing_parts_are_named(tmp_path: Path) -> None:
    paths = shards(tmp_path, 4)
    paths[0].unlink()
    paths[2].unlink()
    said = refused(paths[1])
    assert "4 parts and 2 of them are missing" in said
    assert "big model-00001-of-00004.gguf, big model-00003-of-00004.gguf" in said


def test_a_short_part_is_named(tmp_path: Path) -> None:
    paths = shards(tmp_path, 2)
    paths[1].write_bytes(paths[1].read_bytes()[:-60])
    said = refused(paths[0])
    assert "big model-00002-of-00002.gguf is incomplete" in said


@pytest.mark.parametrize("claim", [(1, 3), (0, 2), (1, 0)])
def test_a_part_of_another_model(tmp_path: Path, claim: tuple[int, int]) -> None:
    paths = shards(tmp_path, 2, {1: claim})
    assert "does not belong to the other parts" in refused(paths[0])


def test_a_renamed_part(tmp_path: Path) -> None:
    renamed = shards(tmp_path, 2)[0].rename(tmp_path / "x.gguf")
    assert "its name does not say so" in refused(renamed)


def test_a_real_vocabulary_is_read_quickly_and_in_small_pieces(tmp_path: Path) -> None:
    words = b"".join(text(f"token{index}") for index in range(50_000))
    pairs = [("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 50_000) + words), string("z", "end")]
    path = write(tmp_path, gguf(pairs))
    tracemalloc.start()
    assert inspect(path).values["z"] == "end"
    assert tracemalloc.get_traced_memory()[1] < 4 * gguf_header.CHUNK
    tracemalloc.stop()


GOOD = gguf()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, len(GOOD)),
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), max_size=6),
    st.binary(max_size=8),
)
def test_no_bytes_cause_another_error(tmp_path: Path, length: int, flips: list[tuple[int, int]], tail: bytes) -> None:
    content = bytearray(GOOD)
    for at, value in flips:
        content[at] = value
    path = write(tmp_path, bytes(content[:length]) + tail)
    try:
        sizes = [part.size for part in check_model(path)]
    except ModelError:
        return
    assert sizes == [length + len(tail)]
