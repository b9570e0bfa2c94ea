"""Putting the CUDA libraries that a build needs beside its programs, when their toolkit is only in the cache."""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path


def choose(named: Iterable[str], inside: Callable[[str], Iterable[str]], have: Collection[str]) -> list[str]:
    """The libraries that *named* leads to, by what each names *inside* it, without those that are there already."""
    chosen: set[str] = set()
    todo = set(named)
    while todo:
        name = todo.pop()
        if name not in chosen and name not in have:
            chosen.add(name)
            todo |= set(inside(name))
    return sorted(chosen)


def names_in(file: Path, names: Iterable[str]) -> set[str]:
    """Which of *names* are in *file* as strings with an end, as those of needed libraries are."""
    if file.stat().st_size == 0:
        return set()
    with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return {name for name in names if data.find(name.encode() + b"\0") >= 0}


def bring(libraries: Path, into: Path) -> list[str]:
    """Put what the files in *into* need of the folder *libraries* beside them; returns the names."""
    names = [f.name for f in libraries.iterdir() if ".so." in f.name and f.is_file()]
    built = [f for f in into.iterdir() if f.is_file() and not f.is_symlink()]
    named = {name for file in built for name in names_in(file, names)}
    chosen = choose(named, lambda name: names_in(libraries / name, names), {f.name for f in built})
    for name in chosen:
        _place((libraries / name).resolve(), into / name)
    return chosen


def _place(source: Path, target: Path) -> None:
    """A hard link where that is possible: cuBLAS has half a gigabyte."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
