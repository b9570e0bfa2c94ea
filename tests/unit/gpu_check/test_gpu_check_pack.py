"""Packing a series, and rehearsing it: the archive alone is enough."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_upstream import World
from gpu_check import archive, command, contents, rehearsal
from gpu_world import GpuWorld

from llamafork.errors import LlamaforkError

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "gpu-check"


def pack(tmp_path: Path, name: str) -> archive.Archive:
    assert command.main(["pack", "--out", str(tmp_path / name)]) == 0
    return archive.read(tmp_path / name)


def test_the_archive_holds_both_trees_exactly(three: World, tmp_path: Path) -> None:
    found = pack(tmp_path, "a.tar.xz")
    series = (three.repo / "patches" / "series.lock").read_text().splitlines()[-1].split()[-1]
    assert found.manifest["series"] == series
    kept = {name: data for name, data in three.files().items() if contents.keeps(name)}
    assert found.source("fork", "cuda") == kept
    upstream = {name: data for name, data in three.files(three.upstream).items() if name in kept}
    assert found.source("stock", "cuda") == upstream
    assert found.manifest["stock"]["cuda"]["removed"] == ["src/first.cpp", "src/third.h"]


def test_two_packs_are_the_same_bytes(three: World, tmp_path: Path) -> None:
    one, two = pack(tmp_path, "one.tar.xz"), pack(tmp_path, "two.tar.xz")
    assert one.sha256 == two.sha256 == hashlib.sha256((tmp_path / "two.tar.xz").read_bytes()).hexdigest()
    assert (tmp_path / "one.tar.xz").stat().st_size < archive.LIMIT


def test_an_instrument_of_a_backend_is_in_the_twin_that_needs_it(world: World, tmp_path: Path) -> None:
    world.change("sim-part", {}, {"src/sim.cpp": "int sim;\n"})
    message = world.repo / "patches" / "sim-part" / "MESSAGE"
    message.write_text(message.read_text().replace("Credit: none", "Backend: sim\nCredit: none"))
    found = pack(tmp_path, "a.tar.xz")
    assert "src/sim.cpp" in found.source("stock", "sim")
    assert "src/sim.cpp" not in found.source("stock", "cuda")


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("ggml/src/ggml-cuda/mmq.cu", True),
        ("ggml/src/ggml-sim/ggml-sim.cpp", True),
        ("ggml/src/ggml-vulkan/x.cpp", False),
        ("tools/ui/CMakeLists.txt", True),
        ("tools/ui/src/app.ts", False),
        ("tools/server/tests/unit/a.cpp", False),
        ("tests/test-backend-ops.cpp", True),
        ("tests/snapshots/a.txt", False),
        ("scripts/ui-assets.cmake", True),
        ("scripts/sync.sh", False),
        ("convert_hf_to_gguf.py", False),
        ("docs/build.md", False),
        ("LICENSE", True),
    ],
)
def test_what_no_build_reads_stays_here(name: str, kept: bool) -> None:
    assert contents.keeps(name) is kept


def test_a_rehearsal_runs_from_the_archive_with_numpy_alone(
    three: World, gpu: GpuWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    """The real script and package, unpacked, in a Python without site packages; only the compiler is a fake."""
    three.change("named", {}, {"src/fork.txt": "this is the fork\n"})
    gpu.env.setenv("FAKE_BACKEND", "sim")
    gpu.env.setenv("FAKE_DEVICE", "SIM0")
    words = ["rehearse", "--out", str(gpu.out), "--jobs", "2", "--minutes", "3"]
    assert command.main([*words, "--stages", "backend-ops,stock"]) == 0
    assert gpu.states == {"build": "done", "devices": "done", "backend-ops": "done", "stock": "done"}
    assert gpu.record["series"]["changes"] == ["first", "second", "third", "named"]
    assert "rehearsed in" in capsys.readouterr().out


def test_a_rehearsal_that_leaves_something_out_has_failed(tmp_path: Path) -> None:
    rows = [{"name": "build", "state": "done"}, {"name": "speed", "state": "left out", "why": "no time"}]
    (tmp_path / "record.json").write_text(json.dumps({"stages": rows}))
    rehearsal._ensure_whole(tmp_path, ["build"])
    with pytest.raises(LlamaforkError, match="the rehearsal left out speed"):
        rehearsal._ensure_whole(tmp_path, ["build", "speed"])


def test_nothing_done_is_no_success(three: World, gpu: GpuWorld, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.env.setenv("FAKE_BACKEND", "sim")
    gpu.env.setenv("FAKE_DEVICE", "SIM0")
    assert command.main(["rehearse", "--jobs", "2", "--minutes", "0.3", "--stages", "build"]) == 1
    assert "exit 1" in capsys.readouterr().out


def test_a_rehearsal_that_is_ended_leaves_its_record_and_no_program(three: World, gpu: GpuWorld) -> None:
    gpu.env.setenv("FAKE_BACKEND", "sim")
    gpu.env.setenv("FAKE_SLEEP", "60")
    words = [sys.executable, SCRIPT, "rehearse", "--out", gpu.out, "--minutes", "3", "--stages", "build"]
    rehearsal = subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        end = time.monotonic() + 30
        while not (gpu.log.exists() and "--build" in gpu.log.read_text()):
            assert time.monotonic() < end
            assert rehearsal.poll() is None
            time.sleep(0.05)
        rehearsal.terminate()
        assert rehearsal.wait(timeout=20) == 143
    finally:
        rehearsal.kill()
        rehearsal.wait()
    assert gpu.states == {"build": "interrupted"}
    build = gpu.log.read_text().splitlines()[-1].split("\0")[1]
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert build.encode() not in file.read_bytes()
