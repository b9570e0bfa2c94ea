"""CUDA as it is found here: nvcc, cuBLAS, the driver's library. Nothing is fetched and nothing is chosen silently."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpu_check import machine, programs
from llamafork.errors import EnvironmentFault


@dataclass(frozen=True)
class Toolkit:
    """``root``: the toolkit's top folder. ``blas``: cuBLAS of a Python package, where the toolkit has none."""

    nvcc: Path
    root: Path
    blas: Path | None
    driver: str  # libcuda, or "": then a build cannot use virtual memory (GGML_CUDA_NO_VMM)

    def args(self, arch: str) -> list[str]:
        words = [
            "-DGGML_CUDA=ON",
            f"-DCMAKE_CUDA_ARCHITECTURES={arch}",
            f"-DCMAKE_CUDA_COMPILER={self.nvcc}",
            f"-DCUDAToolkit_ROOT={self.root}",
            f"-DGGML_CUDA_NO_VMM={'OFF' if self.driver else 'ON'}",
        ]
        if self.driver:
            # Programs are linked with a library that needs the driver's, which may be in a folder of its own.
            words.append(f"-DCMAKE_EXE_LINKER_FLAGS=-Wl,-rpath-link,{Path(self.driver).parent}")
            if not any(self.root.rglob("stubs/libcuda.so")):
                words.append(f"-DCUDA_cuda_driver_LIBRARY={self.driver}")
        if self.blas is not None:
            words.append(f"-DCMAKE_CUDA_FLAGS=-isystem {self.blas / 'include'}")
            words += [f"-DCUDA_{name}_LIBRARY={_library(self.blas, name)}" for name in ("cublas", "cublasLt")]
        return words

    @property
    def libraries(self) -> list[Path]:
        """Folders that the built programs find the toolkit's libraries in."""
        own = [folder for folder in _folders(self.root) if any(folder.glob("libcudart.so*"))]
        return own + ([self.blas / "lib"] if self.blas else [])

    @property
    def facts(self) -> dict[str, object]:
        return {"vmm": bool(self.driver), "cublas": "of a Python package" if self.blas else "of the toolkit"}


def find() -> Toolkit:
    named = os.environ.get("CUDACXX")
    path = shutil.which(named) if named else shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if path is None:
        raise EnvironmentFault("no nvcc is here", why="it is not on PATH, nor in /usr/local/cuda", do="set CUDACXX")
    root = _root(path)
    inside = root / "bin" / "nvcc"
    blas = None if _has_blas(root) else next(_packages(), None)
    if blas is None and not _has_blas(root):
        raise EnvironmentFault(
            "the CUDA toolkit here has no cuBLAS",
            why=f"{root} lacks libcublas.so, and no Python package here brings it",
            do="install it, or the package nvidia-cublas",
        )
    return Toolkit(inside if inside.is_file() else Path(path), root, blas, machine.driver_library())


def _root(nvcc: str) -> Path:
    """nvcc is asked, because what is on PATH may be a script that calls it."""
    done = programs.run([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], limit=30)
    found = re.search(r"^#\$ TOP=(.+)$", done.err + done.out, re.MULTILINE)
    return Path(found[1]).resolve() if found else Path(nvcc).resolve().parent.parent


def _folders(root: Path) -> list[Path]:
    return [root / name for name in ("lib64", "lib", f"targets/{os.uname().machine}-linux/lib")]


def _has_blas(root: Path) -> bool:
    return any((folder / "libcublas.so").exists() for folder in _folders(root))


def _packages() -> Iterator[Path]:
    """Folders of installed NVIDIA packages with cuBLAS and its header in them."""
    spec = importlib.util.find_spec("nvidia")
    for place in (spec and spec.submodule_search_locations) or ():
        for header in sorted(Path(place).glob("*/include/cublas_v2.h")):
            if any((header.parent.parent / "lib").glob("libcublas.so*")):
                yield header.parent.parent


def _library(package: Path, name: str) -> Path:
    """Packages carry only the numbered file, which the linker takes as well."""
    return min((package / "lib").glob(f"lib{name}.so*"), key=lambda file: len(file.name))
