"""Fake cmake, ninja, nvcc and ccache in front of PATH."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fake_upstream import World

from llamafork.build.request import Tools

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
    number = os.environ.get("FAKE_NUMBER", number)
    said = "version: 0 (build " + number + ", commit x)\\n" + os.environ.get("FAKE_DEVICES", "")
    for name in [words[n + 1] for n, word in enumerate(words) if word == "--target"] or ["llama-server"]:
        (out / name).write_text("#!{python}\\nprint(" + repr(said) + ")\\n")
        (out / name).chmod(0o755)
    for backend in os.environ.get("FAKE_BACKENDS", "rpc").split():
        (out / f"libggml-{{backend}}.so").write_text(os.environ.get("FAKE_NEEDS", "x").replace(",", "\\0"))
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

    def simulated(self) -> None:
        """The fake build has simulated devices from now on."""
        self.set(FAKE_BACKENDS="rpc sim", FAKE_DEVICES="  SIM0: simulated (1 MiB, 1 MiB free)")

    def configured(self) -> list[list[str]]:
        return [x.split("\0") for x in self.log.read_text().splitlines() if "-S" in x.split("\0")]


def nvcc(fakes: Fakes, **mood: str) -> Tools:
    root = fakes.world.base / "toolkit"
    fakes.world.write(root / "lib64/libcublas.so", "x")
    fakes.script("nvcc", NVCC.format(python=sys.executable, root=root))
    fakes.world.write(root / "bin/nvcc", (fakes.bin / "nvcc").read_text())
    (root / "bin/nvcc").chmod(0o755)
    fakes.set(**mood)
    return Tools("cmake", "3.28", "Ninja", "ninja", "/usr/bin/cc", "/usr/bin/c++", "gcc (Debian) 16.1 | x86 | 0")
