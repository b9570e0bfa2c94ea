"""Finished builds: published whole, listed, chosen, removed; which one is current."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import interrupted
import pytest
from fake_tools import Fakes
from fake_upstream import World

from llamafork.build import store
from llamafork.errors import BuildError, EnvironmentFault, Exit


def test_list_use_and_prune(fakes: Fakes) -> None:
    keys = [str(fakes.world.json("build", "-C", f"-DN={n}")["key"]) for n in range(4)]
    fakes.world.ok("builds", "use", keys[0])
    listed = fakes.world.json("builds", "list")["builds"]
    assert isinstance(listed, list)
    assert {b["key"] for b in listed if b["current"]} == {keys[0]}
    assert fakes.world.json("builds", "prune", "--keep", "1", "--dry-run")["freed"] == 0
    removed = fakes.world.json("builds", "prune", "--keep", "1")["removed"]
    assert set(removed) == set(keys[1:3])  # type: ignore[call-overload]
    assert {b.key for b in store.load_all(fakes.world.paths)} == {keys[0], keys[3]}
    code, _, err = fakes.world.run("builds", "use", "nothing")
    assert code == Exit.BUILD
    assert keys[0] in err


def test_a_half_written_build_is_not_a_build(fakes: Fakes) -> None:
    fakes.world.ok("build")
    folder = store.folder(fakes.world.paths)
    (folder / ".part-x" / "bin").mkdir(parents=True)
    (folder / "broken").mkdir()
    (folder / "broken" / "build.json").write_text("{")
    assert len(store.load_all(fakes.world.paths)) == 1


def test_rebuild_makes_it_again(fakes: Fakes) -> None:
    first = fakes.world.json("build")
    again = fakes.world.json("build", "--rebuild")
    assert (again["key"], again["fresh"]) == (first["key"], True)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL], ids=["INT", "KILL"])
def test_a_build_interrupted_anywhere_and_run_again_ends_as_if_run_once(fakes: Fakes, sent: signal.Signals) -> None:
    fakes.set(FAKE_SLEEP="0.3")
    command = [sys.executable, "-m", "llamafork", "build", "--json"]
    started = time.monotonic()
    first = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    full = time.monotonic() - started
    want = fakes.world.files(Path(first["root"]) / "bin")
    for part in (0.3, 0.6, 0.9):
        for folder in ("data", "cache/work"):
            shutil.rmtree(fakes.world.home / folder)
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        time.sleep(full * part)
        os.killpg(child.pid, sent)
        child.wait()
        again = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        assert again["key"] == first["key"]
        assert fakes.world.files(Path(again["root"]) / "bin") == want
        assert [p.name for p in sorted((fakes.world.home / "data/builds").iterdir())] == ["current", first["key"]]


def test_only_a_whole_release_build_of_the_series_becomes_current_by_itself(fakes: Fakes) -> None:
    """`build --target llama-bench` became current, and `serve` then had no llama-server."""
    fakes.simulated()
    for words, why in (
        (("--target", "llama-bench"), "it has only llama-bench"),
        (("--profile", "test"), "its profile is test"),
        (("--stock",), "its kind is stock"),
    ):
        code, out, err = fakes.world.run("build", *words)
        assert code == 0, err
        assert f"not made current ({why}): llamafork builds use {Path(out.strip()).name}" in err
        assert store.current(fakes.world.paths) is None
    with pytest.raises(EnvironmentFault) as caught:
        store.resolve(fakes.world.paths)
    assert "builds use KEY" in caught.value.do
    _, out, err = fakes.world.run("build")
    assert "not made current" not in err
    whole = store.resolve(fakes.world.paths)
    assert str(whole.root) in out
    fakes.world.ok("build", "--target", "llama-bench")
    assert store.resolve(fakes.world.paths).key == whole.key


def test_a_chosen_build_stays_current_when_it_is_built_again(fakes: Fakes) -> None:
    made = fakes.world.json("build", "--target", "llama-bench")
    fakes.world.ok("builds", "use", str(made["key"]))
    _, _, err = fakes.world.run("build", "--target", "llama-bench")
    assert "not made current" not in err
    assert store.resolve(fakes.world.paths).key == made["key"]
    (fakes.world.home / "data/builds/current").unlink()
    with pytest.raises(EnvironmentFault):
        store.resolve(fakes.world.paths)


def test_a_program_that_was_not_built_is_named_with_what_was(fakes: Fakes) -> None:
    made = fakes.world.json("build", "--target", "llama-bench", "--target", "llama-cli")
    with pytest.raises(BuildError) as caught:
        store.resolve(fakes.world.paths, str(made["key"])).program("llama-server")
    assert caught.value.why == "it was made for: llama-bench, llama-cli"


def test_a_build_of_another_series_is_called_stale(fakes: Fakes) -> None:
    """The pointer to the current build is the user's, so a build of another checkout's series may be current."""
    paths = fakes.world.paths
    fakes.world.ok("build")
    fakes.world.ok("build", "--stock")
    assert store.stale(paths, store.resolve(paths)) is None
    before = store.resolve(paths)
    fakes.world.change("fourth", {"src/other.cpp": ("int other_15;", "int other_15_fourth;")})
    said = store.stale(paths, before)
    assert said is not None
    assert before.key in said
    assert str(before.info["tree"])[:12] in said
    assert store.stale(paths, store.resolve(paths, "stock")) is None
    assert said in fakes.world.run("doctor")[1]
    fakes.world.ok("build")
    assert store.stale(paths, store.resolve(paths)) is None
    (fakes.world.repo / "patches/series.lock").unlink()
    assert store.stale(paths, before) is None


def test_the_twin_has_the_profile_and_backends_of_the_current_build(fakes: Fakes) -> None:
    fakes.simulated()
    twin = str(fakes.world.json("build", "--stock")["key"])
    partial = str(fakes.world.json("build", "--stock", "--target", "llama-bench")["key"])
    tested = str(fakes.world.json("build", "--stock", "--profile", "test")["key"])
    assert store.resolve(fakes.world.paths, "stock").key == tested  # no current build: the newest
    fakes.world.ok("build")
    assert store.resolve(fakes.world.paths, "stock").key == twin
    removed = fakes.world.json("builds", "prune", "--keep", "0")["removed"]
    assert set(removed) == {partial, tested}  # type: ignore[call-overload]


def test_without_a_twin_the_newest_stock_build_is_taken(fakes: Fakes) -> None:
    fakes.simulated()
    fakes.world.ok("build")
    other = str(fakes.world.json("build", "--stock", "--profile", "test")["key"])
    assert store.resolve(fakes.world.paths, "stock").key == other
    assert fakes.world.json("builds", "prune", "--keep", "0")["removed"] == []


class Stop(BaseException):
    """An interruption at a point of the test's choice."""


