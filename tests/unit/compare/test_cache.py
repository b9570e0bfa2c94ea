"""The cache suite with servers that take no time, and its verdicts as pure functions."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import fake_cache
import pytest
from fake_upstream import World

from llamafork.compare.cache import overlap, servers, verdict, work
from llamafork.compare.cache.overlap import Branches, Profile
from llamafork.compare.cache.servers import CACHE, CPU_MOE, FIT, SMALL, Counters, Round
from llamafork.compare.report import Row
from llamafork.errors import Exit, UnhealthyError, UsageError
from llamafork.synth import bench, layouts
from llamafork.synth.table import Role

SIM = work.places(["sim"], work.QUICK)[0]
LOADS = {one.name: one for one in work.WORKLOADS}


def test_experts_are_more_than_four_fifths_of_what_a_token_reads() -> None:
    spec = work.FULL.spec(LOADS["hits-50"])
    read = {True: 0.0, False: 0.0}
    for one in layouts.tensors(spec):
        experts = one.role is Role.EXPERT
        part = (
            spec.n_expert_used / spec.n_expert if experts else 1 / spec.vocab if one.name == "token_embd.weight" else 1
        )
        read[experts] += one.bytes * part
    assert read[True] / sum(read.values()) > 0.8


@pytest.mark.parametrize(("name", "rate"), [("hits-50", 0.5), ("hits-75", 0.75), ("hits-95", 0.95), ("uniform", 0.125)])
def test_an_eighth_of_the_experts_has_the_hit_rate_in_the_name(name: str, rate: float) -> None:
    assert bench.hit_rates(work.FULL.spec(LOADS[name]))[0.125] == pytest.approx(rate, abs=0.03)


def test_places_and_their_memory() -> None:
    one, two = work.places([], work.FULL)
    assert (one.place.name, two.place.name) == ("sim", "sim2")
    assert one.place.devices.startswith("mem=65M,h2d=12G")
    assert two.place.devices.count(";") == 1
    with pytest.raises(UsageError, match="not measured at cpu"):
        work.places(["cpu"], work.FULL)


def test_all_modes_leave_the_same_memory() -> None:
    made = servers.modes(work.places(["sim2"], work.FULL)[0])
    assert made[FIT].words == ("--fit", "on", "-fitt", "4")
    assert made[CPU_MOE].words == ("-ngl", "99", "--cpu-moe", "--fit", "off", "-ts", "3,2")
    assert [name for name, mode in made.items() if mode.cached] == [CACHE, SMALL]
    assert [name for name, mode in made.items() if not mode.ours] == [CPU_MOE, FIT]


def test_a_round_asks_cold_then_warms_up_then_takes_turns(tmp_path: Path) -> None:
    made = fake_cache.program(tmp_path)
    found = servers.round_of((made, made), SIM, tmp_path / "m", (CACHE, CPU_MOE, FIT), work.QUICK, tmp_path / "s", 0)
    assert found.cold == {CACHE: 9.0, CPU_MOE: 10.0}
    assert found.times == {CACHE: [4.0, 4.0], CPU_MOE: [10.0, 10.0], FIT: [10.0, 10.0]}
    assert (found.warm, found.slots) == (64, [16])
    assert Counters(**found.counters) == Counters(192, 64, 16, 3200, 32)  # 2 turns of 16 tokens, none that was stale
    assert found.cache_ms == 120.0
    assert servers.turned("abc", 1) == ["c", "b", "a"]


class Warming:
    """Instead of a server: its hit rate by window."""

    def __init__(self, rates: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.rates, self.asked = rates, 0
        monkeypatch.setattr(servers, "ask", self._ask)
        monkeypatch.setattr(servers, "counters", lambda _: Counters(*map(int, self._sums())))

    def _ask(self, _: object, tokens: int, seed: int) -> float:
        self.asked += 1
        return 1.0

    def _sums(self) -> tuple[float, float]:
        hits = sum(1000 * rate for rate in self.rates[: self.asked])
        return hits, 1000 * self.asked - hits


@pytest.mark.parametrize(
    ("rates", "tokens"), [([0.5, 0.52], 256), ([0.1, 0.3, 0.5, 0.5], 512), ([0.1, 0.5, 0.1, 0.5], 512)]
)
def test_it_is_warm_when_the_hit_rate_stays(rates: list[float], tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    Warming(rates, monkeypatch)
    assert servers.warm_up(None, 256, 512) == tokens  # type: ignore[arg-type]


def test_what_is_no_measurement_ends_it(tmp_path: Path) -> None:
    off = fake_cache.program(tmp_path / "off", status="off")
    words = (SIM, tmp_path / "m", (CACHE, CPU_MOE), work.QUICK, tmp_path / "s", 0)
    with pytest.raises(UnhealthyError, match="cache is off") as error:
        servers.round_of((off, off), *words)
    assert error.value.why == "a reason"
    short = fake_cache.program(tmp_path / "short", short=1)
    with pytest.raises(UnhealthyError, match="other work"):
        servers.round_of((short, short), *words)
    with pytest.raises(UsageError, match="x has no expert cache"):
        servers.check_cache(fake_cache.program(tmp_path / "stock", flag="--cpu-moe"))


def graph(number: int, runs: int, hit: float, miss: float, *, batch: int = 1) -> str:
    """A print whose sums are *hit* and *miss* ms."""

    def split(first: str, last: str, ms: float, inputs: list[dict[str, object]]) -> dict[str, object]:
        return {"first": first, "last": last, "ns": ms * 1e6, "wait_ns": 0, "inputs": inputs}

    up: list[dict[str, object]] = [{"src": "CPU", "name": "down-0", "ns": 0.25e6 * runs}]
    splits = [
        split("ffn_moe_slots-0", "x", hit, []),
        split("ffn_moe_misses-0", "down-0", miss, []),
        split("sum", "y", 0, up),
    ]
    return json.dumps({"scheduler": 0, "print": number, "batch": batch, "n_splits": 3, "n_nodes": 9, "runs": runs,
                       "ns": 1e6, "splits": splits})  # fmt: skip


def test_the_longer_branch_is_that_of_each_token() -> None:
    """Means would say 2 ms: hits take 2 ms each time, misses 0 and 4."""
    lines = [graph(0, 5, 90, 90), graph(1, 6, 92, 90), '{"torn', graph(2, 7, 94, 94), graph(2, 1, 50, 50, batch=64)]
    found = overlap.branches(overlap.tokens(lines))
    assert (found.tokens, found.hits, found.misses, found.longer) == (2, 2.0, 2.0, 3.0)
    assert found.rest == pytest.approx(0.25)
    assert (found.cycles, found.longest) == (0.0, 0.0)  # there is but one layer


def test_a_profile_is_read_from_four_servers(tmp_path: Path) -> None:
    with ExitStack() as stack:
        made = overlap.Session(stack, fake_cache.program(tmp_path), SIM, tmp_path / "m", work.QUICK, tmp_path)
        made.turn(0)
        found = made.result()
    assert found.stock.rest == pytest.approx(9.7)
    assert found.outside == pytest.approx(0.3)
    assert found.expected == pytest.approx(10.0 / (1.7 + 3.0 + 0.3))
    assert found.overlap == pytest.approx(3.8 / 3.0)
    assert found.rate == 0.75


def rounds(n: int = 6, cache: float = 4.0, *, cold: float = 10.0, uploads: int = 10, spent: int = 1000) -> list[Round]:
    counted = {"hits": 75, "misses": 25, "uploads": uploads, "upload_us": spent, "steps": 64}
    times = {CACHE: [cache] * 2, SMALL: [10.0] * 2, CPU_MOE: [10.0] * 2, FIT: [8.0] * 2}
    return [Round({CACHE: cold, CPU_MOE: 10.0}, times, counted, 2 * 32 * cache, 256, [16])] * n


STOCK, FORK, SERIAL = Branches(rest=9.5), Branches(rest=1.5, longer=2.0), Branches(longest=2.0, between=1.0)
PROFILE = Profile(STOCK, FORK, SERIAL, Branches(cycles=3.2), 0.5, 0.75, (0.75, 0.75))


def judge(name: str, made: list[Round], profile: Profile | None = PROFILE) -> dict[str, Row]:
    return {row.number: row for row in verdict.rows(LOADS[name], "sim", made, profile, judged=len(made) >= 6)}


def test_the_best_of_stock_is_what_counts() -> None:
    """2.5 over --cpu-moe would do, 2 over --fit does not."""
    found = judge("hits-75", rounds())
    assert found["over the best"].ratio == 2.0
    assert [number for number, row in found.items() if row.bad] == ["over the best"]
    assert "stock's best is --fit; goal 2.5; 75.0% hits, 16 slots, after 256 tokens" in found["over the best"].detail
    assert found["of expected"].ratio == pytest.approx(1.0)


@pytest.mark.parametrize(("made", "profile", "missed"), [
    (rounds(cache=2.5), PROFILE, set()),
    (rounds(cache=2.5, uploads=20), PROFILE, {"hits per upload"}),
    (rounds(cache=2.5, cold=11.0), PROFILE, {"cold"}),
    (rounds(cache=2.5), replace(PROFILE, both=Branches(cycles=3.4)), {"overlap"}),
    (rounds(cache=2.5), replace(PROFILE, stock=Branches(rest=19.5)), {"of expected"}),
    (rounds(cache=2.5, spent=100_000), PROFILE, {"link share"}),
])  # fmt: skip
def test_what_misses_its_goal_is_named(made: list[Round], profile: Profile, missed: set[str]) -> None:
    assert {number for number, row in judge("hits-75", made, profile).items() if row.bad} == missed


def test_a_few_rounds_are_not_judged() -> None:
    assert {row.verdict for row in judge("hits-95", rounds(1, 20.0)).values()} == {"not judged"}


def test_slower_needs_the_whole_interval() -> None:
    one = [*rounds(5, 11.0), *rounds(1, 10.0)]
    assert [(row.number, row.bad) for row in judge("uniform", one, None).values()] == [
        ("thrashing", False),
        ("too small", False),
    ]
    assert judge("uniform", rounds(6, 11.0), None)["thrashing"].bad


def test_the_suite_from_the_command_line(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamafork.compare.cache.suite.model", lambda folder, load, size: folder / load.name)
    ours, theirs = fake_cache.program(tmp_path / "a"), fake_cache.program(tmp_path / "b")
    xml = tmp_path / "x.xml"
    words = ["compare", str(ours.folder), str(theirs.folder), "--suite", "cache", "--quick", "--on", "sim", "--json"]
    code, out, err = world.run(*words, "--junit", str(xml))
    assert code == Exit.OK, err
    made = json.loads(out)
    assert made["notes"] == ["cache: simulated; not measured on a GPU"]
    assert {row["model"] for row in made["rows"]} == {"hits-75", "uniform"}
    assert "simulated" in xml.read_text()
    assert len(ET.parse(xml).findall("testcase")) == len(made["rows"])
    code, out, err = world.run("compare", str(ours.folder), str(theirs.folder), "--suite", "speed")
    assert code == Exit.USAGE
    assert "--model is missing" in err
