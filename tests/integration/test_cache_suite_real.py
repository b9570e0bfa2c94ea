"""`compare --suite cache` on real programs, quickly: that each number is there and makes sense, not how fast it is."""

from __future__ import annotations

import json

import pytest
from real_builds import FORK_SIM, SIM, find, llamafork

NUMBERS = {
    "hits-75": {"over the best", "over --cpu-moe", "over --fit", "of expected", "overlap", "hits per upload",
                "link share", "cold"},
    "uniform": {"thrashing", "too small"},
}  # fmt: skip


@pytest.mark.parametrize("place", ["sim", "sim2"])
def test_each_number_is_there_and_makes_sense(place: str) -> None:
    ours, theirs = find(*FORK_SIM), find("--stock", *SIM)
    done = llamafork("compare", ours.key, theirs.key, "--suite", "cache", "--quick", "--on", place, "--json")
    found = json.loads(done.stdout)
    assert found["notes"] == ["cache: simulated; not measured on a GPU"]
    rows = {name: {row["number"]: row for row in found["rows"] if row["model"] == name} for name in NUMBERS}
    assert {name: set(made) for name, made in rows.items()} == NUMBERS
    assert {row["verdict"] for row in found["rows"]} == {"not judged"}
    assert all(0.02 < row["ratio"] < 50 for row in rows["uniform"].values())
    hits = rows["hits-75"]
    assert all(
        0.02 < row["ratio"] < 50 for number, row in hits.items() if number not in ("hits per upload", "link share")
    )
    assert hits["hits per upload"]["ratio"] > 0
    assert " slots, after 64 tokens" in hits["over the best"]["detail"]
