"""Models for measuring: routed as asked for, made of repeated rows, and the estimate follows the two parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from llamafork.synth import bench, weights
from llamafork.synth.spec import ModelSpec
from llamafork.synth.writer import write_model


def spec(**change: Any) -> ModelSpec:
    sizes = {"n_layer": 2, "n_expert": 64, "n_expert_used": 4, "n_ff_exp": 64, "n_embd": 256}
    return ModelSpec(bench=True, **(sizes | change))


def weights_of(path: Path) -> dict[str, Any]:
    return {one.name: dequantize(one.data, one.tensor_type) for one in gguf.GGUFReader(path).tensors}


def test_hits_grow_with_slots_reuse_and_skew() -> None:
    found = {key: bench.hit_rates(spec(reuse=key[0], skew=key[1])) for key in ((0, 0), (0.5, 0), (0.9, 0), (0, 1))}
    for rates in found.values():
        assert list(rates.values()) == sorted(rates.values())
    half = {key: rates[0.5] for key, rates in found.items()}
    assert half[(0, 0)] == pytest.approx(0.5, abs=0.05)  # chance
    assert half[(0, 0)] < half[(0.5, 0)] - 0.05 < half[(0.9, 0)]
    assert half[(0, 1)] > half[(0, 0)] + 0.2
    assert found[(0.9, 0)][0.125] > 0.6


def test_skew_is_in_how_often_experts_are_chosen() -> None:
    even, steep = (np.bincount(bench.choices(spec(reuse=0, skew=k))[0].ravel(), minlength=64) for k in (0, 1))
    assert even.max() < 3 * even.mean()
    assert steep.max() > 5 * steep.mean()


def test_layers_choose_differently_and_seeds_too() -> None:
    one, two = bench.choices(spec())
    assert not np.array_equal(one, two)
    assert not np.array_equal(one, bench.choices(spec(seed=1))[0])
    assert np.array_equal(one, bench.choices(spec())[0])


@pytest.mark.parametrize("quant", ["Q8_0", "Q4_K", "MXFP4"])
def test_the_file_routes_as_the_estimate_does(quant: str, tmp_path: Path) -> None:
    made = spec(quant=quant)
    held = weights_of(write_model(made, tmp_path / "m.gguf").path)
    seen = held["token_embd.weight"]
    seen = seen / np.sqrt((seen**2).mean(axis=1, keepdims=True)) * held["blk.1.ffn_norm.weight"]
    logits = seen @ held["blk.1.ffn_gate_inp.weight"].T
    embedded = bench.embeddings(made)
    embedded = embedded / np.sqrt((embedded**2).mean(axis=1, keepdims=True))
    wanted = embedded @ bench.router(made, 1).T
    top, expected = (np.sort(np.argsort(-one, axis=1)[:, :4], axis=1) for one in (logits, wanted))
    assert (top == expected).mean() > 0.95  # what Q8_0 of the embeddings leaves
    assert float(np.std(logits)) > 0.9


def test_weights_are_the_seeds_and_experts_differ(tmp_path: Path) -> None:
    one, two = (write_model(spec(), tmp_path / name) for name in "ab")
    assert one.sha256 == two.sha256
    assert one.sha256 != write_model(spec(seed=1), tmp_path / "c").sha256
    held = weights_of(one.path)["blk.0.ffn_up_exps.weight"]
    assert not np.array_equal(held[0], held[1])
    assert float(held.std()) == pytest.approx(1 / 16, rel=0.05)


def test_rows_repeat_in_a_prime_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(weights, "CHUNK", 4 * 256 * 100)
    held = weights_of(write_model(spec(), tmp_path / "m").path)["blk.0.ffn_up_exps.weight"].reshape(-1, 256)
    assert np.array_equal(held[:97], held[97:194])
    assert not np.array_equal(held[:64], held[64:128])


@pytest.mark.parametrize(("most", "found"), [(3, 3), (4, 3), (10, 7), (1024, 1021)])
def test_primes(most: int, found: int) -> None:
    assert bench.prime(most) == found


def test_more_tokens_than_rows_repeat(tmp_path: Path) -> None:
    period = bench.TOPICS * bench.OWN
    made = spec(vocab=period + 100, n_embd=32, n_head=1, n_head_kv=1, head_dim=32, n_layer=1)
    held = weights_of(write_model(made, tmp_path / "m").path)["token_embd.weight"]
    assert np.array_equal(held[:100], held[period:])
