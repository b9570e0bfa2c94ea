"""The work tree: a plain git repository for people. The tool owns it, and never overwrites a person's edit silently."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from llamafork import console
from llamafork.errors import PatchError
from llamafork.paths import Paths, write_atomic
from llamafork.source import git
from llamafork.source.git import Git
from llamafork.source.prepare import Stack

UNFINISHED = ("rebase-apply", "rebase-merge", "MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD", "BISECT_LOG")


@dataclass(frozen=True)
class Edit:
    """An open edit: which change, and the commit it is made on."""

    name: str
    parent: str
    new: bool = False  # started by `edit --new` and never refreshed: aborting takes it out of the series again


@dataclass(frozen=True)
class State:
    """Kept in the repository; ``checkout`` is a commit whose checkout began and was not seen to end."""

    head: str = ""
    checkout: str = ""
    edit: Edit | None = None


@dataclass(frozen=True)
class WorkTree:
    path: Path
    repo: Git = field(repr=False)

    @property
    def _file(self) -> Path:
        return self.path / ".git" / "llamafork.json"

    @property
    def state(self) -> State:
        try:
            data = json.loads(self._file.read_text(encoding="utf-8"))
            edit = Edit(**data["edit"]) if data.get("edit") else None
            return State(data.get("head", ""), data.get("checkout", ""), edit)
        except (OSError, ValueError, TypeError, KeyError):
            return State()

    def save(self, state: State) -> None:
        write_atomic(self._file, json.dumps(asdict(state), indent=1) + "\n")

    def dirty(self) -> list[str]:
        """Files that differ from HEAD, new ones included."""
        listing = self.repo.run("status", "--porcelain", "-z", "--no-renames", "--untracked-files=all").out
        return [entry[3:] for entry in listing.split("\0") if entry]

    def unfinished(self) -> list[str]:
        """What a git command of the user left half done."""
        return [name for name in UNFINISHED if (self.path / ".git" / name).exists()]

    def snapshot(self) -> str:
        """The tree hash of the files as they are now, edits and new files included."""
        with tempfile.TemporaryDirectory(prefix="llamafork-index-") as scratch:
            index = Path(scratch) / "index"
            # with its time: git looks into a file of the same size and second only if the index is no younger
            shutil.copy2(self.path / ".git" / "index", index)
            at = self.repo.with_index(index)
            at.run("add", "-A", ".")
            return at.text("write-tree")


def is_ours(path: Path) -> bool:
    return (path / ".git" / "llamafork.json").is_file()


def look(paths: Paths) -> WorkTree | None:
    """The work tree if there is one of ours; a foreign folder in its place is refused."""
    path = paths.work_tree
    if is_ours(path):
        return WorkTree(path, Git(path / ".git", path))
    if path.exists() and any(path.iterdir()):
        raise PatchError(
            f"{path} was not made by llamafork",
            why="it holds files but not our mark; it is left untouched",
            do="move it away, then run llamafork patch apply",
        )
    return None


def open_tree(paths: Paths) -> WorkTree:
    """The work tree, made empty if missing; an interrupted checkout is finished first."""
    tree = look(paths)
    if tree is None:
        path = paths.work_tree
        path.mkdir(parents=True, exist_ok=True)
        # The mark is written before git's own files, so that an interrupted init is still known as ours.
        (path / ".git").mkdir(exist_ok=True)
        tree = WorkTree(path, Git(path / ".git", path))
        tree.save(State())
    if not (tree.path / ".git" / "HEAD").is_file() or not (tree.path / ".git" / "info" / "attributes").is_file():
        git.sweep_locks(tree.path / ".git")
        git.init(tree.path / ".git", tree.path)
    for ours in ("refs/llamafork", "refs/pins"):
        for left in (tree.path / ".git" / ours).rglob("*.lock"):
            left.unlink(missing_ok=True)
    _recover(tree)
    return tree


def _recover(tree: WorkTree) -> None:
    state = tree.state
    if not state.checkout:
        return
    console.warn(f"an earlier run was interrupted while writing {tree.path.name}; finishing it")
    git.sweep_locks(tree.path / ".git")
    if tree.repo.resolve(state.checkout) is None:
        tree.save(replace(state, checkout=""))
        return
    target = tree.repo.files(state.checkout)
    edits = [path for path in _changed(tree) if not _matches(tree, path, target.get(path, ("", ""))[1])]
    rescue(tree, edits)
    checkout(tree, state.checkout, state.edit)


def _changed(tree: WorkTree) -> list[str]:
    return tree.dirty() if tree.repo.resolve("HEAD") else []


def _matches(tree: WorkTree, path: str, blob: str) -> bool:
    file = tree.path / path
    if not file.is_file():
        return True  # nothing of the user's to lose
    return tree.repo.text("hash-object", "--no-filters", "--", str(file)) == blob


def rescue(tree: WorkTree, edited: list[str]) -> Path | None:
    """Copy files that are about to be overwritten to a folder inside .git, and say where."""
    kept = [path for path in edited if (tree.path / path).is_file()]
    if not kept:
        return None
    folder = tree.path / ".git" / "llamafork-rescue" / time.strftime("%Y%m%d-%H%M%S")
    for path in kept:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(tree.path / path, folder / path)
    console.warn(f"{len(kept)} edited file(s) were copied to {folder}")
    return folder


def guard(tree: WorkTree, *, force: bool) -> None:
    """Refuse to touch a tree with edits or a half-done git command of the user's, unless *force* (then rescue)."""
    left = tree.unfinished()
    if left and not force:
        what = _which(tree, left[0])
        raise PatchError(
            f"a git command was left half done in {tree.path}",
            why=f"{left[0]} is there{what}",
            do="finish or abort it with git, or run again with --force to restore the tree",
        )
    edited = _changed(tree)
    if edited and not force:
        some = ", ".join(edited[:5]) + (f" and {len(edited) - 5} more" if len(edited) > 5 else "")
        raise PatchError(
            f"the work tree has edits: {some}",
            why="they would be overwritten",
            do="llamafork patch refresh keeps them if an edit is open; "
            "`git stash` in the work tree puts them aside; --force drops them (a copy is kept)",
        )
    if force:
        rescue(tree, edited)
        for name in left:
            stale = tree.path / ".git" / name
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
        for path in edited:
            if path not in tree.repo.files("HEAD"):
                (tree.path / path).unlink(missing_ok=True)


