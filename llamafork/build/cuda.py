"""CUDA: which nvcc, which architectures, which host compiler, and what the toolkit lacks taken from wheels."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

from llamafork import console, pip, proc
from llamafork.build import toolchain
from llamafork.build.request import Tools
from llamafork.errors import EnvironmentFault, LlamaforkError, UsageError
from llamafork.paths import Paths, remove_tree, sweep_removed, write_atomic

PARTS = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl", "nvidia-nvvm")
CUBLAS = "nvidia-cublas"
FROM_WHEELS = "13.0"  # the toolkit assembled when there is no nvcc at all
ARCH = re.compile(r"^\d{2,3}[af]?(-real|-virtual)?$")
PROBE = "#include <cuda_runtime.h>\n#include <cmath>\n__global__ void k(float * x) { *x = sqrtf(*x); }\n"


@dataclass(frozen=True)
class Nvcc:
    path: str
    version: str  # release, such as 13.0

    @property
    def root(self) -> Path:
        """The toolkit's top folder. A wrapper script on PATH is looked through by asking nvcc itself."""
        done = proc.run([self.path, "--dryrun", "-E", "-x", "cu", os.devnull], timeout=30)
        found = re.search(r"^#\$ TOP=(.+)$", done.err + done.out, re.MULTILINE)
        return Path(found[1]).resolve() if found else Path(self.path).resolve().parent.parent


def find_nvcc() -> Nvcc | None:
    named = os.environ.get("CUDACXX")
    path = shutil.which(named) if named else shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if path is None:
        return None
    version = toolchain.version_of(path)
    if not toolchain.new_enough(version, toolchain.MINIMUM["nvcc"]):
        raise EnvironmentFault(
            f"nvcc {version or '?'} is too old",
            why=f"{path}; the least is {toolchain.MINIMUM['nvcc']}",
            do="install a newer CUDA toolkit, or remove this nvcc from PATH and let llamafork assemble one from wheels",
        )
    return Nvcc(path, version)


def architectures(asked: str) -> str:
    """The list for CMAKE_CUDA_ARCHITECTURES: the user's, else those of the visible GPUs; none is a usage error."""
    if asked:
        words = [w for w in re.split(r"[;,\s]+", asked) if w]
        for word in words:
            if not ARCH.match(word):
                raise UsageError(f"--cuda-arch {word!r} is not an architecture", do="such as 86, 89-real or 90a")
        return ";".join(words)
    seen = visible_architectures()
    if not seen:
        raise EnvironmentFault(
            "no CUDA architecture to build for",
            why="no NVIDIA GPU is visible on this machine",
            do="name one: --cuda-arch 86 (RTX 30), 89 (RTX 40), 90 (H100), 120 (RTX 50)",
        )
    return ";".join(seen)


def visible_architectures() -> list[str]:
    """Compute capabilities of the GPUs nvidia-smi shows, without the dot, without repeats."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    done = proc.run([smi, "--query-gpu=compute_cap", "--format=csv,noheader"], timeout=20)
    found = [line.strip().replace(".", "") for line in done.out.splitlines()] if done.ok else []
    return sorted({x for x in found if x.isdigit()}, key=int)


def driver_library() -> bool:
    done = proc.run([shutil.which("ldconfig") or "/sbin/ldconfig", "-p"], timeout=20)
    return "libcuda.so.1" in done.out


def add_to(tools: Tools, paths: Paths, *, offline: bool) -> Tools:
    """*tools* with nvcc, a complete toolkit, and a host compiler that nvcc accepts."""
    nvcc = find_nvcc()
    root = complete(nvcc, paths, offline=offline)
    inside = root / "bin" / "nvcc"
    host = host_compiler(str(inside), nvcc.version if nvcc else FROM_WHEELS, tools, paths)
    return replace(
        tools,
        nvcc=str(inside),
        nvcc_version=toolchain.version_of(str(inside)),
        cuda_root=str(root),
        cuda_lib=str(lib_folder(root)),
        cuda_copy=root.is_relative_to(paths.cache),
        cuda_host=host,
        cuda_vmm=driver_library(),
    )


def complete(nvcc: Nvcc | None, paths: Paths, *, offline: bool) -> Path:
    """A toolkit with everything the build reads. The system's own if whole, else one composed in the cache."""
    root = nvcc.root if nvcc else None
    version = nvcc.version if nvcc else FROM_WHEELS
    parts = [] if root else list(PARTS)
    if root is None or not _has_cublas(root):
        parts.append(CUBLAS)
    if root is not None and not parts:
        return root
    target = paths.cache / "cuda" / version
    if _is_complete(target, root):
        return target
    if offline:
        raise EnvironmentFault(
            f"the CUDA toolkit lacks {', '.join(parts)}",
            why="--offline forbids fetching them",
            do="run once without --offline, or install them",
        )
    with proc.lock(paths.cache / "cuda.lock"):
        if not _is_complete(target, root):  # another run may have made it meanwhile
            with console.step(f"CUDA {version}: fetch {', '.join(parts)}"):
                _compose(target, root, version, parts)
    return target


def _is_complete(target: Path, root: Path | None) -> bool:
    stamp = target / ".complete"
    return stamp.is_file() and (root is None or stamp.read_text() == str(root))


def _has_cublas(root: Path) -> bool:
    return (lib_folder(root) / "libcublas.so").exists()


