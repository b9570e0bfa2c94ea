"""Change mmid-skip-ids: an id of -1 in a MUL_MAT_ID gives a row of zeros, and is refused where that is not known."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
from real_builds import FORK_SIM, find, rpc

from llamafork.build.store import Build


@pytest.fixture(scope="module")
def build() -> Build:
    return find(*FORK_SIM)


def run(build: Build, program: str, *words: str, **env: str) -> str:
    plain = {k: v for k, v in os.environ.items() if not k.startswith("GGML_")}
    done = subprocess.run([build.program(program), *words], capture_output=True, text=True, timeout=300,
                          env=plain | {"GGML_NO_BACKTRACE": "1", **env})  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def takes(build: Build, *words: str, **env: str) -> dict[str, str]:
    """Which devices take a node that may skip."""
    return dict(line.split() for line in run(build, "test-mmid-skip", "devices", *words, **env).splitlines())


def test_the_cpu_gives_what_a_product_without_skipping_gives_bit_for_bit(build: Build) -> None:
    said = run(build, "test-mmid-skip")
    assert re.search(r"^CPU, 2 threads: 1\d\d\d cases,.* f32 .*q4_K.*iq3_s", said, re.M), said
    assert said.endswith("\n0 failed\n")


def test_only_devices_that_know_it_take_such_a_node(build: Build) -> None:
    assert takes(build, GGML_SIM_DEVICES="1") == {"SIM0": "yes", "CPU": "yes"}
    assert takes(build, GGML_SIM_DEVICES="1", GGML_SIM_SKIP_IDS="0") == {"SIM0": "no", "CPU": "yes"}


def test_a_remote_device_is_asked_for_by_hand(build: Build) -> None:
    with rpc(build) as server:
        assert takes(build, server)["RPC0"] == "no"
        assert takes(build, server, GGML_RPC_SKIP_IDS="1")["RPC0"] == "yes"


@pytest.mark.parametrize(("flag", "device"), [("1", "SIM0"), ("0", "CPU")])
@pytest.mark.parametrize("check", ["0", "1"])
def test_an_offloaded_product_may_skip_some_or_all_experts(build: Build, flag: str, device: str, check: str) -> None:
    said = run(build, "test-mmid-skip", "sched", GGML_SIM_DEVICES="1", GGML_SIM_SKIP_IDS=flag, GGML_SIM_CHECK=check)
    assert said.split() == [device] * 4


def test_a_simulated_device_agrees_with_the_cpu(build: Build) -> None:
    words = ("test", "-b", "SIM0", "-o", "MUL_MAT_ID_SKIP", "-p", "n=(1|9|33),")  # all 1144 take two minutes
    said = run(build, "test-backend-ops", *words, GGML_SIM_DEVICES="1")
    passed = re.search(r"(\d+)/(\d+) tests passed", said)
    assert passed, said[-2000:]
    assert passed[1] == passed[2], said[-2000:]
    assert int(passed[1]) > 300
