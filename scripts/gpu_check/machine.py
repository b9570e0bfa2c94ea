"""The machine a check runs on, and whether it has an NVIDIA GPU at all."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import sys
from pathlib import Path

from gpu_check import programs
from llamafork.errors import EnvironmentFault

FIELDS = "name,memory.total,driver_version,compute_cap"


def facts() -> dict[str, object]:
    """Nothing here names the machine or its user."""
    memory = re.search(r"MemTotal:\s+(\d+) kB", _read("/proc/meminfo"))
    model = re.search(r"model name\s*: (.+)", _read("/proc/cpuinfo"))
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin") or ""
    return {
        "gpus": gpus(),
        "cpu": model[1].strip() if model else platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(int(memory[1]) / (1 << 20), 1) if memory else None,
        "system": f"{platform.system()} {platform.release()}",
        "nvcc": _version(nvcc, r"V(\d[\d.]+)"),
        "cmake": _version(shutil.which("cmake") or ""),
        "compiler": _first_line(shutil.which(os.environ.get("CXX") or "c++") or ""),
        "python": sys.version.split()[0],
    }


def available_memory() -> int | None:
    """Bytes that programs can have without swapping, as far as the system says."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"))
    return int(found[1]) << 10 if found else None


def gpus() -> list[str]:
    """Name, memory, driver and capability of each GPU that nvidia-smi shows."""
    out = _ask("nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader")
    return [", ".join(part.strip() for part in line.split(",")) for line in out.splitlines() if line.strip()]


def free_memory() -> int | None:
    """Bytes of the first GPU that nobody uses, or None where nvidia-smi does not say."""
    out = _ask("nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits").splitlines()
    return int(out[0]) << 20 if out and out[0].strip().isdigit() else None


def require_gpu() -> None:
    """Refuse before minutes are spent on a build that would then compute on the CPU."""
    if not gpus() and driver_devices() < 1:
        raise EnvironmentFault(
            "CUDA was asked for, and no NVIDIA GPU is visible here",
            why="nvidia-smi shows none, and the driver's library finds none either",
            do="run it on a machine with a GPU, choose --stages build, or scripts/gpu-check rehearse",
        )


def driver_devices() -> int:
    """Devices that the driver's library itself counts; 0 without that library."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        ok = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    except (OSError, AttributeError):
        return 0
    return count.value if ok else 0


def driver_library() -> str:
    """The file of libcuda that programs here are given, or "" where there is none."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    found = re.search(r"\s(/\S*/libcuda\.so\S*)$", _read("/proc/self/maps"), re.MULTILINE)
    return found[1] if found else ""


def _version(program: str, pattern: str = r"(\d+\.\d+(?:\.\d+)?)") -> str:
    found = re.search(pattern, _ask(program, "--version")) if program else None
    return found[1] if found else ""


def _first_line(program: str) -> str:
    return (_ask(program, "--version").splitlines() or [""])[0] if program else ""


def _ask(*args: str) -> str:
    try:
        done = programs.run(args, limit=20)
    except EnvironmentFault:
        return ""
    return done.out if done.ok else ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
