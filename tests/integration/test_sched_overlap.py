"""Change sched-overlap: marked branches run beside each other, and nothing else changes."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from real_builds import tests_of

from llamafork.build.store import Build

SIM = "lat=5us"


@pytest.fixture(scope="module", params=["release", "asan", "tsan"])
def tool(request: pytest.FixtureRequest) -> Build:
    return tests_of(request.param)


def run(tool: Build, *words: str, **env: str) -> str:
    plain = {k: v for k, v in os.environ.items() if not k.startswith("GGML_")}
    devices = {"GGML_SIM_DEVICES": SIM, "GGML_NO_BACKTRACE": "1", "GGML_SIM_CHECK": "1"}
    done = subprocess.run([tool.program("test-sched-overlap"), *words], capture_output=True, text=True, timeout=300,
                          env=plain | devices | env)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{words[0]}: done" in done.stderr
    return done.stdout


@pytest.mark.parametrize("devices", [SIM, "lat=5us,h2d=30M,d2h=30M"], ids=["fast", "slow"])
@pytest.mark.parametrize("tokens", ["1", "2", "8", "33"])
@pytest.mark.parametrize("off", [False, True])
@pytest.mark.parametrize("case", ["values", "inert", "dependent"])
def test_marks_change_the_order_of_copies_and_nothing_else(
    tool: Build, case: str, off: bool, tokens: str, devices: str
) -> None:
    """Under the race check. With GGML_SCHED_OVERLAP=0 not even the splits."""
    run(tool, case, tokens, GGML_SIM_DEVICES=devices, **({"GGML_SCHED_OVERLAP": "0"} if off else {}))


@pytest.mark.alone
@pytest.mark.parametrize("tokens", ["1", "4"])
def test_two_branches_take_as_long_as_the_longer(tokens: str) -> None:
    """Within 1.15, and without marks as long as both."""
    tool = tests_of("release")
    tries = []
    for _ in range(8):  # other work on the machine only adds
        took = json.loads(run(tool, "time", tokens, GGML_SIM_CHECK="0"))
        tries.append(took)
        if took["ratio"] <= 1.15 and took["plain_ms"] > 1.3 * took["marked_ms"]:
            return
    pytest.fail(f"{tries}")
