"""Architectures, parts and options: what is written is what the tables say, and the parts make a whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamafork.errors import UsageError
from llamafork.synth import bench, layouts, splits, weights
from llamafork.synth.archs import LAYOUTS
from llamafork.synth.hybrids import full
from llamafork.synth.quants import QUANTS
from llamafork.synth.spec import ModelSpec, sized
from llamafork.synth.table import ALLOWED, Role
from llamafork.synth.writer import write_model


def tiny(arch: str, **change: Any) -> ModelSpec:
    sizes = {"n_layer": 4, "n_embd": 64, "n_head": 2, "head_dim": 32, "n_ff_exp": 32, "n_expert": 8, "vocab": 280}
    return sized(arch, **(sizes | {"n_expert_used": 2} | change))


def read(path: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(path)


def value(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


@pytest.mark.parametrize("arch", LAYOUTS)
def test_the_file_holds_what_the_table_says(arch: str, tmp_path: Path) -> None:
    spec = tiny(arch, mtp=LAYOUTS[arch].mtp)
    made = write_model(spec, tmp_path / "m.gguf")
    reader = read(made.path)
    shapes, roles = layouts.shapes(spec), {one.name: one.role for one in layouts.tensors(spec)}
    assert {one.name for one in reader.tensors} == set(shapes)
    for one in reader.tensors:
        shape = shapes[one.name]
        assert tuple(int(n) for n in one.shape) == shape
        assert one.tensor_type.name in ALLOWED[roles[one.name]]
    assert value(reader, "general.architecture") == arch
    assert value(reader, f"{arch}.block_count") == 4 + spec.mtp
    assert value(reader, f"{arch}.nextn_predict_layers") == (1 if spec.mtp else None)
    assert value(reader, f"{arch}.expert_count") == 8


@pytest.mark.parametrize("arch", LAYOUTS)
def test_every_layer_has_experts_or_is_dense(arch: str) -> None:
    spec = tiny(arch)
    names = layouts.shapes(spec)
    for layer in range(4):
        dense, routed = (f"blk.{layer}.ffn_{part}.weight" in names for part in ("down", "down_exps"))
        assert dense != routed
        if arch != "llama4":
            assert dense == (layer < spec.n_dense)
    assert sum(f"blk.{layer}.ffn_gate_inp.weight" in names for layer in range(4)) == (
        2 if arch == "llama4" else 4 - spec.n_dense
    )


@pytest.mark.parametrize("arch", [name for name, one in LAYOUTS.items() if one.merged])
def test_merged_gate_and_up(arch: str) -> None:
    names = layouts.shapes(tiny(arch, merged=True))
    assert names["blk.3.ffn_gate_up_exps.weight"] == (64, 64, 8)
    assert not any("ffn_up_exps" in name or "ffn_gate_exps" in name for name in names)


@pytest.mark.parametrize("arch", [name for name, one in LAYOUTS.items() if one.mtp_file])
def test_trunk_and_mtp_file_are_the_model_with_the_block(arch: str, tmp_path: Path) -> None:
    spec = tiny(arch)
    whole, trunk, side = (set(layouts.shapes(replace(spec, **one))) for one in ({"mtp": True}, {}, {"mtp_only": True}))
    assert trunk | side == whole
    assert trunk & side <= layouts.SIDE
    assert {name.split(".")[1] for name in side if name.startswith("blk.")} == {"4"}
    reader = read(write_model(replace(spec, mtp_only=True), tmp_path / "m.gguf").path)
    assert value(reader, f"{arch}.block_count") == 5
    assert value(reader, f"{arch}.nextn_predict_layers") == 1


def test_the_block_is_not_counted_as_active(tmp_path: Path) -> None:
    spec = tiny("deepseek2")
    plain, with_block = (write_model(replace(spec, mtp=on), tmp_path / "m.gguf") for on in (False, True))
    assert with_block.params > plain.params
    assert with_block.active_params == plain.active_params


@pytest.mark.parametrize(("layers", "expected"), [(2, [1]), (4, [3]), (9, [3, 7])])
def test_some_layer_has_full_attention(layers: int, expected: list[int]) -> None:
    spec = tiny("qwen35moe", n_layer=layers)
    assert [layer for layer in range(layers) if full(spec, layer)] == expected
    assert full(spec, layers)


class TestSplit:
    @pytest.mark.parametrize("count", [1, 2, 5, 40])
    def test_groups_hold_all_in_order(self, count: int) -> None:
        plan = layouts.tensors(tiny("qwen3moe"))
        found = splits.groups(plan, count)
        assert len(found) == count
        assert all(found)
        assert [one for group in found for one in group] == plan

    def test_groups_are_about_equal(self) -> None:
        plan = layouts.tensors(ModelSpec(n_layer=16))
        sizes = [sum(one.bytes for one in group) for group in splits.groups(plan, 4)]
        assert max(sizes) < 1.2 * min(sizes)

    @pytest.mark.parametrize("count", [0, -1, 52])
    def test_more_files_than_tensors_are_refused(self, count: int, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="--split"):
            write_model(tiny("qwen3moe"), tmp_path / "m.gguf", split=count)
        assert list(tmp_path.iterdir()) == []

    def test_parts_are_as_upstreams(self, tmp_path: Path) -> None:
        spec = tiny("qwen3moe")
        whole = read(write_model(spec, tmp_path / "m.gguf").path)
        made = write_model(spec, tmp_path / "m.gguf", split=3)
        assert [one.path.name for one in made.files] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
        assert made.bytes == sum(one.path.stat().st_size for one in made.files)
        readers = [read(one.path) for one in made.files]
        for number, reader in enumerate(readers):
            assert value(reader, "split.no") == number
            assert value(reader, "split.count") == 3
            assert value(reader, "split.tensors.count") == len(whole.tensors)
            assert reader.fields["split.no"].types == [gguf.GGUFValueType.UINT16]
            assert reader.fields["split.tensors.count"].types == [gguf.GGUFValueType.INT32]
        assert value(readers[0], "general.architecture") == "qwen3moe"
        assert [key for key in readers[2].fields if not key.startswith(("GGUF.", "split."))] == []
        parts = {one.name: bytes(one.data) for reader in readers for one in reader.tensors}
        assert parts == {one.name: bytes(one.data) for one in whole.tensors}

    def test_an_interrupted_write_leaves_no_part(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = weights.stream

        def breaks(tensor: Any, seed: int, scale: Any) -> Any:
            if tensor.name == "output.weight":
                raise KeyboardInterrupt
            yield from real(tensor, seed, scale)

        monkeypatch.setattr(weights, "stream", breaks)
        with pytest.raises(KeyboardInterrupt):
            write_model(tiny("qwen3moe"), tmp_path / "m.gguf", split=3)
        assert list(tmp_path.iterdir()) == []


def test_roles_of_every_row_fit_its_kind() -> None:
    for table in LAYOUTS.values():
        for row in (*table.before, *(row for part in table.parts.values() for row in part), *table.after):
            assert ("norm" in row.name and not row.name.endswith(".bias")) == (row.role is Role.NORM), row.name
            assert ("_exps.weight" in row.name) == (row.role is Role.EXPERT), row.name


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    arch = draw(st.sampled_from(sorted(LAYOUTS)))
    table = LAYOUTS[arch]
    layers = draw(st.integers(table.least_layers, 5))
    change: dict[str, Any] = {
        "n_layer": layers,
        "quant": draw(st.sampled_from(sorted(QUANTS))),
        "layer_types": tuple(draw(st.lists(st.sampled_from(sorted(QUANTS)), max_size=3))),
        "merged": table.merged and draw(st.booleans()),
        "mtp": table.mtp and draw(st.booleans()),
        "n_shared": draw(st.integers(*table.shared)),
        "n_dense": draw(st.integers(0, layers - 1)) if table.dense else 0,
        "bench": draw(st.booleans()),
        "reuse": draw(st.floats(0, 1)),
        "skew": draw(st.floats(0, 10)),
    }
    return tiny(arch, **change)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(specs(), st.integers(1, 4))
def test_whatever_is_accepted_is_written_as_planned(tmp_path: Path, spec: ModelSpec, split: int) -> None:
    plan = {one.name: one for one in layouts.tensors(spec)}
    made = write_model(spec, tmp_path / "m.gguf", split=split)
    found = [one for part in made.files for one in read(part.path).tensors]
    assert [one.name for one in found] == list(plan)
    for one in found:
        wanted = plan[one.name]
        assert (one.tensor_type.name, int(one.n_bytes)) == (wanted.type, wanted.bytes)
        assert wanted.type in ALLOWED[wanted.role]
    if spec.bench:
        assert all(0 <= rate <= 1 for rate in bench.hit_rates(spec).values())
