"""A fake upstream of a few files, a checkout with a series on it, and a home of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llamafork import cli, paths
from llamafork.console import output
from llamafork.paths import Paths

UPSTREAM = {
    "CMakeLists.txt": 'cmake_minimum_required(VERSION 3.14)\nproject(fake C CXX)\noption(LLAMA_OPENSSL "https" ON)\n',
    "src/main.cpp": "".join(f"int line_{n};\n" for n in range(40)),
    "src/other.cpp": "".join(f"int other_{n};\n" for n in range(20)),
    "scripts/tool.sh": "#!/bin/sh\necho tool\n",
    "docs/dropped.md": "not part of the selection\n",
    ".hidden": "not part of it either\n",
}
PIN = """\
build = 11434
version = "b11434"
tree = "{tree}"
folders = ["src", "scripts"]
top_level_files = true
required = ["CMakeLists.txt"]

[[source]]
kind = "{kind}"
path = "{path}"
"""
MESSAGE = """\
src : what {name} does

Why it does it.

Origin: llamafork
Upstream-Status: local
Default: off
Guard: none
Drop-When: never
Credit: none
SPDX-License-Identifier: MIT
"""


class World:
    """A checkout with a fake upstream: `patches/`, `vendor/upstream.toml`, and a home beside it."""

    def __init__(self, base: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.base, self.repo, self.home, self.upstream = base, base / "repo", base / "home", base / "upstream"
        self.capsys = capsys
        for name, text in UPSTREAM.items():
            self.write(self.upstream / name, text)
        (self.repo / "patches").mkdir(parents=True)
        (self.repo / "patches" / "series").write_text("")
        self.pin()

    @property
    def paths(self) -> Paths:
        return paths.find()

    @property
    def tree(self) -> Path:
        return self.repo / "vendor" / "llama.cpp"

    def pin(self, *, kind: str = "folder", path: Path | None = None, tree: str = "") -> None:
        self.write(self.repo / "vendor" / "upstream.toml", PIN.format(kind=kind, path=path or self.upstream, tree=tree))

    def write(self, file: Path, text: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def run(self, *words: str) -> tuple[int, str, str]:
        """Call the command line in this process: (exit code, stdout, stderr)."""
        output._err = output._out = None
        code = cli.main(list(words))
        said = self.capsys.readouterr()
        return code, said.out, said.err

    def ok(self, *words: str) -> str:
        code, out, err = self.run(*words)
        assert code == 0, f"{words}: exit {code}\n{err}"
        return out

    def json(self, *words: str) -> dict[str, object]:
        code, out, err = self.run(*words, "--json")
        assert code == 0, err
        found: dict[str, object] = json.loads(out)
        return found

    def edit(self, file: str, old: str, new: str) -> None:
        at = self.tree / file
        text = at.read_text()
        assert old in text
        at.write_text(text.replace(old, new))

    def change(self, name: str, edits: dict[str, tuple[str, str]], new: dict[str, str] | None = None) -> None:
        """Add a change through the tool itself: edit --new, edit files, refresh."""
        self.ok("patch", "edit", "--new", name)
        self.write(self.repo / "patches" / name / "MESSAGE", MESSAGE.format(name=name))
        for file, (old, text) in edits.items():
            self.edit(file, old, text)
        for file, text in (new or {}).items():
            self.write(self.tree / file, text)
        self.ok("patch", "refresh")

    def files(self, folder: Path | None = None) -> dict[str, bytes]:
        """All files below *folder* (default: the work tree), git's own left out."""
        base = folder or self.tree
        return {f.relative_to(base).as_posix(): f.read_bytes() for f in sorted(base.rglob("*"))
                if f.is_file() and ".git" not in f.relative_to(base).parts}  # fmt: skip
