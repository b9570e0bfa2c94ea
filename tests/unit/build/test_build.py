"""Building with fake tools: keys, gates, reuse, failures. Real builds are in tests/integration."""

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

import psutil
import pytest
from fake_upstream import World
from hypothesis import given
from hypothesis import strategies as st

from llamafork.build import cuda, make, request, store, toolchain
from llamafork.build.request import Request, Tools
from llamafork.errors import EnvironmentFault, Exit, UsageError
from llamafork.source import worktree

CMAKE = """#!{python}
import os, pathlib, sys, time
words = sys.argv[1:]
log = pathlib.Path(os.environ["FAKE_LOG"])
log.open("a").write("\\0".join(words) + "\\n")
if words == ["--version"]:
    print("cmake version " + os.environ.get("FAKE_CMAKE_VERSION", "3.28.1"))
elif "--build" in words:
    time.sleep(float(os.environ.get("FAKE_SLEEP", "0")))
    build = pathlib.Path(words[words.index("--build") + 1])
    if os.environ.get("FAKE_FAIL") == "compile":
        print("[1/9] Building CXX object a.o")
        print("/src/ggml/ggml.c:12:5: error: 'nonsense' undeclared")
        print("/src/other.c:1:1: error: a later one")
        sys.exit(1)
    args = (build / "args").read_text().split("\\0")
    number = next(a.split("=")[1] for a in args if a.startswith("-DLLAMA_BUILD_NUMBER="))
    out = build / "bin"
    out.mkdir(exist_ok=True)
    server = out / "llama-server"
    number = os.environ.get("FAKE_NUMBER", number)
    server.write_text("#!{python}\\nprint('version: 0 (build " + number + ", commit x)')\\n")
    server.chmod(0o755)
    for backend in os.environ.get("FAKE_BACKENDS", "rpc").split():
        (out / f"libggml-{{backend}}.so").write_text("x")
else:
    if os.environ.get("FAKE_FAIL") == "configure":
        print("CMake Error at CMakeLists.txt:3 (find_package):\\n  Could not find Frobnicate\\n")
        sys.exit(1)
    build = pathlib.Path(words[words.index("-B") + 1])
    build.mkdir(exist_ok=True)
    time.sleep(float(os.environ.get("FAKE_SLEEP", "0")))
    (build / "args").write_text("\\0".join(words))
    (build / "CMakeCache.txt").write_text("x")
"""
NVCC = """#!{python}
import os, sys
if "--version" in sys.argv:
    print("Cuda compilation tools, release " + os.environ.get("FAKE_NVCC", "12.4") + ", V12.4.1")
elif "--dryrun" in sys.argv:
    print("#$ TOP={root}", file=sys.stderr)
else:
    host = sys.argv[sys.argv.index("-ccbin") + 1] if "-ccbin" in sys.argv else ""
    mood = os.environ.get("FAKE_NVCC_MOOD", "")
    if mood == "gnu" and not host.endswith("-13"):
        print("host_config.h:143:2: error: #error -- unsupported GNU version! later than 13", file=sys.stderr)
        sys.exit(1)
    if mood == "glibc":
        said = "exception specification is incompatible with that of previous function"
        print(f"mathcalls.h(206): error: {{said}} rsqrt", file=sys.stderr)
        sys.exit(1)
"""