def lib_folder(root: Path) -> Path:
    """Where a toolkit has its libraries: the first usual folder with cuBLAS in it, else `lib`."""
    folders = [root / name for name in ("lib64", "lib", f"targets/{os.uname().machine}-linux/lib")]
    return next((f for f in folders if (f / "libcublas.so").exists()), root / "lib")


def _compose(target: Path, root: Path | None, version: str, parts: list[str]) -> None:
    """Links to the system's files plus the wheels' own, made beside *target* and renamed into place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(".part-*"):  # of a run that was killed
        shutil.rmtree(left)
    made = target.with_name(f".part-{target.name}")
    for folder in ("bin", "lib", "include", "nvvm"):
        (made / folder).mkdir(parents=True)
    if root is not None:
        # nvcc finds its toolkit from its own real path, so its folder is copied and the rest linked
        shutil.copytree(root / "bin", made / "bin", dirs_exist_ok=True)
        for folder in ("nvvm", "include", "lib"):
            for entry in (root / folder).iterdir():
                (made / folder / entry.name).symlink_to(entry)
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".part-") as scratch:
            for wheel in _wheels(Path(scratch), version, parts):
                _unpack(wheel, made)
    except BaseException:
        shutil.rmtree(made)
        raise
    (made / "lib64").symlink_to("lib")
    for library in list((made / "lib").glob("lib*.so.*")):
        plain = made / "lib" / (library.name.split(".so.")[0] + ".so")
        if not plain.exists():
            plain.symlink_to(library.name)
    (made / ".complete").write_text(str(root or ""))
    if target.exists():
        remove_tree(target)
    sweep_removed(target.parent)
    made.replace(target)


def _wheels(scratch: Path, version: str, parts: list[str]) -> list[Path]:
    wanted = [f"{part}=={version}.*" for part in parts]
    done = pip.download(scratch / "wheels", "--only-binary", ":all:", *wanted)
    if not done.ok:
        last = next((x for x in reversed(done.err.splitlines()) if "ERROR" in x), done.err[-200:])
        raise EnvironmentFault(
            f"cannot fetch {', '.join(wanted)}",
            why=last,
            do="check the network, or install the CUDA toolkit with cuBLAS",
        )
    return sorted((scratch / "wheels").glob("*.whl"))


def _unpack(wheel: Path, made: Path) -> None:
    with zipfile.ZipFile(wheel) as handle:
        for name in handle.namelist():
            found = re.match(r"nvidia/[^/]+/(bin|lib|include|nvvm)/(.+)$", name)
            if not found or name.endswith("/") or ".." in name:
                continue
            target = made / found[1] / found[2]
            target.parent.mkdir(parents=True, exist_ok=True)
            with handle.open(name) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink)
            if found[1] in ("bin", "nvvm"):
                target.chmod(0o755)


def host_compiler(nvcc: str, version: str, tools: Tools, paths: Paths) -> str:
    """ "" when nvcc accepts the C++ compiler, else another one that it accepts; a fault if none is."""
    identity = hashlib.sha256(f"{nvcc}|{version}|{tools.compiler}|{os.environ.get('PATH')}".encode()).hexdigest()[:16]
    kept = paths.cache / "cuda" / f"host-{identity}"
    if kept.is_file():
        return kept.read_text()
    said = _try(nvcc, tools.cxx)
    if said and "unsupported GNU version" in said:
        for number in range(15, 8, -1):
            other = shutil.which(f"g++-{number}")
            if other and not _try(nvcc, other):
                console.say(f"nvcc {version} does not accept {tools.cxx}; using {other} as CUDA host compiler")
                write_atomic(kept, other)
                return other
    if said:
        raise _explain(said, nvcc, version, tools)
    write_atomic(kept, "")
    return ""


def _try(nvcc: str, host: str) -> str:
    """Compile a tiny kernel; "" when that works, else what nvcc said."""
    with tempfile.TemporaryDirectory(prefix="llamafork-cuda-") as scratch:
        source = Path(scratch) / "probe.cu"
        source.write_text(PROBE)
        done = proc.run([nvcc, "-ccbin", host, "-c", source, "-o", Path(scratch) / "probe.o"], timeout=180)
    return "" if done.ok else (done.err + done.out).strip() or f"exit {done.code}"


def _explain(said: str, nvcc: str, version: str, tools: Tools) -> LlamaforkError:
    first = next((x for x in said.splitlines() if "error" in x.lower()), said.splitlines()[0])
    compiler = tools.compiler.split(" | ")[0]
    if "unsupported GNU version" in said:
        return EnvironmentFault(
            f"nvcc {version} does not accept {compiler}",
            why=f"{nvcc}: {first}",
            do="install an older g++ beside it (such as g++-13), or a newer CUDA toolkit",
        )
    if "exception specification is incompatible" in said:
        glibc = proc.run(["getconf", "GNU_LIBC_VERSION"]).out.strip() or "this glibc"
        return EnvironmentFault(
            f"CUDA {version} does not work with {glibc}",
            why=f"{first}; another gcc will not help: the C library's headers and the toolkit's disagree",
            do="install a newer CUDA toolkit (12.9, 13.0 or later)",
        )
    return EnvironmentFault(
        f"nvcc {version} cannot compile on this machine",
        why=first,
        do=f"check the CUDA installation of {nvcc}; the build does not fall back to CPU",
    )
