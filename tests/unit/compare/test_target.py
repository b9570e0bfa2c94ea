"""What a comparison refuses: devices that are not there, a stock build that is no twin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_upstream import World

from llamafork.compare import target, verbs
from llamafork.compare.target import PLACES, Target
from llamafork.errors import EnvironmentFault, Exit, UsageError


def programs(folder: Path, devices: int, kind: str = "SIM") -> Target:
    """A server that lists so many devices, whatever it is asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"  {kind}{n}: simulated GPU (8 MiB, 8 MiB free)\\n" for n in range(devices))
    (folder / "llama-server").write_text(f"#!/bin/sh\nprintf 'Available devices:\\n{lines}'\n")
    (folder / "llama-server").chmod(0o755)
    return Target("x", folder)


@pytest.mark.parametrize(("place", "devices", "fine"), [
    ("cpu", 0, True), ("rpc2", 0, True), ("sim", 1, True), ("sim2", 2, True),
    ("sim", 0, False), ("sim2", 1, False), ("sim2-cpu-moe", 0, False),
])  # fmt: skip
def test_a_place_without_its_devices_is_refused(tmp_path: Path, place: str, devices: int, fine: bool) -> None:
    made = programs(tmp_path, devices)
    if fine:
        target.check_devices(PLACES[place], made)
    else:
        with pytest.raises(EnvironmentFault, match=f"x has no simulated devices for the place {place}"):
            target.check_devices(PLACES[place], made)


@pytest.mark.parametrize("place", ["cpu", "sim", "rpc2"])
def test_a_device_beside_those_of_a_place_is_refused(tmp_path: Path, place: str) -> None:
    """Upstream offloads large batches to whatever it sees."""
    with pytest.raises(EnvironmentFault, match=f"x sees a device that the place {place} has not"):
        target.check_devices(PLACES[place], programs(tmp_path, 1, "CUDA"))
    assert target.environment(PLACES[place])["CUDA_VISIBLE_DEVICES"] == "-1"


def build(world: World, kind: str, backends: list[str], profile: str = "release") -> str:
    key = f"{kind}-{profile}-{'-'.join(backends)}"
    root = world.home / "data/builds" / key
    info = {"schema": "llamafork.build/1", "key": key, "kind": kind, "profile": profile, "backends": backends,
            "targets": [], "made": 1, "tree": "t", "build": 1}  # fmt: skip
    world.write(root / "build.json", json.dumps(info))
    programs(root / "bin", 1)
    return key


def test_stock_is_the_twin_of_a_and_nothing_less(world: World) -> None:
    plain, sim = build(world, "fork", ["cpu"]), build(world, "fork", ["cpu", "sim"])
    build(world, "stock", ["cpu"])
    assert target.twin_of(world.paths, target.resolve(world.paths, plain)).name == "stock-release-cpu"
    with pytest.raises(UsageError, match="no stock build like fork-release-cpu-sim") as error:
        target.twin_of(world.paths, target.resolve(world.paths, sim))
    assert "llamafork build --stock --backend sim" in error.value.do
    build(world, "stock", ["cpu", "sim"])
    assert target.twin_of(world.paths, target.resolve(world.paths, sim)).name == "stock-release-cpu-sim"


def test_a_folder_of_programs_is_compared_with_what_stock_there_is(world: World, tmp_path: Path) -> None:
    build(world, "stock", ["cpu"])
    assert target.twin_of(world.paths, programs(tmp_path / "theirs", 0)).name == "stock-release-cpu"


@pytest.mark.parametrize("word", ["FOO", "=x", ""])
def test_a_variable_that_sets_nothing_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match="sets nothing"):
        verbs.variables([word])
    assert verbs.variables(["A=b=c", "D="]) == {"A": "b=c", "D": ""}


@pytest.mark.parametrize("there", [True, False])
def test_a_program_that_fails_or_is_not_there_is_a_row(world: World, tmp_path: Path, there: bool) -> None:
    """Identity cannot run; the reports are written all the same."""
    ours, theirs = programs(tmp_path / "a", 0), programs(tmp_path / "b", 0)
    for one in (ours, theirs) if there else ():
        (one.folder / "llama-results").write_text("#!/bin/sh\necho no such model >&2; exit 3\n")
        (one.folder / "llama-results").chmod(0o755)
    model = tmp_path / "m.gguf"
    world.ok("make-model", str(model), "--layers", "1", "--embd", "32", "--ff", "32", "--vocab", "260")
    xml = tmp_path / "r.xml"
    words = ["compare", str(ours.folder), str(theirs.folder), "--model", str(model), "--on", "cpu", "--junit", str(xml)]
    code, out, err = world.run(*words)
    assert code == Exit.REGRESSION, err
    assert "failed" in out
    assert ("no such model" if there else "has no llama-results") in xml.read_text()
    null = tmp_path / "null"
    null.symlink_to("/dev/null")
    code, out, err = world.run(*words[:-1], str(null), "--markdown", str(null))
    assert code == Exit.REGRESSION, err
    assert null.is_char_device()
    for option in ("--junit", "--markdown"):
        code, out, err = world.run(*words, option, str(tmp_path))
        assert (code, out) == (Exit.USAGE, ""), err
        assert "is a folder" in err
    for wrong in ("--threshold", "--max-kl"):
        for value in ("nan", "-1", "5", "x"):
            with pytest.raises(SystemExit, match="2"):
                world.run(*words, wrong, value)
