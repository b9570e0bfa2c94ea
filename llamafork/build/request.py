"""What is to be built, as data; and the CMake options that follow from it, as a pure function."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from llamafork.errors import UsageError

BACKEND_OPTION = {
    "rpc": "GGML_RPC",
    "cuda": "GGML_CUDA",
    "vulkan": "GGML_VULKAN",
    "hip": "GGML_HIP",
    "metal": "GGML_METAL",
    "sim": "GGML_SIM",
}
SANITIZERS = {"asan": ("ADDRESS", "UNDEFINED"), "tsan": ("THREAD",)}
TEST_PROFILES = ("test", "asan", "tsan")
KEY_LENGTH = 12
NOT_IN_KEY = ("COMPILER_LAUNCHER", "LLAMA_USE_PREBUILT_UI")
# What CMake and the compilers read by themselves, so that it decides the result too.
COMPILER_ENVIRONMENT = (
    "CFLAGS",
    "CXXFLAGS",
    "CPPFLAGS",
    "CUDAFLAGS",
    "HIPFLAGS",
    "LDFLAGS",
    "CMAKE_TOOLCHAIN_FILE",
    "CMAKE_BUILD_TYPE",
    "CPATH",
    "C_INCLUDE_PATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "CMAKE_PREFIX_PATH",
)


@dataclass(frozen=True)
class Request:
    """The user's choice. ``jobs`` and ``cache`` do not change the result, so they are not part of the key."""

    kind: str  # fork, stock, tree (a work tree with edits) or upstream
    backends: tuple[str, ...]
    profile: str = "release"
    cuda_arch: str = ""
    targets: tuple[str, ...] = ()
    ui: str = "auto"
    native: bool = True
    cmake_args: tuple[str, ...] = ()
    jobs: int | None = None
    cache: bool = True
    offline: bool = False


@dataclass(frozen=True)
class Tools:
    """The programs a build uses. Identities are text that changes when the program does."""

    cmake: str
    cmake_version: str
    generator: str
    ninja: str
    cc: str
    cxx: str
    compiler: str
    ccache: str = ""
    launcher: str = ""  # for C++
    launcher_c: str = ""
    nvcc: str = ""
    nvcc_version: str = ""
    cuda_root: str = ""
    cuda_copy: bool = False  # cuda_root is in the cache: what is needed of its libraries goes into the build
    cuda_lib: str = ""
    cuda_host: str = ""
    cuda_vmm: bool = True
    openssl: bool = True
    cpu: str = ""


@dataclass(frozen=True)
class Plan:
    """A request with everything decided: the key, and the exact arguments for CMake."""

    request: Request
    tools: Tools
    build: int
    tree: str
    args: tuple[str, ...]
    notes: tuple[str, ...] = ()
    inputs: Mapping[str, object] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.inputs, sort_keys=True).encode()).hexdigest()

    @property
    def key(self) -> str:
        return f"{self.request.kind}-{self.request.profile}-{self.digest[:KEY_LENGTH]}"

    @property
    def config_id(self) -> str:
        """Names the build folder: everything but the tree, so that the next tree compiles only what changed."""
        rest = {k: v for k, v in self.inputs.items() if k not in ("tree", "args", "version")}
        rest["args"] = [a for a in self.args if not decides_nothing(a) and not a.startswith("-DLLAMA_FORK_SERIES=")]
        return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:KEY_LENGTH]


def decides_nothing(arg: str) -> bool:
    """Whether a CMake argument leaves the programs as they are, so that builds with and without it are the same."""
    return any(word in arg for word in NOT_IN_KEY)


def make_plan(request: Request, tools: Tools, *, build: int, tree: str, has_option: Mapping[str, bool]) -> Plan:
    """Decide the arguments. *has_option* tells which CMake options the tree knows (never pass a removed one)."""
    args, notes = cmake_args(request, tools, build=build, tree=tree, has_option=has_option)
    inputs: dict[str, object] = {
        "tree": tree,
        "build": build,
        "kind": request.kind,
        "profile": request.profile,
        "backends": sorted(request.backends),
        "targets": sorted(request.targets),
        "compiler": tools.compiler,
        "cpu": tools.cpu if request.native else "",
        "nvcc": tools.nvcc_version,
        "ui": request.ui,
        "args": [a for a in args if not decides_nothing(a)],
        "environment": {name: os.environ[name] for name in COMPILER_ENVIRONMENT if os.environ.get(name)},
    }
    return Plan(request, tools, build, tree, tuple(args), tuple(notes), inputs)


