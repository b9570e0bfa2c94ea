"""The check from end to end, with fake programs: what is found is kept, and nothing passes silently."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from gpu_check import archive, machine
from gpu_check.stages import STAGES
from gpu_world import FILES, GpuWorld

ALL = [stage.name for stage in STAGES]


def test_all_stages_leave_their_numbers_and_the_table_comes_last(
    gpu: GpuWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.run() == 0
    assert gpu.states == dict.fromkeys(ALL, "done")
    record = gpu.record
    assert record["ok"] is True
    assert record["series"] == {"tree": "a" * 40, "changes": ["one"]}
    assert record["command"].startswith("scripts/gpu-check run --archive ")
    assert gpu.stages["backend-ops"]["numbers"]["passed"] == 3
    assert gpu.stages["model"]["numbers"]["lru_hit_rates"] == {"0.125": 0.5, "0.5": 0.8}
    assert gpu.stages["profile"]["numbers"]["as it runs"]["us_a_token"] == 25.0
    printed = capsys.readouterr().out
    assert printed.rstrip().endswith("|")
    assert (gpu.out / "record.md").read_text().strip() in printed
    assert sorted(file.name for file in gpu.out.iterdir()) == ["log.txt", "profile.jsonl", "record.json", "record.md"]


def test_stages_named_bring_what_they_need(gpu: GpuWorld) -> None:
    assert gpu.run("--stages", "backend-ops") == 0
    assert list(gpu.states) == ["build", "devices", "backend-ops"]


def test_the_twin_is_built_in_the_same_folder_from_its_own_sources(gpu: GpuWorld) -> None:
    assert gpu.run("--stages", "stock") == 0
    source = gpu.work / "tree" / "src"
    assert sorted(file.name for file in source.iterdir()) == ["main.cpp", "same.cpp"]
    assert (source / "main.cpp").read_bytes() == b"int stock;\n"
    built = {kind: (gpu.work / "programs" / kind / "libggml-cuda.so").read_text() for kind in ("fork", "stock")}
    assert built == {"fork": "fork", "stock": "stock"}
    configures = [line for line in gpu.log.read_text().splitlines() if "-S" in line.split("\0")]
    assert len(configures) == 2
    assert f"-DLLAMA_FORK_SERIES={'a' * 40}" in configures[0]
    assert "LLAMA_FORK_SERIES" not in configures[1]
    assert "-DCMAKE_CUDA_ARCHITECTURES=90" in configures[0]


def test_a_second_run_on_a_warm_machine_keeps_builds_and_model(gpu: GpuWorld) -> None:
    assert gpu.run("--stages", "speed") == 0
    before = gpu.log.read_text()
    assert gpu.run("--stages", "speed") == 0
    assert "--build" not in gpu.log.read_text()[len(before) :]
    assert gpu.stages["build"]["numbers"]["kept"] is True
    archive.write(gpu.packed, FILES | {"repo/scripts/gpu-check": b"a script that was put right"})
    assert gpu.run("--stages", "stock") == 0
    assert "--build" not in gpu.log.read_text()[len(before) :]
    assert gpu.run("--stages", "build", "--arch", "80") == 0
    assert "--build" in gpu.log.read_text()[len(before) :]


def test_a_target_of_a_later_series_is_built_when_its_source_is_there(gpu: GpuWorld) -> None:
    archive.write(gpu.packed, FILES | {"src/tests/test-expert-cache.cpp": b"\n"})
    assert gpu.run("--stages", "build") == 0
    assert (gpu.work / "programs" / "fork" / "test-expert-cache").is_file()


def test_a_failed_stage_keeps_the_ones_before_and_those_that_do_not_need_it(gpu: GpuWorld) -> None:
    gpu.env.setenv("FAKE_OPS", "fail")
    assert gpu.run() == 1
    ops = {"backend-ops": "failed", "skip-ids": "failed", "backend-ops-all": "failed"}
    assert gpu.states == dict.fromkeys(ALL, "done") | ops
    assert gpu.record["ok"] is False
    assert "1 of 3 failed" in gpu.stages["backend-ops"]["why"]
    assert "MUL_MAT_ID(type_a=q8_0,n=1)" in gpu.stages["backend-ops"]["why"]
    assert "NOT well" in (gpu.out / "record.md").read_text()


def test_what_needs_a_failed_stage_is_left_out_with_that_reason(gpu: GpuWorld) -> None:
    gpu.env.setenv("FAKE_BROKEN", "stock")
    assert gpu.run() == 1
    assert gpu.states == dict.fromkeys(ALL, "done") | {"stock": "failed", "identity": "left out", "speed": "left out"}
    assert "main.cpp:7:1: error: this is wrong" in gpu.stages["stock"]["why"]
    assert gpu.stages["speed"]["why"] == "it needs stock, which failed"


def test_a_crash_in_the_middle_of_measuring_is_said_with_its_words(gpu: GpuWorld) -> None:
    gpu.env.setenv("FAKE_BENCH", "crash")
    assert gpu.run() == 1
    assert gpu.states == dict.fromkeys(ALL, "done") | {"profile": "failed"}
    assert "CUDA error: out of memory" in gpu.stages["profile"]["why"]


def test_a_test_program_that_runs_no_case_is_a_failure(gpu: GpuWorld) -> None:
    gpu.env.setenv("FAKE_OPS", "none")
    assert gpu.run("--stages", "backend-ops") == 1
    assert "ran no case on CUDA0" in gpu.stages["backend-ops"]["why"]


def test_cuda_without_a_gpu_is_refused_before_anything_is_built(
    gpu: GpuWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.env.setattr(machine, "gpus", list)
    gpu.env.setattr(machine, "driver_devices", lambda: 0)
    assert gpu.run() == 3
    assert "CUDA was asked for, and no NVIDIA GPU is visible here" in capsys.readouterr().err
    assert not gpu.log.exists()


def test_a_build_that_sees_no_device_ends_the_check(gpu: GpuWorld) -> None:
    gpu.env.setenv("FAKE_DEVICE", "")
    assert gpu.run() == 1
    assert gpu.states == {"build": "done", "devices": "failed"} | dict.fromkeys(ALL[2:], "left out")
    assert "cuda was asked for, and the build sees no device of it" in gpu.stages["devices"]["why"]


def test_only_building_needs_no_gpu(gpu: GpuWorld) -> None:
    gpu.env.setattr(machine, "gpus", list)
    gpu.env.setattr(machine, "driver_devices", lambda: 0)
    assert gpu.run("--stages", "build") == 0


def test_what_does_not_fit_the_budget_is_left_out_and_the_record_says_why(gpu: GpuWorld) -> None:
    assert gpu.run("--minutes", "1", "--stages", "devices") == 1
    assert gpu.states == {"build": "left out", "devices": "left out"}
    assert "it takes about 361 s, and 60 s of the budget are left" in gpu.stages["build"]["why"]
    assert gpu.stages["devices"]["why"] == "it needs build, which was left out"
    assert "nothing was done" in (gpu.out / "record.md").read_text()
    gpu.env.setattr(
        "gpu_check.check.STAGES", [replace(s, cost=lambda ctx: 1e6) if s.name == ALL[-1] else s for s in STAGES]
    )
    assert gpu.run("--minutes", "9", "--stages", f"build,{ALL[-1]}") == 0
    assert gpu.states == {"build": "done", "devices": "done", "backend-ops-all": "left out"}
    assert "it takes about 1000000 s" in gpu.stages["backend-ops-all"]["why"]


@pytest.mark.parametrize("words", [["--stages", "nonsense"], ["--arch", "90;80"], ["--jobs", "0"]])
def test_what_the_user_got_wrong_is_one_error(
    gpu: GpuWorld, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.run(*words) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "Traceback" not in said


def test_an_archive_that_is_none_is_one_error(gpu: GpuWorld, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.packed.write_bytes(b"no archive")
    assert gpu.run() == 2
    assert "is not an archive of this script" in capsys.readouterr().err
    gpu.packed.unlink()
    assert gpu.run() == 2


def test_builds_do_not_go_where_the_record_goes(gpu: GpuWorld, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.work = gpu.out / "work"
    assert gpu.run() == 2
    assert "--work is inside --out" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_one_error(gpu: GpuWorld, capsys: pytest.CaptureFixture[str]) -> None:
    (gpu.base / "file").touch()
    gpu.out = gpu.base / "file" / "out"
    assert gpu.run() == 3
    assert capsys.readouterr().err.startswith("error: cannot read or write ")


def test_a_work_folder_that_others_may_write_is_refused(gpu: GpuWorld, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.work.mkdir()
    gpu.work.chmod(0o777)
    assert gpu.run() == 2
    assert "is open to other users" in capsys.readouterr().err


def test_the_page_names_every_stage() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "gpu-check.md").read_text()
    assert [name for name in ALL if f"`{name}`" not in page] == []


def test_logits_that_differ_on_the_device_fail_the_check_and_are_named(gpu: GpuWorld) -> None:
    gpu.env.setenv("FAKE_RESULTS", "odd")
    assert gpu.run("--stages", "identity,speed") == 1
    assert gpu.stages["identity"]["why"].count("1 at once") == 2
    assert "512" not in gpu.stages["identity"]["why"]
    assert gpu.states["speed"] == "done"
    gpu.env.setenv("FAKE_RESULTS", "")
    assert gpu.run("--stages", "identity") == 0
    assert gpu.stages["identity"]["summary"].startswith("4 of 4")
