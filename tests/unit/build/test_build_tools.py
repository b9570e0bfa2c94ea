"""What a build is made with: gates, CUDA, options, jobs, doctor."""

from __future__ import annotations

import os

import pytest
from fake_tools import Fakes, nvcc
from hypothesis import given
from hypothesis import strategies as st

from llamafork.build import cuda, make, request, store, toolchain
from llamafork.build.request import Request, Tools
from llamafork.errors import EnvironmentFault, Exit, UsageError


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


def test_a_launcher_in_the_environment_is_used_once_and_not_before_nvcc(fakes: Fakes) -> None:
    """A7: sccache that fails on nvcc; launcher set twice."""
    fakes.set(CMAKE_CXX_COMPILER_LAUNCHER="/opt/sccache", CMAKE_C_COMPILER_LAUNCHER="/opt/sccache")
    fakes.world.ok("build")
    words = fakes.configured()[-1]
    assert [w for w in words if "CXX_COMPILER_LAUNCHER" in w] == ["-DCMAKE_CXX_COMPILER_LAUNCHER=/opt/sccache"]
    tools = Tools("cmake", "3", "Ninja", "ninja", "cc", "c++", "gcc", ccache="/x/ccache", launcher="/opt/sccache")
    args, _ = request.cmake_args(Request("fork", ("cuda",), cuda_arch="86"), tools, build=2, tree="t", has_option={})
    assert "-DCMAKE_CUDA_COMPILER_LAUNCHER=" in args


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


def test_offline_cannot_make_the_ui(fakes: Fakes) -> None:
    assert fakes.world.run("build", "--offline", "--ui", "build", "--dry-run")[0] == Exit.USAGE


@pytest.mark.parametrize(("level", "shown"), [("64", "64"), ("0", ""), ("many", ""), ("²", "")])
def test_the_parallel_level_overrides_the_rule_and_nonsense_does_not(
    fakes: Fakes, monkeypatch: pytest.MonkeyPatch, level: str, shown: str
) -> None:
    monkeypatch.setattr(make, "cores", lambda: 2)
    monkeypatch.setattr(make, "ram_gib", lambda: 9.0)
    fakes.set(CMAKE_BUILD_PARALLEL_LEVEL=level)
    fakes.world.ok("build")
    assert jobs_of(fakes) == (shown or "2")
    fakes.world.ok("build", "--rebuild", "-j", "5")
    assert jobs_of(fakes) == "5"
    _, out, _ = fakes.world.run("doctor")
    if shown:
        assert f"{shown} C++, {shown} nvcc (CMAKE_BUILD_PARALLEL_LEVEL={shown})" in out
    else:
        assert "2 C++, 2 nvcc (2 cores, 9.0 GiB available)" in out
        assert f"CMAKE_BUILD_PARALLEL_LEVEL={level} is not a number of jobs and is ignored" in out


def jobs_of(fakes: Fakes) -> str:
    words = next(x.split("\0") for x in reversed(fakes.log.read_text().splitlines()) if "--build" in x)
    return words[words.index("--parallel") + 1]