def cmake_args(
    request: Request, tools: Tools, *, build: int, tree: str, has_option: Mapping[str, bool]
) -> tuple[list[str], list[str]]:
    """The -D arguments in order (the user's own last) and notes about features that are left out."""
    tests = request.profile in TEST_PROFILES
    options: dict[str, object] = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_C_COMPILER": tools.cc,
        "CMAKE_CXX_COMPILER": tools.cxx,
        "CMAKE_BUILD_WITH_INSTALL_RPATH": True,
        "CMAKE_INSTALL_RPATH": _rpath(tools),
        "CMAKE_C_COMPILER_LAUNCHER": tools.launcher_c,
        "CMAKE_CXX_COMPILER_LAUNCHER": tools.launcher,
        "BUILD_SHARED_LIBS": True,
        "LLAMA_BUILD_NUMBER": build,
        "LLAMA_BUILD_COMMIT": f"b{build}",  # the same for fork and stock, so that they share objects
        "LLAMA_BUILD_TESTS": tests,
        "LLAMA_BUILD_EXAMPLES": False,
        "LLAMA_BUILD_UI": request.ui == "build",
        "LLAMA_USE_PREBUILT_UI": request.ui == "auto" and not request.offline,
        "GGML_NATIVE": request.native,
        "GGML_CCACHE": False,
    }
    notes: list[str] = []
    if has_option.get("LLAMA_FORK_SERIES") and request.kind != "stock":
        options["LLAMA_FORK_SERIES"] = tree
    if not tools.openssl and has_option.get("LLAMA_OPENSSL"):
        options["LLAMA_OPENSSL"] = False
        notes.append(
            "OpenSSL headers are missing: downloads over https (-hf, --model-url) are left out; "
            "install libssl-dev (or openssl-devel) and build again to have them"
        )
    options.update(_profile(request.profile))
    for backend, option in BACKEND_OPTION.items():
        options[option] = backend in request.backends
    if "cuda" in request.backends:
        more, why = _cuda(request, tools)
        options.update(more)
        notes += why
    words = [f"-D{name}={_word(value)}" for name, value in options.items()]
    return [*words, *user_args(request.cmake_args)], notes


def _rpath(tools: Tools) -> str:
    origin = "@loader_path" if os.uname().sysname == "Darwin" else "$ORIGIN"
    return f"{origin};{tools.cuda_lib}" if tools.cuda_lib and not tools.cuda_copy else origin


def _profile(profile: str) -> dict[str, object]:
    if profile == "release":
        return {}
    if profile == "test":  # optimised with assertions: -DNDEBUG is left out
        return {"CMAKE_C_FLAGS_RELEASE": "-O2", "CMAKE_CXX_FLAGS_RELEASE": "-O2"}
    flags = "-O1 -g -fno-omit-frame-pointer"
    options: dict[str, object] = {"CMAKE_C_FLAGS_RELEASE": flags, "CMAKE_CXX_FLAGS_RELEASE": flags}
    for name in SANITIZERS[profile]:
        options[f"LLAMA_SANITIZE_{name}"] = True
        options[f"GGML_SANITIZE_{name}"] = True
    options["GGML_OPENMP"] = False  # its runtime is not instrumented: every barrier would be a false report
    return options


def _cuda(request: Request, tools: Tools) -> tuple[dict[str, object], list[str]]:
    options: dict[str, object] = {
        "CMAKE_CUDA_COMPILER": tools.nvcc,
        "CUDAToolkit_ROOT": tools.cuda_root,
        "CMAKE_CUDA_ARCHITECTURES": request.cuda_arch,
        "CMAKE_CUDA_COMPILER_LAUNCHER": tools.launcher if tools.launcher == tools.ccache else "",
        "GGML_CUDA_NO_VMM": not tools.cuda_vmm,
    }
    if tools.cuda_copy:
        # Not in the run path, yet the linker has to see what libggml-cuda needs when it links a program. Given twice:
        # the user's own linker flags replace the first, and a build type of his own the second.
        link = f"-Wl,-rpath-link,{shlex.quote(tools.cuda_lib)}"
        options |= {f"CMAKE_EXE_LINKER_FLAGS_{when}": link for when in ("INIT", "RELEASE")}
    if tools.cuda_host:
        options["CMAKE_CUDA_HOST_COMPILER"] = tools.cuda_host
    if tools.cuda_vmm:
        return options, []
    return options, [
        "no NVIDIA driver library (libcuda) here: built with GGML_CUDA_NO_VMM, so the memory pool "
        "cannot grow in place; build on the machine with the GPU to have it"
    ]


def user_args(words: Sequence[str]) -> list[str]:
    """The user's CMake arguments, checked: each is -DNAME=VALUE (or another option), with nothing left to expand."""
    for word in words:
        if not word.startswith("-"):
            raise UsageError(f"-C {word!r} is not a CMake argument", do="write -C -DNAME=VALUE")
        if "{" in word and "}" in word:
            raise UsageError(f"-C {word!r} holds an unexpanded placeholder", do="write the value itself")
    return list(words)


def _word(value: object) -> str:
    return ("ON" if value else "OFF") if isinstance(value, bool) else str(value)


def bounded_jobs(cores: int, ram_gib: float, *, cuda: bool, asked: int | None = None) -> int:
    """Compile jobs: one a core, but no more than fit in RAM at 1 GiB a C++ job and 3 GiB an nvcc job; at least one."""
    if asked is not None:
        return max(1, asked)
    return max(1, min(cores, int(ram_gib // (3.0 if cuda else 1.0))))
