"""Replaying changes onto a base commit, inside the object store only: no work tree is ever half patched."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llamafork.errors import PatchError
from llamafork.source import git
from llamafork.source.git import Git
from llamafork.source.series import Change


@dataclass(frozen=True)
class Applied:
    """One replayed change; ``how`` is ``clean`` (exact) or ``adjusted`` (git's 3-way merge was needed)."""

    change: Change
    commit: str
    tree: str
    how: str


class Conflict(PatchError):
    """A change that does not apply; ``done`` holds what did, ``tree`` the marked files (3-way only)."""

    def __init__(self, change: Change, done: Sequence[Applied], paths: Sequence[str], why: str, tree: str = "") -> None:
        where = f" in {', '.join(paths)}" if paths else ""
        super().__init__(
            f"change {change.name} does not apply{where}",
            why=why,
            do=f"llamafork patch edit {change.name}, mend it, llamafork patch refresh",
        )
        self.change, self.done, self.paths, self.tree = change, tuple(done), tuple(paths), tree


def replay(
    repo: Git, base: str, changes: Sequence[Change], *, three_way: bool = False, first: int = 1
) -> list[Applied]:
    """Commit each change on top of *base*. Exact unless *three_way*; raises :class:`Conflict` at the first failure."""
    done: list[Applied] = []
    parent = base
    for order, change in enumerate(changes, first):
        with tempfile.TemporaryDirectory(prefix="llamafork-index-") as scratch:
            at = repo.with_index(Path(scratch) / "index")
            at.run("read-tree", parent)
            how = _hooks(at, change, done, three_way)
            _new_files(at, change, done)
            tree = at.text("write-tree")
        parent = repo.commit(tree, change.message, [parent], order)
        done.append(Applied(change, parent, tree, how))
    return done


def _hooks(at: Git, change: Change, done: Sequence[Applied], three_way: bool) -> str:
    if not change.hooks:
        return "clean"
    exact = at.run("apply", "--cached", "--whitespace=nowarn", "-", stdin=change.hooks, check=False)
    if exact.ok:
        return "clean"
    if three_way:
        merged = at.run("apply", "--cached", "--3way", "--whitespace=nowarn", "-", stdin=change.hooks, check=False)
        if merged.ok:
            return "adjusted"
        conflicted = sorted({line.split("\t", 1)[1] for line in at.text("ls-files", "-u").splitlines() if "\t" in line})
        tree = _marked_tree(at, conflicted) if conflicted else ""
        raise Conflict(change, done, conflicted or change.touched, explain(merged.err, change.hooks), tree)
    raise Conflict(change, done, _failing(exact.err), explain(exact.err, change.hooks))


def _failing(text: str) -> list[str]:
    found = [x.split("patch failed: ", 1)[1].rsplit(":", 1)[0] for x in text.splitlines() if "patch failed: " in x]
    return list(dict.fromkeys(found))


def _marked_tree(at: Git, conflicted: Sequence[str]) -> str:
    """Resolve each conflicted path to a file with conflict markers, so that a person can open the tree."""
    stages: dict[str, dict[str, str]] = {}
    for line in at.text("ls-files", "-u", "-z").split("\0"):
        if line.strip("\0"):
            meta, path = line.split("\t", 1)
            stages.setdefault(path, {})[meta.split()[2]] = meta.split()[1]
    with tempfile.TemporaryDirectory(prefix="llamafork-merge-") as scratch:
        for path in conflicted:
            sides = []
            for stage in ("2", "1", "3"):
                side = Path(scratch) / stage
                blob = stages[path].get(stage)
                side.write_bytes(at.blob(blob) if blob else b"")
                sides.append(side)
            labels = ["-L", "upstream", "-L", "base", "-L", "change"]
            at.run("merge-file", "-q", *labels, *sides, check=False)
            content = sides[0].read_bytes()
            gone, whole = f"0 {'0' * 40}\t{path}\0", f"{git.mode_of(content)} {at.store(content)}\t{path}\0"
            at.run("update-index", "-z", "--index-info", stdin=gone + whole)
    return at.text("write-tree")


def _new_files(at: Git, change: Change, done: Sequence[Applied]) -> None:
    if not change.new:
        return
    present = set(at.text("ls-files", "-z", "--", *change.new).split("\0"))
    clash = sorted(present & set(change.new))
    if clash:
        raise Conflict(change, done, clash, "a file of new/ exists already in the tree below it")
    lines = [f"{git.mode_of(content)} {at.store(content)}\t{path}\0" for path, content in change.new.items()]
    at.run("update-index", "-z", "--add", "--index-info", stdin="".join(lines))


def explain(text: str, hooks: bytes) -> str:
    """git's words, and the real cause when it is line endings or a damaged diff."""
    said = next((x for x in text.splitlines() if x.startswith("error:")), text.strip()[-200:])
    if b"\r\n" in hooks:
        return f"{said}; hooks.diff has CRLF line endings: check the file out with LF line endings (git: -text)"
    if any(line == b"" for line in hooks.rstrip(b"\n").split(b"\n")):
        return f"{said}; hooks.diff has bare blank context lines: an editor stripped the leading space"
    return said


def to_change(repo: Git, name: str, parent: str, commit: str, message: str) -> Change:
    """The inverse of :func:`replay` for one commit: split its difference into hooks.diff and new/."""
    before, after = repo.files(parent), repo.files(commit)
    new = {path: repo.blob(blob) for path, (_, blob) in after.items() if path not in before}
    edited = [p for p in before if p not in after or before[p] != after[p]]
    hooks = repo.raw("diff-tree", "-p", *git.DIFF, parent, commit, "--", *edited) if edited else b""
    return Change(name, message, hooks, dict(sorted(new.items())))
