"""Programs, archive, budget, record: the parts that the check stands on."""

from __future__ import annotations

import json
import lzma
import os
import signal
import sys
import tarfile
import time
from pathlib import Path

import pytest
from gpu_check import archive, building, model_maker, programs, runner, stage, toolkit
from gpu_check.programs import Log
from gpu_check.record import Record
from gpu_check.stage import Context, Options, Outcome, Stage
from gpu_world import FILES

from llamafork.errors import LlamaforkError, UsageError

PARENT = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
print("half of it", flush=True)
time.sleep(60)
"""


def gone(pid: int, seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def test_at_its_limit_a_program_ends_with_all_it_started_and_its_words_are_kept(tmp_path: Path) -> None:
    log = Log(tmp_path / "log.txt")
    done = programs.run([sys.executable, "-c", PARENT, tmp_path / "pid"], limit=2.0, log=log)
    assert done.late
    assert not done.ok
    assert done.out == "half of it\n"
    assert gone(int((tmp_path / "pid").read_text()))
    assert "half of it" in log.file.read_text()
    assert "ended at its limit of 2 s" in log.file.read_text()
    with pytest.raises(programs.TimeUp, match="took longer than"):
        programs.checked(done)


def test_without_time_nothing_is_started(tmp_path: Path) -> None:
    with pytest.raises(programs.TimeUp, match="no time is left for python"):
        programs.run([sys.executable, "-c", f"open({str(tmp_path / 'x')!r}, 'w')"], limit=0.0)
    assert not (tmp_path / "x").exists()


def test_the_same_content_is_the_same_archive(tmp_path: Path) -> None:
    one, two = tmp_path / "one.tar.xz", tmp_path / "two.tar.xz"
    archive.write(one, FILES)
    time.sleep(0.01)
    archive.write(two, dict(reversed(FILES.items())))
    assert one.read_bytes() == two.read_bytes()
    with tarfile.open(one) as tar:
        assert {(m.mtime, m.uid, m.uname) for m in tar} == {(archive.EPOCH, 0, "")}
    assert archive.read(one).files == FILES


def test_an_archive_over_the_limit_is_refused_with_what_makes_it_big(tmp_path: Path) -> None:
    with pytest.raises(LlamaforkError, match="more than 0 MB") as caught:
        archive.write(tmp_path / "a.tar.xz", FILES | {"src/big.bin": os.urandom(9000)}, limit=5000)
    assert "src/big.bin" in caught.value.why
    assert not (tmp_path / "a.tar.xz").exists()


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x"])
def test_an_archive_reaches_nothing_outside(tmp_path: Path, name: str) -> None:
    archive.write(tmp_path / "a.tar.xz", FILES | {name: b""})
    with pytest.raises(UsageError, match="is not an archive"):
        archive.read(tmp_path / "a.tar.xz")


def test_an_archive_of_another_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tar.xz").write_bytes(lzma.compress(b""))
    with pytest.raises(UsageError, match="is not an archive"):
        archive.read(tmp_path / "a.tar.xz")
    archive.write(tmp_path / "a.tar.xz", FILES | {archive.MANIFEST: b'{"schema": "x/2"}'})
    with pytest.raises(UsageError) as caught:
        archive.read(tmp_path / "a.tar.xz")
    assert "its form is x/2" in caught.value.why


def test_the_twin_is_the_fork_with_its_own_files_in_place(tmp_path: Path) -> None:
    archive.write(tmp_path / "a.tar.xz", FILES)
    found = archive.read(tmp_path / "a.tar.xz")
    assert found.source("fork", "cuda") == {
        "main.cpp": b"int fork;\n", "same.cpp": b"int same;\n", "fork.txt": b"this is the fork\n"}  # fmt: skip
    assert found.source("stock", "cuda") == {"main.cpp": b"int stock;\n", "same.cpp": b"int same;\n"}


def test_only_what_differs_is_written(tmp_path: Path) -> None:
    files = {"a/one": b"1", "two": b"#!/bin/sh\n"}
    assert archive.sync(tmp_path, files) == 2
    os.utime(tmp_path / "two", (1, 1))
    (tmp_path / "a" / "more").write_text("x")
    (tmp_path / "a" / "one").write_text("changed")
    assert archive.sync(tmp_path, files) == 2
    assert (tmp_path / "two").stat().st_mtime == 1
    assert os.access(tmp_path / "two", os.X_OK)
    assert {p.name for p in tmp_path.rglob("*") if p.is_file()} == {"one", "two"}


def stages(*rows: tuple[str, int, str]) -> list[Stage]:
    """Name, priority, needs."""
    return [
        Stage(name, lambda ctx: Outcome("x"), lambda ctx: 1.0, priority, tuple(needs.split()))
        for name, priority, needs in rows
    ]


FOUR = stages(("build", 0, ""), ("ops", 2, "build"), ("model", 1, "build"), ("speed", 1, "model"))
COSTS = {"build": 100.0, "ops": 50.0, "model": 20.0, "speed": 30.0}


@pytest.mark.parametrize(
    ("seconds", "kept"),
    [
        (200, ["build", "ops", "model", "speed"]),
        (199, ["build", "model", "speed"]),
        (149, ["build", "model"]),
        (99, []),
    ],
)
def test_the_budget_goes_to_what_matters_most(seconds: float, kept: list[str]) -> None:
    assert stage.affordable(FOUR, COSTS, seconds) == kept


def test_a_stage_that_does_not_fit_takes_none_of_what_it_needs() -> None:
    assert stage.affordable(FOUR[2:], COSTS, 25) == ["model"]
    assert stage.affordable(FOUR[3:], COSTS, 40) == ["speed"]  # model is behind us


def test_time_is_kept_for_later_stages_but_not_for_those_that_need_this_one() -> None:
    assert stage.reserve(FOUR[0], FOUR[1:], COSTS) == 0
    assert stage.reserve(FOUR[1], FOUR[2:], COSTS) == 50
    assert stage.reserve(FOUR[2], FOUR[3:], COSTS) == 0


def test_naming_a_stage_chooses_what_it_needs() -> None:
    assert [one.name for one in stage.choose(FOUR, ["speed"])] == ["build", "model", "speed"]
    with pytest.raises(UsageError, match="no stage is called 'sped'"):
        stage.choose(FOUR, ["sped"])


def context(tmp_path: Path, seconds: float = 100.0) -> Context:
    archive.write(tmp_path / "a.tar.xz", FILES)
    found = archive.read(tmp_path / "a.tar.xz")
    return Context(Options("sim"), found, tmp_path, tmp_path, Log(tmp_path / "log.txt"), time.monotonic() + seconds)


def test_compilers_get_one_locale_by_which_the_compiler_cache_keeps_objects_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    monkeypatch.setenv("LC_MESSAGES", "de_DE.UTF-8")
    env = building._compiling(context(tmp_path))
    assert {name: value for name, value in env.items() if name in ("LANG", "LC_MESSAGES", "LC_ALL")} == {"LC_ALL": "C"}


def states(record: Record) -> dict[str, str]:
    data = json.loads((record.out / "record.json").read_text())
    return {one["name"]: one["state"] for one in data["stages"]}


def test_the_record_is_on_disk_at_every_step_and_what_was_found_before_a_failure_stays(tmp_path: Path) -> None:
    seen: list[dict[str, str]] = []

    def first(ctx: Context) -> Outcome:
        seen.append(states(record))
        return Outcome("found", {"n": 1})

    def second(ctx: Context) -> Outcome:
        seen.append(states(record))
        ctx.keep(Outcome("half", {"n": 2}))
        raise ZeroDivisionError("a mistake")

    table = [Stage("a", first, lambda ctx: 1.0, 0), Stage("b", second, lambda ctx: 1.0, 0),
             Stage("c", first, lambda ctx: 1.0, 0, ("b",))]  # fmt: skip
    ctx = context(tmp_path)
    record = Record(tmp_path, {"date": "today"}, ["a", "b", "c"])
    runner.run(table, ctx, record)
    assert seen == [{"a": "running", "b": "waiting", "c": "waiting"}, {"a": "done", "b": "running", "c": "waiting"}]
    assert states(record) == {"a": "done", "b": "failed", "c": "left out"}
    assert record.entries["b"].outcome.numbers == {"n": 2}
    assert record.entries["b"].why == "ZeroDivisionError: a mistake; see log.txt"
    assert "Traceback" in (tmp_path / "log.txt").read_text()
    assert not record.ok


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_a_stopped_check_has_its_record(tmp_path: Path, stop: type[BaseException]) -> None:
    def work(ctx: Context) -> Outcome:
        raise stop

    table = [*stages(("a", 0, "")), Stage("b", work, lambda ctx: 1.0, 0), *stages(("c", 0, ""))]
    record = Record(tmp_path, {"date": "today"}, ["a", "b", "c"])
    with pytest.raises(stop):
        runner.run(table, context(tmp_path), record)
    assert states(record) == {"a": "done", "b": "interrupted", "c": "left out"}
    assert "NOT well" in (tmp_path / "record.md").read_text()


def test_a_stage_cannot_take_the_time_of_those_after_it(tmp_path: Path) -> None:
    left: list[float] = []

    def work(ctx: Context) -> Outcome:
        left.append(ctx.left())
        return Outcome("")

    table = [Stage("a", work, lambda ctx: 5.0, 0), Stage("b", work, lambda ctx: 60.0, 0)]
    runner.run(table, context(tmp_path, 100.0), Record(tmp_path, {}, ["a", "b"]))
    assert 38 < left[0] <= 40
    assert 98 < left[1] <= 100


@pytest.mark.parametrize(("gib", "layers"), [(0.001, 4), (0.3, 12), (12, 36)])
def test_the_model_has_the_size_asked_for_in_whole_quarters(gib: float, layers: int) -> None:
    spec = model_maker.spec_for(int(gib * (1 << 30)))
    assert spec.n_layer == layers
    assert gib < 0.01 or abs(model_maker._bytes(spec) / (gib * (1 << 30)) - 1) < 0.1


NVCC = '#!/bin/sh\necho "#$ TOP={root}/toolkit" >&2\n'


def toolkit_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, driver: str = "") -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(NVCC.format(root=tmp_path))
    nvcc.chmod(0o755)
    (tmp_path / "toolkit" / "lib64").mkdir(parents=True)
    (tmp_path / "toolkit" / "lib64" / "libcudart.so").touch()
    monkeypatch.setenv("CUDACXX", str(nvcc))
    monkeypatch.setattr("gpu_check.machine.driver_library", lambda: driver)


def test_a_whole_toolkit_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolkit_here(tmp_path, monkeypatch, driver="/drv/libcuda.so.1")
    (tmp_path / "toolkit" / "lib64" / "libcublas.so").touch()
    found = toolkit.find()
    assert found.blas is None
    assert found.args("90")[-1] == "-DCUDA_cuda_driver_LIBRARY=/drv/libcuda.so.1"
    assert "-DGGML_CUDA_NO_VMM=OFF" in found.args("90")
    (tmp_path / "toolkit" / "lib64" / "stubs").mkdir()
    (tmp_path / "toolkit" / "lib64" / "stubs" / "libcuda.so").touch()
    assert not any("cuda_driver" in word for word in found.args("90"))
    assert "-DCMAKE_EXE_LINKER_FLAGS=-Wl,-rpath-link,/drv" in found.args("90")
    assert found.libraries == [tmp_path / "toolkit" / "lib64"]


def test_cublas_of_a_python_package_fills_the_gap_and_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toolkit_here(tmp_path, monkeypatch)
    monkeypatch.setattr(toolkit, "_packages", lambda: iter(()))
    with pytest.raises(LlamaforkError, match="has no cuBLAS"):
        toolkit.find()
    package = tmp_path / "nvidia" / "cu13"
    (package / "lib").mkdir(parents=True)
    for name in ("libcublas.so.13", "libcublasLt.so.13"):
        (package / "lib" / name).touch()
    monkeypatch.setattr(toolkit, "_packages", lambda: iter([package]))
    found = toolkit.find()
    assert f"-DCUDA_cublas_LIBRARY={package}/lib/libcublas.so.13" in found.args("90")
    assert f"-DCUDA_cublasLt_LIBRARY={package}/lib/libcublasLt.so.13" in found.args("90")
    assert f"-DCMAKE_CUDA_FLAGS=-isystem {package}/include" in found.args("90")
    assert "-DGGML_CUDA_NO_VMM=ON" in found.args("90")
    assert found.libraries[-1] == package / "lib"
    assert found.facts == {"vmm": False, "cublas": "of a Python package"}


def test_term_ends_the_check_with_its_record(tmp_path: Path) -> None:
    from gpu_check import check

    def work(ctx: Context) -> Outcome:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
        return Outcome("")

    archive.write(tmp_path / "a.tar.xz", FILES)
    code = check.check(Options("sim"), tmp_path / "a.tar.xz", tmp_path / "out", command=["run"], work=tmp_path / "work",
                       table=[Stage("a", work, lambda ctx: 1.0, 0)])  # fmt: skip
    assert code == 143
    assert json.loads((tmp_path / "out" / "record.json").read_text())["stages"][0]["state"] == "interrupted"
