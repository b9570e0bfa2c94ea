"""Building with fake tools: keys, reuse, failures. Real builds are in tests/integration."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from fake_tools import Fakes

from llamafork.build import make, store
from llamafork.errors import Exit
from llamafork.source import prepare, worktree


def test_a_build_is_kept_and_found_again(fakes: Fakes) -> None:
    first = fakes.world.json("build")
    assert first["fresh"] is True
    assert first["build"] == 11434
    again = fakes.world.json("build")
    assert (again["fresh"], again["key"]) == (False, first["key"])
    assert len(fakes.configured()) == 1
    assert str(first["root"]) in fakes.world.ok("build")


def test_fork_and_stock_are_twins_with_other_keys(fakes: Fakes) -> None:
    fork, stock = fakes.world.json("build"), fakes.world.json("build", "--stock")
    assert fork["tree"] != stock["tree"]
    assert fork["key"] != stock["key"]
    ours, theirs = (set(words) for words in fakes.configured())
    assert {w for w in ours ^ theirs if w.startswith("-D")} == set()
    assert store.resolve(fakes.world.paths).key == fork["key"]
    assert store.resolve(fakes.world.paths, "stock").key == stock["key"]


def test_options_change_the_key_and_reach_cmake_last(fakes: Fakes) -> None:
    plain = fakes.world.json("build")
    other = fakes.world.json("build", "-C", "-DGGML_NATIVE=OFF", "-C", "-DX=a b")
    assert plain["key"] != other["key"]
    assert fakes.configured()[-1][-2:] == ["-DGGML_NATIVE=OFF", "-DX=a b"]


def test_no_ccache_takes_effect_on_a_configured_tree(fakes: Fakes) -> None:
    """A7: the launcher is always passed, so turning it off and on is not lost in the cache of the same folder."""
    fakes.script("ccache", "#!/bin/sh\necho ccache version 4.9\n")
    made = [fakes.world.json("build", "--rebuild", *words) for words in ((), ("--no-ccache",), ())]
    assert len({str(m["key"]) for m in made}) == 1
    assert len({str(m["work"]) for m in made}) == 1
    assert [f.is_dir() for f in (fakes.world.home / "cache/work").glob("fork-*")].count(True) == 1
    launchers = [[w for w in words if "CXX_COMPILER_LAUNCHER" in w] for words in fakes.configured()]
    with_it = [f"-DCMAKE_CXX_COMPILER_LAUNCHER={fakes.bin}/ccache"]
    assert launchers == [with_it, ["-DCMAKE_CXX_COMPILER_LAUNCHER="], with_it]


def test_going_offline_configures_the_same_folder_without_starting_over(fakes: Fakes) -> None:
    first = fakes.world.json("build")
    code, _, err = fakes.world.run("build", "--rebuild", "--offline")
    assert code == 0, err
    assert "from scratch" not in err
    assert "-DLLAMA_USE_PREBUILT_UI=OFF" in fakes.configured()[-1]
    assert store.resolve(fakes.world.paths).info["work"] == first["work"]


def test_a_foreign_configuration_is_cleared_only_in_our_own_folder(fakes: Fakes) -> None:
    """A7: another generator or path in the build folder: configure afresh there, touch nothing else."""
    fakes.world.ok("build")
    store.remove(store.resolve(fakes.world.paths))
    work = next((fakes.world.home / "cache/work").glob("fork-*/build"))
    (work / "CMakeCache.txt").write_text("CMAKE_GENERATOR:INTERNAL=Unix Makefiles\nCMAKE_HOME_DIRECTORY=/old\n")
    stamp = json.loads((work.parent / "configured.json").read_text())
    (work.parent / "configured.json").write_text(json.dumps(stamp | {"generator": "Unix Makefiles"}))
    keep = fakes.world.base / "keep.txt"
    keep.write_text("mine")
    _, _, err = fakes.world.run("build")
    assert "configuring from scratch" in err
    assert (work / "CMakeCache.txt").read_text() == "x"
    assert keep.read_text() == "mine"


def test_the_first_compiler_error_is_shown_and_the_log_named(fakes: Fakes) -> None:
    fakes.set(FAKE_FAIL="compile")
    code, _, err = fakes.world.run("build")
    assert code == Exit.BUILD
    assert "ggml.c:12:5: error: 'nonsense' undeclared" in err
    assert "a later one" not in err
    log = next((fakes.world.home / "state/logs").glob("build-*.log"))
    assert str(log) in err
    assert "a later one" in log.read_text()
    assert store.load_all(fakes.world.paths) == []


def test_a_failed_configure_says_what_cmake_missed(fakes: Fakes) -> None:
    fakes.set(FAKE_FAIL="configure")
    code, _, err = fakes.world.run("build")
    assert code == Exit.BUILD
    assert "Could not find Frobnicate" in err


def test_a_missing_backend_is_a_failed_build(fakes: Fakes) -> None:
    fakes.set(FAKE_BACKENDS="")
    code, _, err = fakes.world.run("build")
    assert code == Exit.BUILD
    assert "backend rpc was asked for and is not in the result" in err
    assert store.load_all(fakes.world.paths) == []


def test_a_program_with_another_number_is_a_failed_build(fakes: Fakes) -> None:
    """B7: never build 0 or 1."""
    fakes.set(FAKE_NUMBER="1")
    code, _, err = fakes.world.run("build")
    assert code == Exit.BUILD
    assert "calls itself build 1" in err


def test_strange_paths_build_too(fakes: Fakes) -> None:
    """C12: spaces and other scripts in the home and TMPDIR."""
    for name in ("мой dir 空", "tmp dir"):
        (fakes.world.base / name).mkdir()
    fakes.set(LLAMAFORK_HOME=str(fakes.world.base / "мой dir 空"), TMPDIR=str(fakes.world.base / "tmp dir"))
    made = fakes.world.json("build")
    assert Path(str(made["root"])).is_dir()


def test_edits_in_the_work_tree_are_built_only_when_asked(fakes: Fakes) -> None:
    fakes.world.ok("patch", "apply")
    plain = fakes.world.json("build")
    fakes.world.edit("src/main.cpp", "int line_7;", "int edited;")
    code, _, err = fakes.world.run("build")
    assert code == 0
    assert "edits that are not in the series" in err
    edited = fakes.world.json("build", "--work-tree")
    assert edited["tree"] != plain["tree"]
    assert edited["kind"] == "tree"


def test_an_edit_of_the_same_size_in_the_second_of_the_checkout_is_seen(fakes: Fakes) -> None:
    fakes.world.ok("patch", "apply")
    tree = worktree.look(fakes.world.paths)
    assert tree is not None
    file = tree.path / "src/main.cpp"
    time.sleep(1 - time.time() % 1)
    file.write_bytes(file.read_bytes())
    tree.repo.run("update-index", "--refresh")
    fakes.world.edit("src/main.cpp", "int line_7;", "int edited;")
    time.sleep(1.1)
    assert tree.snapshot() != tree.repo.tree("HEAD")


@pytest.mark.parametrize(
    ("log", "first"),
    [
        ("[1/2] x\nfoo.cpp:3:1: error: bad\nbar.cpp:1:1: error: worse\n", "foo.cpp:3:1: error: bad"),
        ("a.cu(12): error: no\n", "a.cu(12): error: no"),
        ("ld: a.o: undefined reference to `f'\n", "ld: a.o: undefined reference to `f'"),
        ("all is well\n", ""),
        ("nvcc fatal   : Unsupported gpu architecture\n", "nvcc fatal   : Unsupported gpu architecture"),
    ],
)
def test_first_error(log: str, first: str) -> None:
    assert make.first_error(log) == first


def test_a_killed_build_leaves_no_compiler_running(tmp_path: Path) -> None:
    """With real CMake and its real generator: the wrapper alone is killed, its whole group must end."""
    marker = f"{tmp_path}/only-here"
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(x NONE)\n"
        f'add_custom_target(all_day ALL COMMAND sh -c "sleep 60; true {marker}" VERBATIM)\n'
    )
    subprocess.run(["cmake", "-S", tmp_path, "-B", tmp_path / "b"], check=True, capture_output=True)
    code = (
        "import pathlib, sys; from llamafork import proc; "
        f"proc.stream(['cmake', '--build', '{tmp_path}/b'], log=pathlib.Path('{tmp_path}/log'))"
    )
    wrapper = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)

    def running() -> list[int]:
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if marker in " ".join(process.info["cmdline"] or []) and process.pid != wrapper.pid:
                found.append(process.pid)
        return found

    def within(seconds: float, what: Callable[[], object]) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if what():
                return True
            time.sleep(0.05)
        return False

    assert within(10, running)
    wrapper.kill()
    wrapper.wait()
    assert within(5, lambda: not running())


def test_offline_and_launchers_keep_the_key_and_compiler_flags_change_it(fakes: Fakes) -> None:
    def key(*words: str) -> object:
        return fakes.world.json("build", "--dry-run", *words)["key"]

    plain = key()
    assert key("--offline") == plain
    assert key("--no-ccache") == plain
    for name, value in (("CXXFLAGS", "-O0"), ("LDFLAGS", "-s"), ("CMAKE_TOOLCHAIN_FILE", "/x.cmake")):
        fakes.set(**{name: value})
        assert key() != plain, name
        fakes.env.delenv(name)
    assert key() == plain


def test_assets_of_another_build_are_called_that() -> None:
    log = "-- UI: downloading from b11434: https://x\n-- UI: downloading from latest: https://x\n"
    assert make._prebuilt(log, 11434).startswith("prebuilt assets of another build (latest)")
    assert make._prebuilt(log.splitlines()[0], 11434) == "prebuilt assets of b11434"


def test_a_quoted_source_line_is_not_a_full_disk() -> None:
    text = 'a.cpp:3:1: error: bad\n    3 |   error("No space left on device");\n'
    assert not make._error_says(text, "No space left on device")
    assert make._error_says("fatal error: error writing to /x: No space left on device", "No space left on device")


def test_a_stock_build_with_sim_is_the_pin_plus_that_change_and_what_it_needs(fakes: Fakes) -> None:
    world, message = fakes.world, fakes.world.repo / "patches/third/MESSAGE"
    message.write_text(message.read_text().replace("Credit: none", "Depends: first\nBackend: sim\nCredit: none"))
    plain = prepare.stock(world.paths, ("cpu", "rpc"))
    assert plain.applied == ()
    assert plain.tree == plain.base.tree
    made = prepare.stock(world.paths, ("cpu", "sim"))
    assert [a.change.name for a in made.applied] == ["first", "third"]
    changed = made.repo.text("diff", "--name-only", plain.tree, made.tree).split()
    assert changed == ["src/first.cpp", "src/main.cpp", "src/other.cpp", "src/third.h"]
    main = made.repo.text("cat-file", "blob", f"{made.tree}:src/main.cpp")
    assert "line_3_first" in main
    assert "line_30_second" not in main
    fakes.simulated()
    assert world.json("build", "--stock")["tree"] == plain.base.tree
    assert world.json("build", "--stock", "--backend", "sim")["tree"] == made.tree


def test_a_simulated_device_that_does_not_show_up_is_a_failed_build(fakes: Fakes) -> None:
    fakes.set(FAKE_BACKENDS="rpc sim")
    code, _, err = fakes.world.run("build", "--backend", "sim")
    assert code == Exit.BUILD
    assert "the simulated devices do not show up" in err
