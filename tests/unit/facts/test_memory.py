"""C8: memory that a container may use is what its cgroup leaves, not what the host has."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from llamafork.build import make
from llamafork.facts import memory

GIB = 1 << 30
HOST = 64 * GIB


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=HOST))


def group(root: Path, folder: str, limit: object, use: int, stat: str = "", *, v1: bool = False) -> None:
    at = root / "sys/fs/cgroup" / folder
    at.mkdir(parents=True, exist_ok=True)
    (at / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(f"{limit}\n")
    (at / ("memory.usage_in_bytes" if v1 else "memory.current")).write_text(f"{use}\n")
    (at / "memory.stat").write_text(stat)


def member(root: Path, text: str) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(text)


def test_without_cgroups_it_is_what_the_host_has(tmp_path: Path) -> None:
    assert memory.available(tmp_path) == HOST
    member(tmp_path, "garbage\n0::/gone\n")
    assert memory.available(tmp_path) == HOST


def test_v2_limit_less_use(tmp_path: Path) -> None:
    member(tmp_path, "0::/user/app\n")
    group(tmp_path, "user/app", 4 * GIB, GIB)
    assert memory.available(tmp_path) == 3 * GIB


def test_v2_a_group_above_may_leave_less(tmp_path: Path) -> None:
    member(tmp_path, "0::/user/app\n")
    group(tmp_path, "user/app", "max", GIB)
    group(tmp_path, "user", 8 * GIB, 7 * GIB)
    assert memory.available(tmp_path) == GIB


def test_v2_in_a_container_the_own_group_is_the_top(tmp_path: Path) -> None:
    member(tmp_path, "0::/../docker/0123\n")
    group(tmp_path, "", 2 * GIB, 0)
    assert memory.available(tmp_path) == 2 * GIB


def test_the_page_cache_is_not_use(tmp_path: Path) -> None:
    member(tmp_path, "0::/a\n")
    group(tmp_path, "a", 4 * GIB, 4 * GIB, f"anon {GIB}\nactive_file {GIB}\ninactive_file {2 * GIB}\n")
    assert memory.available(tmp_path) == 3 * GIB


def test_more_use_than_limit_leaves_nothing(tmp_path: Path) -> None:
    member(tmp_path, "0::/a\n")
    group(tmp_path, "a", GIB, 2 * GIB)
    assert memory.available(tmp_path) == 0


def test_v1_and_hybrid(tmp_path: Path) -> None:
    member(tmp_path, "5:cpu,cpuacct:/other\n4:memory:/docker/x\n0::/\n")
    group(tmp_path, "memory/docker/x", 6 * GIB, 2 * GIB, f"total_inactive_file {GIB}\n", v1=True)
    group(tmp_path, "memory", 9223372036854771712, GIB, v1=True)
    assert memory.available(tmp_path) == 5 * GIB
    group(tmp_path, "unified", 3 * GIB, 0)
    assert memory.available(tmp_path) == 3 * GIB


def test_jobs_are_bounded_by_what_the_cgroup_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "cgroup_left", lambda _: iter([3 * GIB]))
    assert make.ram_gib() == 3.0
