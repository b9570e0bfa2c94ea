"""Stage speed: two servers in turns, each case a fresh pair; what is found is kept, and nothing passes silently."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from gpu_check import archive, machine, servers, speed
from gpu_check.programs import Log, TimeUp
from gpu_check.stage import Context, Options, Outcome
from gpu_world import CASES, GpuWorld

from llamafork.errors import LlamaforkError, UnhealthyError

FACTS = {"layers": 8, "bytes": 1000, "expert_bytes": 800}
FOUND: dict[str, Any] = {"model": FACTS, "devices": {"devices": [{"name": "CUDA0"}]}}


@dataclass
class Clock:
    now: float = 0.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class FakeServer:
    """Takes *seconds* of *clock* for an answer; ``asked`` is shared by both."""

    kind: str
    asked: list[tuple[str, int]]
    clock: Clock = field(default_factory=Clock)
    seconds: float = 0.0
    name: str = "a server"

    def post(self, path: str, body: dict[str, Any]) -> Any:
        self.asked.append((self.kind, body["seed"]))
        self.clock.now += self.seconds
        timings = {"prompt_n": 3, "prompt_ms": 30.0, "predicted_n": 2, "predicted_ms": 20.0 + len(self.asked)}
        return {"timings": timings, "tokens": [1, 2]}

    def require_device(self, device: str) -> None:
        assert device == "CUDA0"


def context(clock: Clock, rounds: int = 3, seconds: float = 100.0) -> tuple[Any, list[Outcome]]:
    kept: list[Outcome] = []
    log = SimpleNamespace(say=lambda text: None)
    options = Options("cuda", rounds=rounds, decode=2, prefill=3)
    ctx = SimpleNamespace(options=options, found=FOUND, left=lambda: seconds - clock.now, keep=kept.append, log=log)
    return ctx, kept


def pair(clock: Clock, seconds: float = 0.0) -> tuple[list[Any], list[tuple[str, int]]]:
    asked: list[tuple[str, int]] = []
    return [FakeServer(kind, asked, clock, seconds) for kind in speed.KINDS], asked


def alternation(fork: float = 30.0, stock: float = 20.0) -> dict[str, speed.Answer]:
    return {"fork": speed.Answer(fork, 10 * fork, (1,)), "stock": speed.Answer(stock, 10 * stock, (1,))}


def gone(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return False
    return True


def test_fork_and_stock_take_turns_with_one_seed_an_alternation() -> None:
    (ctx, _), (two, asked) = context(Clock()), pair(Clock())
    found: list[speed.Alternation] = []
    speed._in_turns(ctx, two, [7, 8, 9], found)
    assert [kind for kind, _ in asked] == ["fork", "stock", "stock", "fork", "fork", "stock", "stock", "fork"]
    seeds = [seed for _, seed in asked]
    assert seeds[::2] == seeds[1::2]
    assert len(set(seeds)) == 4
    assert len(found) == 3


def test_time_that_runs_out_ends_the_turns_with_what_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(speed, "time", clock)
    (ctx, _), (two, asked) = context(clock, rounds=7, seconds=59.0), pair(clock, seconds=5.0)
    found: list[speed.Alternation] = []
    speed._in_turns(ctx, two, [7, 8, 9], found)
    assert len(asked) == 10
    row = speed._row(speed._result(CASES(8)[0], FACTS, found), ctx.options)
    assert row[0] == "no experts on the device (4 alternations)"
    assert speed._result(CASES(8)[0], FACTS, found[:3])["left_out"] == "it ended after 3 alternations"


def test_placements_are_added_while_there_is_time_and_the_rest_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()

    def measure(ctx: Any, case: speed.Case, facts: Any, found: list[speed.Alternation]) -> None:
        clock.now += 30.0
        found += [alternation()] * 4

    monkeypatch.setattr(speed, "_measure", measure)
    monkeypatch.setattr(speed, "time", clock)
    ctx, kept = context(clock)
    found = speed.measure(ctx)
    cases: Any = found.numbers["cases"]
    assert [len(one.numbers["cases"]) for one in kept] == [1, 2, 3]
    assert [("left_out" in one) for one in cases] == [False] * 3 + [True] * 5
    assert cases[3]["left_out"] == "30 s for it, 10 s left"
    assert found.summary.startswith("3 placements measured, 5 left out: 3 alternations")
    assert found.table is not None
    assert len(found.table.rows) == 8


def test_a_case_that_fails_keeps_its_alternations(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(ctx: Any, case: speed.Case, facts: Any, found: list[speed.Alternation]) -> None:
        found += [alternation()] * 4
        raise TimeUp("the end")

    monkeypatch.setattr(speed, "_measure", measure)
    ctx, kept = context(Clock(), rounds=7)
    with pytest.raises(TimeUp):
        speed.measure(ctx)
    case: Any = kept[-1].numbers["cases"]
    assert (case[0]["alternations"], case[0]["decode_ratio"]) == (4, 1.5)


def test_the_ratio_is_the_median_of_those_of_neighbours_in_both_orders() -> None:
    found = [alternation(10, 10), alternation(80, 20), alternation(40, 40), alternation(27, 3)]
    one = speed._result(CASES(8)[1], FACTS, found)
    ratios = (one["decode_ratio"], one["decode_ratio_low"], one["decode_ratio_high"])
    assert ratios == pytest.approx((2.0, 2.0, 3.0))
    assert one["decode_fork"] == {"median": 33.5, "low": 10, "high": 80, "samples": [10, 80, 40, 27]}
    assert one["same_tokens"] == 4


def test_placements_are_whole_layers_mapped_and_page_locked() -> None:
    assert [(one.host, one.mode) for one in CASES(36)] == [
        (36, "mmap"), (27, "mmap"), (18, "mmap"), (9, "mmap"),
        (36, "none"), (18, "none"), (27, "none"), (9, "none")]  # fmt: skip


def test_what_two_servers_cannot_hold_in_page_locked_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"layers": 8, "bytes": 9_000_000_000, "expert_bytes": 8_000_000_000}
    monkeypatch.setattr(machine, "available_memory", lambda: 12_000_000_000)
    why = {case.title: speed._no_memory(case, facts) for case in CASES(8)}
    assert [title for title, text in why.items() if text] == ["no experts on the device, none",
                                                              "25% of the experts on the device, none"]  # fmt: skip
    said = "both servers need 17.1 GB of host memory, and 12.0 GB are available"
    assert why["no experts on the device, none"] == said
    monkeypatch.setattr(machine, "available_memory", lambda: None)
    assert not any(speed._no_memory(case, facts) for case in CASES(8))


def test_the_system_says_how_much_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_read", lambda path: "MemFree: 1 kB\nMemAvailable:    2048 kB\n")
    assert machine.available_memory() == 2 << 20
    monkeypatch.setattr(machine, "_read", lambda path: "")
    assert machine.available_memory() is None


def test_without_memory_for_any_placement_the_stage_fails_with_that_reason(gpu: GpuWorld) -> None:
    gpu.env.setattr(machine, "available_memory", lambda: 1000)
    assert gpu.run("--stages", "speed") == 1
    assert "no placement could be measured; both servers need 1.1 GB" in gpu.stages["speed"]["why"]
    assert gpu.served == []


def test_each_placement_has_a_fresh_pair_of_servers_placed_alike(gpu: GpuWorld) -> None:
    assert gpu.run("--stages", "speed") == 0
    starts = [one for one in gpu.served if "words" in one]
    assert sorted((one["kind"], one["words"][5:9]) for one in starts) == [
        (kind, ["99", "-ncmoe", host, "-lm"]) for kind in speed.KINDS for host in ("6", "8")]  # fmt: skip
    assert len({one["words"][-1] for one in starts[:2]}) == 2  # ports
    assert all("CUDA0" in one["words"] and gone(one["pid"]) for one in starts)
    kinds = [one["kind"] for one in gpu.completions]
    assert kinds == ["fork", "stock", "stock", "fork"] * 8
    body = gpu.completions[0]["body"]
    assert (len(body["prompt"]), body["n_predict"], body["temperature"]) == (2048, 64, 1.0)
    assert (body["cache_prompt"], body["ignore_eos"]) == (False, True)
    case = gpu.stages["speed"]["numbers"]["cases"][1]
    assert (case["decode_ratio"], case["prefill_ratio"]) == pytest.approx((1.5, 1.5))
    assert case["decode_stock"]["samples"] == pytest.approx([20.0] * 7)
    assert case["on_device_bytes"] == 200 + 800 // 4
    log = (gpu.out / "log.txt").read_text()
    assert log.count("CUDA0 model buffer size") == 4


@pytest.mark.parametrize(
    ("mood", "why"),
    [
        ("crash:stock", "llama-server of stock failed (exit 1); CUDA error: out of memory"),
        ("dies:fork", "llama-server of fork failed (exit 1); CUDA error: out of memory"),
        ("cpu:stock", "llama-server of stock ran without a device; its log names no buffer of CUDA0"),
        ("cached:fork", "llama-server of fork did other work than it was asked for; 2047 + 64 tokens instead of 2048"),
        ("mute:fork", "llama-server of fork gave no timings; KeyError: 'timings'"),
        ("refuses:stock", 'llama-server of stock failed at /completion; status 500: {"error": "no slot"}'),
    ],
)
def test_a_server_that_is_not_well_fails_the_stage_in_its_own_words(gpu: GpuWorld, mood: str, why: str) -> None:
    gpu.env.setenv("FAKE_SERVER", mood)
    assert gpu.run("--stages", "speed") == 1
    assert gpu.stages["speed"]["why"].startswith(why)
    assert all(gone(one["pid"]) for one in gpu.served)


def test_a_server_that_hangs_is_ended_with_the_time_and_what_was_found_is_kept(gpu: GpuWorld) -> None:
    assert gpu.run("--stages", "stock,model") == 0
    gpu.env.setenv("FAKE_SERVER", "hangs:stock")
    gpu.env.setattr(Context, "left", lambda self: 60.0 if len(gpu.completions) < 10 else 1.0)
    kept: list[Outcome] = []
    ctx = Context(Options("cuda"), archive.read(gpu.packed), gpu.out, gpu.work, Log(gpu.out / "log.txt"), 0.0,
                  found=FOUND, keep=kept.append)  # fmt: skip
    with pytest.raises(TimeUp, match="llama-server of stock did not answer /completion in the time that was left"):
        speed.measure(ctx)
    case: Any = kept[-1].numbers["cases"]
    assert case[0]["alternations"] == 4
    assert all(gone(one["pid"]) for one in gpu.served)


def test_a_server_is_not_awaited_beyond_its_time(tmp_path: Path) -> None:
    program, mark, log = tmp_path / "llama-server", tmp_path / "mark", Log(tmp_path / "log.txt")
    program.write_text(f"#!/bin/sh\necho loading\ntouch {mark}\nexec sleep 60\n")
    program.chmod(0o755)
    ctx: Any = SimpleNamespace(programs=lambda kind: tmp_path, left=lambda: 0.0 if mark.exists() else 30.0, log=log)
    port = servers.free_ports(1)[0]
    with (
        pytest.raises(TimeUp, match="no time is left for llama-server of fork"),
        servers.running(ctx, "fork", [], port=port, env=dict(os.environ)) as server,
    ):
        server.await_ready()
    assert server.process.returncode is not None
    assert "loading" in log.file.read_text()


@pytest.mark.parametrize(
    "line", ["", "CPU_Mapped model buffer size = 9.00", "CUDA_Host model buffer size = 9.00",
             "CUDA0 model buffer size =     0.00", "CUDA0 compute buffer size = 9.00"]
)  # fmt: skip
def test_a_server_with_nothing_on_the_device_is_refused(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setattr(servers.Server, "output", f"load_tensors: {line} MiB\n")
    server: Any = servers.Server("fork", "", None, None, lambda: 1.0)  # type: ignore[arg-type]
    with pytest.raises(UnhealthyError, match="ran without a device"):
        server.require_device("CUDA0")
    monkeypatch.setattr(servers.Server, "output", "load_tensors:        CUDA0 model buffer size =    12.50 MiB\n")
    server.require_device("CUDA0")


def test_the_end_of_a_server_is_told_by_its_first_error_and_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    server: Any = servers.Server("fork", "", SimpleNamespace(returncode=1), None, lambda: 1.0)  # type: ignore[arg-type]
    for text, why in (
        ("0.00.100.000 I x\n0.00.200.000 E alloc: out of memory\n0.00.300.000 E load: no\nthe end\n",
         "alloc: out of memory; the end"),
        ("0.00.200.000 E alloc: out of memory\n", "alloc: out of memory"),
        ("error: invalid device: CUDA7\n\nto show usage, run with -h\n",
         "error: invalid device: CUDA7; to show usage, run with -h"),
        ("one\nCUDA error: out of memory\n", "CUDA error: out of memory"),
        ("", "it said nothing"),
    ):  # fmt: skip
        monkeypatch.setattr(servers.Server, "output", text)
        assert server._ended().why == why


def test_a_text_without_tokens_is_a_failure() -> None:
    server: Any = SimpleNamespace(post=lambda path, body: {"tokens": []}, name="llama-server of fork")
    with pytest.raises(LlamaforkError, match="made no tokens"):
        speed._prompt(server, 5)
    server.post = lambda path, body: {"tokens": [1, 2]}
    assert speed._prompt(server, 5) == [1, 2, 1, 2, 1]