def half_removed(folder: Path, *_: object, **__: object) -> None:
    """In place of rmtree: interrupted when the programs are gone and build.json is not."""
    for file in (folder / "bin").iterdir():
        file.unlink()
    raise Stop


def test_a_rebuild_interrupted_in_removing_the_old_build_leaves_a_whole_one(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(str(fakes.world.json("build")["root"]))
    want = fakes.world.files(root / "bin")
    remove = shutil.rmtree
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda at, *a, **k: (half_removed if root.name in str(at) else remove)(at))
        with pytest.raises(Stop):
            fakes.world.run("build", "--rebuild")
    assert [b.key for b in store.load_all(fakes.world.paths)] == [root.name]
    assert fakes.world.files(root / "bin") == want
    fakes.world.ok("build", "--rebuild")
    assert fakes.world.files(root / "bin") == want
    assert [p.name for p in sorted(root.parent.iterdir())] == ["current", root.name]


@pytest.mark.parametrize("at", range(4))
def test_publishing_stopped_at_any_step_leaves_old_new_or_none(
    world: World, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    target = store.folder(world.paths) / "fork-release-x"

    def staged(text: str) -> Path:
        staging = target.with_name(".part-fork-release-x")
        world.write(staging / "bin/llama-server", text)
        world.write(staging / "build.json", json.dumps({"text": text}))
        return staging

    store.publish(staged("old"), target)
    steps = iter(range(10))

    def stopping(call: Callable[..., object]) -> Callable[..., object]:
        def step(*words: object) -> object:
            if next(steps) == at:
                return half_removed(target.with_name(f".gone-.old-{target.name}")) if call is remove else half()
            return call(*words)

        return step

    def half() -> None:
        raise Stop

    remove = shutil.rmtree
    with monkeypatch.context() as patched:
        for owner, name in ((Path, "rename"), (Path, "replace"), (shutil, "rmtree")):
            patched.setattr(owner, name, stopping(getattr(owner, name)))
        with pytest.raises(Stop):
            store.publish(staged("new"), target)
    found = store.find(world.paths, target.name)
    assert (found is None) == (at == 1)
    if found is not None:
        assert found.program("llama-server").read_text() == found.info["text"] == ("old" if at == 0 else "new")
    store.publish(staged("newer"), target)
    assert (target / "bin/llama-server").read_text() == "newer"
    assert [p.name for p in target.parent.iterdir() if p.name.startswith(".old-")] == []


def test_a_prune_killed_anywhere_and_run_again_ends_as_if_run_once(fakes: Fakes) -> None:
    for n in range(3):
        fakes.world.ok("build", "-C", f"-DN={n}")
    data, start = fakes.world.home, fakes.world.base.parent / "start"
    subprocess.run(["cp", "-a", data, start], check=True)
    words = ["--quiet", "builds", "prune", "--keep", "1"]

    def state() -> list[str]:
        return sorted(str(p.relative_to(data)) for p in data.rglob("*") if "lock" not in p.name)

    def reset() -> None:
        shutil.rmtree(data)
        subprocess.run(["cp", "-a", start, data], check=True)

    assert fakes.world.run(*words)[0] == 0
    want, points = state(), 0
    assert not any(".gone" in name for name in want)
    reset()
    for at in interrupted.everywhere(words, data):
        assert fakes.world.run(*words)[0] == 0
        assert state() == want, at
        reset()
        points += 1
    assert points > 10
    assert state() == want