def _which(tree: WorkTree, name: str) -> str:
    subject = tree.path / ".git" / name / "final-commit"
    if not subject.is_file():
        subject = tree.path / ".git" / name / "message"
    try:
        return f", at: {subject.read_text(encoding='utf-8').splitlines()[0]}"
    except (OSError, IndexError, UnicodeDecodeError):
        return ""


def bring(tree: WorkTree, made: Stack) -> None:
    """Copy the stack's commits into the work tree's own repository, so that the cache may be deleted."""
    if tree.repo.resolve(f"{made.tip}^{{commit}}") is None or tree.repo.resolve(made.base.pin.ref) != made.base.commit:
        tip = "refs/llamafork/bringing"
        made.repo.run("update-ref", tip, made.tip)
        _share_packs(made.repo, tree.repo)
        tree.repo.run(
            "fetch",
            "-q",
            "--no-tags",
            "--force",
            "--no-write-fetch-head",
            str(made.repo.git_dir.absolute()),
            f"{tip}:refs/llamafork/series",
            f"{made.base.pin.ref}:{made.base.pin.ref}",
        )


def _share_packs(source: Git, target: Git) -> None:
    """Hard links (or copies) of the big packs, so that the fetch after it finds nearly everything there."""
    folder = target.git_dir / "objects" / "pack"
    folder.mkdir(parents=True, exist_ok=True)
    # an index makes its pack visible, so it comes last
    for file in sorted((source.git_dir / "objects" / "pack").glob("pack-*"), key=lambda f: f.suffix == ".idx"):
        if (folder / file.name).exists():
            continue
        try:
            os.link(file, folder / file.name)
        except OSError:
            shutil.copyfile(file, folder / f"tmp_{file.name}")
            (folder / f"tmp_{file.name}").replace(folder / file.name)


def move_to(tree: WorkTree, commit: str, edit: Edit | None = None) -> bool:
    """Check *commit* out; returns False when the tree was there already. Call :func:`guard` first."""
    state = tree.state
    if state.head == commit and state.edit == edit and tree.repo.resolve("HEAD") == commit and not tree.dirty():
        return False
    checkout(tree, commit, edit)
    return True


def checkout(tree: WorkTree, commit: str, edit: Edit | None) -> None:
    """Bring the files to *commit*, whatever they are now; an interruption is made good by :func:`open_tree`."""
    tree.save(replace(tree.state, checkout=commit, edit=edit))
    tree.repo.run("read-tree", "--reset", "-u", commit)
    tree.repo.run("update-ref", "HEAD", commit)
    tree.save(State(commit, "", edit))