class Fakes:
    """Fake cmake, ninja and friends in front of PATH."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.env, self.bin = world, monkeypatch, world.base / "bin"
        self.log = world.base / "cmake.log"
        self.script("cmake", CMAKE.format(python=sys.executable))
        self.script("ninja", "#!/bin/sh\necho 1.11.1\n")
        monkeypatch.setenv("PATH", f"{self.bin}:/usr/bin:/bin")
        monkeypatch.setenv("FAKE_LOG", str(self.log))
        for name in ("CC", "CXX", "CMAKE_ARGS", "CMAKE_GENERATOR", "CUDACXX", "CUDAARCHS"):
            monkeypatch.delenv(name, raising=False)

    def script(self, name: str, text: str) -> Path:
        file = self.bin / name
        self.world.write(file, text)
        file.chmod(0o755)
        return file

    def set(self, **values: str) -> None:
        for name, value in values.items():
            self.env.setenv(name, value)

    def configured(self) -> list[list[str]]:
        return [x.split("\0") for x in self.log.read_text().splitlines() if "-S" in x.split("\0")]


@pytest.fixture
def fakes(three: World, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(three, monkeypatch)


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
    """A7: the launcher is always passed, so turning it off is not lost in CMake's cache."""
    fakes.script("ccache", "#!/bin/sh\necho ccache version 4.9\n")
    fakes.world.ok("build")
    assert f"-DCMAKE_CXX_COMPILER_LAUNCHER={fakes.bin}/ccache" in fakes.configured()[-1]
    store.remove(store.resolve(fakes.world.paths))
    fakes.world.ok("build", "--no-ccache")
    assert "-DCMAKE_CXX_COMPILER_LAUNCHER=" in fakes.configured()[-1]
    assert len(fakes.configured()) == 2


def test_a_launcher_in_the_environment_is_used_once_and_not_before_nvcc(fakes: Fakes) -> None:
    """A7: sccache that fails on nvcc; launcher set twice."""
    fakes.set(CMAKE_CXX_COMPILER_LAUNCHER="/opt/sccache", CMAKE_C_COMPILER_LAUNCHER="/opt/sccache")
    fakes.world.ok("build")
    words = fakes.configured()[-1]
    assert [w for w in words if "CXX_COMPILER_LAUNCHER" in w] == ["-DCMAKE_CXX_COMPILER_LAUNCHER=/opt/sccache"]
    tools = Tools("cmake", "3", "Ninja", "ninja", "cc", "c++", "gcc", ccache="/x/ccache", launcher="/opt/sccache")
    args, _ = request.cmake_args(Request("fork", ("cuda",), cuda_arch="86"), tools, build=2, tree="t", has_option={})
    assert "-DCMAKE_CUDA_COMPILER_LAUNCHER=" in args


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


