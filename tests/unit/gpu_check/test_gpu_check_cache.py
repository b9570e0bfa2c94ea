"""Stages of the expert cache: output, audit, speed and margin; a cache that did nothing is a failure."""

from __future__ import annotations

import pytest
from gpu_check import cache_speed, machine, speed
from gpu_world import GpuWorld

STAGES = "skip-ids,cache-output,cache-audit,cache-speed"


def test_all_is_well_and_the_numbers_are_there(gpu: GpuWorld) -> None:
    assert gpu.run("--stages", STAGES) == 0
    output, audit, fast = (gpu.stages[name]["numbers"] for name in ("cache-output", "cache-audit", "cache-speed"))
    assert set(output) == {"whole layers, 1 at once", "cache, 1 at once", "whole layers, 8 at once", "cache, 8 at once"}
    assert output["cache, 8 at once"]["hits"] == 61.5
    assert audit["half of the experts"] == {"hits": 61.5, "uploads": 40, "steps": 32, "devices": ["CUDA0"]}
    assert audit["half of the experts, two devices"]["devices"] == ["CUDA0", "CUDA1"]
    half = fast["50%"]
    assert (half["decode_to_cpu-moe"]["median"], half["prefill_to_layers"]["median"]) == pytest.approx((2.0, 2.0))
    assert half["cold"] == pytest.approx({"cache": 60.0, "cpu-moe": 30.0, "layers": 30.0})
    assert half["hit_rates"][0] == 0.125
    assert fast["margin"]["held"] is True
    table = (gpu.out / "record.md").read_text()
    assert "| 50% | cold | 60.0 | 30.0 | 30.0 | 2.00 |" in table


def test_the_three_have_the_same_memory_and_are_asked_in_turns(gpu: GpuWorld) -> None:
    assert gpu.run("--stages", "cache-speed") == 0
    started = [one["words"] for one in gpu.served if "words" in one]
    host = [int(words[words.index("-ncmoe") + 1]) for words in started]
    slots = [words[words.index("--moe-expert-cache") + 1] for words in started if "--moe-expert-cache" in words]
    assert sorted(host[:3]) == [4, 8, 8]  # half of the layers, cache, all on the host: the three start at once
    assert (host[3], slots) == (8, ["8", "-1"])  # and the cache beside its margin
    pids = [one["pid"] for one in gpu.completions]
    assert pids[:3] == pids[5:2:-1]
    seeds = [one["body"]["seed"] for one in gpu.completions[:6]]
    assert seeds[0] == seeds[2] != seeds[3] == seeds[5]


def test_without_skip_ids_a_batch_is_what_a_slot_of_zeros_serves(gpu: GpuWorld) -> None:
    gpu.env.setenv("FAKE_OPS", "fail")
    assert gpu.run("--stages", STAGES) == 1
    assert gpu.states["skip-ids"] == "failed"
    assert gpu.states["cache-output"] == "done"
    assert "cache, 4 at once" in gpu.stages["cache-output"]["numbers"]


def test_output_that_differs_more_than_rounding_fails(gpu: GpuWorld) -> None:
    gpu.env.setenv("FAKE_PERPLEXITY", "differs")
    assert gpu.run("--stages", "cache-output") == 1
    assert "mean KL 0.5 nats; whole layers on the device differ by 1e-05" in gpu.stages["cache-output"]["why"]
    assert gpu.stages["cache-output"]["numbers"]["cache, 1 at once"]["kl"] == 0.5


def test_a_cache_that_is_off_fails_with_its_reason(gpu: GpuWorld) -> None:
    gpu.env.setenv("FAKE_PERPLEXITY", "off")
    gpu.env.setenv("FAKE_CACHE", "off")
    assert gpu.run("--stages", STAGES) == 1
    assert "off: the model has no experts" in gpu.stages["cache-output"]["why"]
    assert "off: too small" in gpu.stages["cache-speed"]["why"]


def test_a_slot_that_is_wrong_ends_the_audit_with_its_name(gpu: GpuWorld) -> None:
    gpu.env.setenv("FAKE_PERPLEXITY", "audit")
    assert gpu.run("--stages", "cache-output,cache-audit") == 1
    assert gpu.states["cache-output"] == "done"
    assert "slot 3 of w does not hold expert 7" in gpu.stages["cache-audit"]["why"]


def test_a_second_device_without_a_cache_fails_the_audit(gpu: GpuWorld) -> None:
    gpu.env.setenv("FAKE_PERPLEXITY", "one")
    assert gpu.run("--stages", "cache-audit") == 1
    assert "half of the experts, two devices: 40 uploads to CUDA0" in gpu.stages["cache-audit"]["why"]


def test_a_margin_that_is_not_held_fails_and_the_speeds_are_kept(
    gpu: GpuWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([140 << 30, 100 << 30])
    monkeypatch.setattr(machine, "free_memory", lambda: next(answers))
    assert gpu.run("--stages", "cache-speed") == 1
    assert "margin NOT held: 102400 MiB free of 142335" in gpu.stages["cache-speed"]["why"]
    assert gpu.stages["cache-speed"]["numbers"]["50%"]["rounds"] == 7


def test_a_margin_that_cannot_be_seen_is_left_out(gpu: GpuWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda: None)
    assert gpu.run("--stages", "cache-speed") == 0
    assert "nvidia-smi does not say" in gpu.stages["cache-speed"]["numbers"]["margin"]["left_out"]


def test_too_few_rounds_say_nothing() -> None:
    one = {name: speed.Answer(10.0, 10.0, (1,)) for name in ("cache", "cpu-moe", "layers")}
    assert cache_speed.result([one] * 3, [0.1] * 3, {}) == {"left_out": "it ended after 3 rounds"}
