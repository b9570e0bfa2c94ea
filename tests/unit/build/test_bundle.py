"""CUDA libraries of a toolkit that is only in the cache go into the build; everything in the cache may be deleted."""

from __future__ import annotations

import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import interrupted
import pytest
from fake_tools import Fakes, nvcc
from fake_upstream import World

from llamafork import pip, proc
from llamafork.build import bundle, cuda, request
from llamafork.build.request import Request, Tools

CUDA = Request("fork", ("cuda",), cuda_arch="86")


def args(tools: Tools) -> list[str]:
    return request.cmake_args(CUDA, tools, build=2, tree="t", has_option={})[0]


def composed(world: World, version: str = "12.4") -> Path:
    """A toolkit in the cache as if fetched: cuBLAS needs cuBLASLt, and there is one nobody needs."""
    root = world.paths.cache / "cuda" / version
    for name, inside in (
        ("libcudart.so.13", ""),
        ("libcublas.so.13", "libcublasLt.so.13\0"),
        ("libcublasLt.so.13", ""),
        ("libcupti.so.13", ""),
    ):
        world.write(root / "lib" / name, f"ELF\0{name}\0{inside}")
    (root / "lib/libcublas.so").symlink_to("libcublas.so.13")
    world.write(root / ".complete", "")
    return root


def test_what_is_chosen_is_what_is_named_and_what_that_names() -> None:
    inside = {"a": ["b"], "b": ["a", "c"], "c": [], "d": ["e"], "e": []}
    assert bundle.choose(["a"], inside.__getitem__, ()) == ["a", "b", "c"]
    assert bundle.choose(["a", "d"], inside.__getitem__, {"b"}) == ["a", "d", "e"]
    assert bundle.choose([], inside.__getitem__, ()) == []


def test_a_name_counts_only_with_its_end(tmp_path: Path) -> None:
    (tmp_path / "lib").write_bytes(b"\0libcublas.so.13\0libcudart.so.130\0")
    (tmp_path / "empty").write_bytes(b"")
    assert bundle.names_in(tmp_path / "lib", ["libcublas.so.13", "libcudart.so.13"]) == {"libcublas.so.13"}
    assert bundle.names_in(tmp_path / "empty", ["x"]) == set()


@pytest.mark.parametrize("linkable", [True, False])
def test_libraries_are_linked_or_copied_and_outlive_the_cache(
    world: World, monkeypatch: pytest.MonkeyPatch, linkable: bool
) -> None:
    root, into = composed(world), world.base / "bin"
    world.write(into / "libggml-cuda.so", "ELF\0libcudart.so.13\0libcublas.so.13\0")
    world.write(into / "llama-server", "ELF\0libggml-cuda.so\0")

    def refuse(*_: object) -> None:
        raise OSError("another file system")

    if not linkable:
        monkeypatch.setattr("os.link", refuse)
    assert bundle.bring(root / "lib", into) == ["libcublas.so.13", "libcublasLt.so.13", "libcudart.so.13"]
    assert ((into / "libcublas.so.13").stat().st_nlink == 2) is linkable
    shutil.rmtree(root)
    assert (into / "libcudart.so.13").read_text() == "ELF\0libcudart.so.13\0"


def test_a_link_of_the_toolkit_to_the_systems_file_becomes_the_file(world: World) -> None:
    root, into = composed(world), world.base / "bin"
    (root / "lib/libcudart.so.13").replace(world.base / "system.so")
    (root / "lib/libcudart.so.13").symlink_to(world.base / "system.so")
    world.write(into / "libggml-cuda.so", "libcudart.so.13\0")
    bundle.bring(root / "lib", into)
    assert not (into / "libcudart.so.13").is_symlink()


def test_the_run_path_leads_to_the_systems_toolkit_and_never_into_the_cache(fakes: Fakes) -> None:
    tools = nvcc(fakes)
    own = cuda.add_to(tools, fakes.world.paths, offline=True)
    system = fakes.world.base / "toolkit/lib64"
    assert f"-DCMAKE_INSTALL_RPATH=$ORIGIN;{system}" in args(own)
    assert not any("rpath-link" in a for a in args(own))
    (system / "libcublas.so").unlink()
    root = composed(fakes.world)
    (root / ".complete").write_text(str(fakes.world.base / "toolkit"))
    fakes.world.write(root / "bin/nvcc", (fakes.bin / "nvcc").read_text())
    (root / "bin/nvcc").chmod(0o755)
    mixed = cuda.add_to(tools, fakes.world.paths, offline=True)
    assert mixed.cuda_copy
    assert "-DCMAKE_INSTALL_RPATH=$ORIGIN" in args(mixed)
    assert f"-DCMAKE_EXE_LINKER_FLAGS_RELEASE=-Wl,-rpath-link,{root}/lib" in args(mixed)
    spaced = args(replace(mixed, cuda_lib="/my dir/lib"))
    assert "-DCMAKE_EXE_LINKER_FLAGS_INIT=-Wl,-rpath-link,'/my dir/lib'" in spaced


def test_a_cuda_build_has_the_libraries_it_needs_in_it(fakes: Fakes) -> None:
    nvcc(fakes)
    (fakes.world.base / "toolkit/lib64/libcublas.so").unlink()
    root = composed(fakes.world)
    (root / ".complete").write_text(str(fakes.world.base / "toolkit"))
    fakes.world.write(root / "bin/nvcc", (fakes.bin / "nvcc").read_text())
    (root / "bin/nvcc").chmod(0o755)
    fakes.set(FAKE_BACKENDS="rpc cuda", FAKE_NEEDS="libcudart.so.13,libcublas.so.13,")
    made = fakes.world.json("build", "--backend", "cuda", "--cuda-arch", "86")
    there = {f.name for f in (Path(str(made["root"])) / "bin").iterdir()}
    assert {"libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13"} <= there
    assert "libcupti.so.13" not in there


def wheel(folder: Path) -> None:
    """What pip would download: cuBLAS with a header and a library."""
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "nvidia_cublas-12.4.5-py3-none-any.whl", "w") as made:
        for name in ("include/cublas_v2.h", "lib/libcublas.so.12", "lib/libcublasLt.so.12"):
            made.writestr(f"nvidia/cublas/{name}", name)


@pytest.mark.parametrize("before", ["nothing", "of another toolkit"])
def test_a_toolkit_killed_while_it_is_put_together_is_made_anew(
    world: World, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    system, cache = world.base / "toolkit", world.paths.cache
    for name in ("bin/nvcc", "include/cuda.h", "lib/libcudart.so.12", "nvvm/x"):
        world.write(system / name, name)
    monkeypatch.setattr(cuda.Nvcc, "root", system)
    monkeypatch.setattr(pip, "download", lambda into, *_: wheel(into) or proc.Result((), 0, "", ""))
    found = cuda.Nvcc("nvcc", "12.4")

    def start() -> None:
        shutil.rmtree(cache / "cuda", ignore_errors=True)
        if before != "nothing":
            composed(world)

    def whole() -> list[str]:
        return sorted(str(path.relative_to(cache / "cuda")) for path in (cache / "cuda").rglob("*"))

    def make() -> Path:
        return cuda.complete(found, world.paths, offline=False)

    start()
    root, points = make(), 0
    want = whole()
    assert (root / "lib/libcublas.so").resolve().name == "libcublas.so.12"
    assert not (root / "lib/libcupti.so.13").exists()
    start()
    for at in interrupted.everywhere(make, cache / "cuda"):
        assert make() == root
        assert whole() == want, at
        start()
        points += 1
    assert points > 10