def test_an_old_cmake_is_named_with_its_path(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A5: the version table is checked first, with the found path; there may be two."""
    fakes.set(FAKE_CMAKE_VERSION="3.10.2")
    monkeypatch.setattr(toolchain, "candidates", lambda name, module="": iter([str(fakes.bin / name)]))
    with pytest.raises(EnvironmentFault) as caught:
        toolchain.best("cmake", "cmake")
    assert f"{fakes.bin}/cmake (3.10.2)" in caught.value.why


def test_a_newer_cmake_behind_an_old_one_is_used(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.script("old/cmake", "#!/bin/sh\necho cmake version 3.10.2\n")
    monkeypatch.setattr(
        toolchain, "candidates", lambda *_: iter([str(fakes.bin / "old/cmake"), str(fakes.bin / "cmake")])
    )
    assert toolchain.best("cmake", "cmake").path == str(fakes.bin / "cmake")


def test_missing_openssl_is_said_and_turned_off(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A1: the option goes off only if the tree has it; the lost feature is named; nothing changes with the headers."""
    monkeypatch.setattr(toolchain, "openssl", lambda _: False)
    _, _, err = fakes.world.run("build")
    assert "downloads over https" in err
    assert "-DLLAMA_OPENSSL=OFF" in fakes.configured()[-1]
    monkeypatch.setattr(toolchain, "openssl", lambda _: True)
    fakes.world.ok("build")
    assert not any("LLAMA_OPENSSL" in w for w in fakes.configured()[-1])


def test_an_option_the_tree_does_not_have_is_not_passed(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "openssl", lambda _: False)
    text = (fakes.world.upstream / "CMakeLists.txt").read_text()
    (fakes.world.upstream / "CMakeLists.txt").write_text(text.replace("option(LLAMA_OPENSSL", "option(OTHER"))
    fakes.world.ok("source", "clean", "--work-tree")
    fakes.world.ok("patch", "refresh")
    fakes.world.ok("build")
    assert not any("LLAMA_OPENSSL" in w for w in fakes.configured()[-1])


@pytest.mark.parametrize("word", ["{CURL_FLAG}", "-DX={VALUE}", "GGML_CUDA=ON"])
def test_a_bad_cmake_argument_is_a_usage_error(fakes: Fakes, word: str) -> None:
    code, _, err = fakes.world.run("build", f"-C={word}")
    assert code == Exit.USAGE
    assert "-C" in err


def nvcc(fakes: Fakes, **mood: str) -> Tools:
    root = fakes.world.base / "toolkit"
    fakes.world.write(root / "lib64/libcublas.so", "x")
    fakes.script("nvcc", NVCC.format(python=sys.executable, root=root))
    fakes.world.write(root / "bin/nvcc", (fakes.bin / "nvcc").read_text())
    (root / "bin/nvcc").chmod(0o755)
    fakes.set(**mood)
    return Tools("cmake", "3.28", "Ninja", "ninja", "/usr/bin/cc", "/usr/bin/c++", "gcc (Debian) 16.1 | x86 | 0")


def test_a_gcc_that_nvcc_refuses_is_replaced_by_one_it_takes(fakes: Fakes) -> None:
    """A2.1: an acceptable g++-13 beside it becomes the host compiler, and it is said."""
    tools = nvcc(fakes, FAKE_NVCC_MOOD="gnu")
    fakes.script("g++-13", "#!/bin/sh\n")
    made = cuda.add_to(tools, fakes.world.paths, offline=True)
    assert made.cuda_host == str(fakes.bin / "g++-13")
    args, _ = request.cmake_args(Request("fork", ("cuda",), cuda_arch="86"), made, build=2, tree="t", has_option={})
    assert f"-DCMAKE_CUDA_HOST_COMPILER={made.cuda_host}" in args
    assert not any("unsupported" in a for a in args)


def test_a_gcc_that_nvcc_refuses_alone_names_both_versions(fakes: Fakes) -> None:
    tools = nvcc(fakes, FAKE_NVCC_MOOD="gnu")
    with pytest.raises(EnvironmentFault) as caught:
        cuda.add_to(tools, fakes.world.paths, offline=True)
    assert "nvcc 12.4" in caught.value.what
    assert "16.1" in caught.value.what


def test_a_glibc_that_cuda_does_not_know_is_called_that(fakes: Fakes) -> None:
    """A2.2: no choice of gcc helps; say so."""
    tools = nvcc(fakes, FAKE_NVCC_MOOD="glibc")
    with pytest.raises(EnvironmentFault) as caught:
        cuda.add_to(tools, fakes.world.paths, offline=True)
    assert "CUDA 12.4 does not work with glibc" in caught.value.what
    assert "another gcc will not help" in caught.value.why


def test_an_old_nvcc_is_refused_with_its_path(fakes: Fakes) -> None:
    """A5: nvcc without C++17."""
    nvcc(fakes, FAKE_NVCC="10.1")
    with pytest.raises(EnvironmentFault) as caught:
        cuda.find_nvcc()
    assert "10.1" in caught.value.what
    assert str(fakes.bin / "nvcc") in caught.value.why


def test_architectures_come_from_the_user_or_the_gpus_and_never_from_native(fakes: Fakes) -> None:
    """A5: no `native` with old CMake or without a GPU: an explicit list, or a fault that says how to give one."""
    assert cuda.architectures("86;89-real, 90a") == "86;89-real;90a"
    with pytest.raises(UsageError):
        cuda.architectures("native")
    with pytest.raises(EnvironmentFault) as caught:
        cuda.architectures("")
    assert "--cuda-arch" in caught.value.do
    fakes.script("nvidia-smi", "#!/bin/sh\nprintf '8.6\\n12.0\\n8.6\\n'\n")
    assert cuda.architectures("") == "86;120"


def test_cuda_is_never_replaced_by_cpu(fakes: Fakes) -> None:
    nvcc(fakes, FAKE_NVCC_MOOD="glibc")
    code, _, err = fakes.world.run("build", "--backend", "cuda", "--cuda-arch", "86")
    assert code == Exit.ENVIRONMENT
    assert "CUDA" in err
    assert store.load_all(fakes.world.paths) == []


def test_strange_paths_build_too(fakes: Fakes) -> None:
    """C12: spaces and other scripts in the home and TMPDIR."""
    for name in ("мой dir 空", "tmp dir"):
        (fakes.world.base / name).mkdir()
    fakes.set(LLAMAFORK_HOME=str(fakes.world.base / "мой dir 空"), TMPDIR=str(fakes.world.base / "tmp dir"))
    made = fakes.world.json("build")
    assert Path(str(made["root"])).is_dir()


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


def test_doctor_lists_what_build_uses(fakes: Fakes) -> None:
    fakes.set(LLAMA_ARG_API_KEY="geheim", GGML_CUDA_NO_PINNED="1")
    fakes.world.ok("build")
    code, out, _ = fakes.world.run("doctor")
    assert code == 0, out
    assert "3.28.1" in out
    assert "GGML_CUDA_NO_PINNED=1" in out
    assert "geheim" not in out
    fakes.set(FAKE_CMAKE_VERSION="1.0")
    os.environ["PATH"] = str(fakes.bin)
    code, out, _ = fakes.world.run("doctor")
    assert code == Exit.ENVIRONMENT


@given(cores=st.integers(1, 512), ram=st.floats(0, 4096), cuda_too=st.booleans())
def test_jobs_never_exceed_cores_or_ram(cores: int, ram: float, cuda_too: bool) -> None:
    jobs = request.bounded_jobs(cores, ram, cuda=cuda_too)
    assert 1 <= jobs <= cores
    assert jobs == 1 or jobs * (3 if cuda_too else 1) <= ram


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


def test_cmake_args_are_read_as_a_shell_would(fakes: Fakes) -> None:
    fakes.set(CMAKE_ARGS="-DCMAKE_CXX_FLAGS='-O2 -g' -DY=1")
    assert "-DCMAKE_CXX_FLAGS=-O2 -g" in fakes.world.json("build", "--dry-run")["args"]  # type: ignore[operator]
    fakes.set(CMAKE_ARGS="-DX='open")
    assert fakes.world.run("build", "--dry-run")[0] == Exit.USAGE


@pytest.mark.parametrize("words", [("-j", "0"), ("-j", "-5"), ("--target", ""), ("--backend", "nope")])
def test_senseless_options_are_usage_errors(fakes: Fakes, words: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as caught:
        fakes.world.run("build", "--dry-run", *words)
    assert caught.value.code == Exit.USAGE


def test_rebuild_makes_it_again(fakes: Fakes) -> None:
    first = fakes.world.json("build")
    again = fakes.world.json("build", "--rebuild")
    assert (again["key"], again["fresh"]) == (first["key"], True)


def test_offline_cannot_make_the_ui(fakes: Fakes) -> None:
    assert fakes.world.run("build", "--offline", "--ui", "build", "--dry-run")[0] == Exit.USAGE


def test_assets_of_another_build_are_called_that() -> None:
    log = "-- UI: downloading from b11434: https://x\n-- UI: downloading from latest: https://x\n"
    assert make._prebuilt(log, 11434).startswith("prebuilt assets of another build (latest)")
    assert make._prebuilt(log.splitlines()[0], 11434) == "prebuilt assets of b11434"


def test_a_quoted_source_line_is_not_a_full_disk() -> None:
    text = 'a.cpp:3:1: error: bad\n    3 |   error("No space left on device");\n'
    assert not make._error_says(text, "No space left on device")
    assert make._error_says("fatal error: error writing to /x: No space left on device", "No space left on device")
