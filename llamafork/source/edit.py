"""The verbs that change the series: apply, edit, refresh."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, replace

from llamafork import console
from llamafork.errors import PatchError
from llamafork.paths import Paths, write_atomic
from llamafork.source import fetch, prepare, replay, series, worktree
from llamafork.source.prepare import Stack
from llamafork.source.series import NAME, Change
from llamafork.source.worktree import Edit, State, WorkTree

TEMPLATE = """\
module : one sentence that says what {name} does

Why it is needed, and what was measured.

Origin: llamafork
Upstream-Status: local
Default: off
Guard: tests/integration/test_{under}.py
Drop-When: upstream does the same
Credit: none
SPDX-License-Identifier: MIT
"""


@dataclass(frozen=True)
class Outcome:
    """What a verb did: the tree it left and, per change, ``clean``, ``adjusted`` or ``written``."""

    tree: str
    moved: bool
    changes: dict[str, str]


def apply(paths: Paths, *, until: str | None = None, force: bool = False, offline: bool = False) -> Outcome:
    """Put the whole series (or its head up to *until*) into the work tree. Doing it again is a no-op."""
    with prepare.locked(paths):
        made = prepare.stack(paths, offline=offline)
        tree = worktree.open_tree(paths)
        if tree.state.edit and not force:
            raise _edit_open(tree)
        target = made.tip
        if until is not None:
            made.series.find(until)
            target = next(a.commit for a in made.applied if a.change.name == until)
        worktree.bring(tree, made)
        worktree.guard(tree, force=force)
        moved = worktree.move_to(tree, target)
        return Outcome(made.repo.tree(target), moved, {a.change.name: a.how for a in made.applied})


def edit(paths: Paths, name: str, *, new: bool = False, force: bool = False, offline: bool = False) -> Edit:
    """Open the work tree at change *name*, or on top of the series for a *new* one."""
    with prepare.locked(paths):
        if new:
            _start(paths, name)
        made = prepare.stack(paths, offline=offline, check_lock=not new)
        made.series.find(name)
        tree = worktree.open_tree(paths)
        if tree.state.edit and not force:
            if tree.state.edit.name == name:  # asked for again, as after an interruption: the edits in it stay
                return tree.state.edit
            raise _edit_open(tree)
        worktree.bring(tree, made)
        worktree.guard(tree, force=force)
        opened = Edit(name, made.before(name), new)
        worktree.move_to(tree, next(a.commit for a in made.applied if a.change.name == name), opened)
        return opened


def _start(paths: Paths, name: str) -> None:
    if not NAME.match(name):
        raise PatchError(
            f"{name!r} is not a name for a change", why="letters a-z, digits and '-' only", do="choose another"
        )
    order = paths.patches / "series"
    message = paths.patches / name / "MESSAGE"
    if name in series.read_order(order):
        locked = series.read_lock(paths.patches / "series.lock")
        if name not in locked and set(message.parent.glob("*")) == {message}:
            return  # only begun, by a run that was interrupted
        raise PatchError(f"{name} exists already", do=f"llamafork patch edit {name}")
    if not message.exists():
        write_atomic(message, TEMPLATE.format(name=name, under=name.replace("-", "_")))
    text = order.read_text(encoding="utf-8")
    write_atomic(order, text + ("" if not text or text.endswith("\n") else "\n") + f"{name}\n")


def abort(paths: Paths) -> str:
    """Close an open edit without writing anything; edits are copied aside. Returns the change's name."""
    with prepare.locked(paths):
        tree = worktree.open_tree(paths)
        state = tree.state
        if state.edit is None:
            raise PatchError("no edit is open", do="llamafork patch edit NAME")
        worktree.guard(tree, force=True)
        if state.edit.new:
            _forget(paths, state.edit.name, tree)
        head = tree.repo.text("rev-parse", "HEAD")
        worktree.checkout(tree, head, state.edit)  # the edit stays open until its files are back
        tree.save(State(head))
        return state.edit.name


def _forget(paths: Paths, name: str, tree: WorkTree) -> None:
    """Take a change that was only begun out of the series; its folder is moved beside the rescued edits."""
    order = paths.patches / "series"
    kept = [
        x for x in order.read_text(encoding="utf-8").splitlines(keepends=True) if x.partition("#")[0].strip() != name
    ]
    write_atomic(order, "".join(kept))
    if (paths.patches / name).is_dir():
        aside = tree.path / ".git" / "llamafork-rescue" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        aside.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(paths.patches / name, aside)


def refresh(paths: Paths, *, offline: bool = False) -> Outcome:
    """Write an open edit back to patches/, replay what follows, and renew series.lock.

    Without an open edit the series is read from disk, brought into canonical form and locked again. When a later
    change conflicts, the edit moves on to that change, with markers in the work tree; refresh again to go on.
    """
    with prepare.locked(paths):
        base = prepare.pinned(paths, offline=offline)
        tree = worktree.open_tree(paths)
        loaded = series.load(paths.patches)
        opened = tree.state.edit
        if opened is None:
            worktree.guard(tree, force=False)
            start, todo, written = base.commit, loaded.changes, {}
            worktree.bring(tree, Stack(fetch.store(paths), base, loaded, ()))
        else:
            change, start = _take(tree, loaded, opened)
            series.save(paths.patches, change)
            names = [c.name for c in loaded.changes]
            todo = loaded.changes[names.index(opened.name) + 1 :]
            written = {opened.name: "written"}
        return _finish(paths, tree, base, start, todo, written)


def _take(tree: WorkTree, loaded: series.Series, opened: Edit) -> tuple[Change, str]:
    """The edited change as the work tree shows it, and the commit made of it."""
    message = loaded.find(opened.name).message
    snapshot = tree.snapshot()
    if snapshot == tree.repo.tree(opened.parent):
        raise PatchError(
            f"{opened.name} would be empty",
            why="the work tree equals the one below it",
            do="edit files in the work tree first, or llamafork patch edit --abort",
        )
    order = [c.name for c in loaded.changes].index(opened.name) + 1
    commit = tree.repo.commit(snapshot, message, [opened.parent], order)
    change = replay.to_change(tree.repo, opened.name, opened.parent, commit, message)
    for path in change.touched:
        owner = loaded.owner(path)
        if owner is not None and owner != opened.name:
            raise PatchError(
                f"{path} belongs to change {owner}",
                why="a file in new/ has one owner; no diff upon a diff",
                do=f"undo that edit, then llamafork patch edit {owner}",
            )
    marked = [p for p in (*change.touched, *change.new) if _has_markers(tree, p)]
    if marked:
        raise PatchError(f"conflict markers are left in {', '.join(marked)}", do="resolve them, then refresh again")
    return change, commit


def _has_markers(tree: WorkTree, path: str) -> bool:
    file = tree.path / path
    return file.is_file() and any(x.startswith((b"<<<<<<< ", b">>>>>>> ")) for x in file.read_bytes().splitlines())


def _finish(
    paths: Paths, tree: WorkTree, base: fetch.Fetched, start: str, todo: tuple[Change, ...], how: dict[str, str]
) -> Outcome:
    first = len(series.read_order(paths.patches / "series")) - len(todo) + 1
    try:
        done = replay.replay(tree.repo, start, todo, three_way=True, first=first)
    except replay.Conflict as conflict:
        _open_conflict(paths, tree, conflict, start)
        raise
    for one, parent in zip(done, [start, *(d.commit for d in done)], strict=False):
        again = replay.to_change(tree.repo, one.change.name, parent, one.commit, one.change.message)
        changed = series.save(paths.patches, again)
        how[one.change.name] = one.how if not changed or one.how != "clean" else "written"
    loaded = series.load(paths.patches)
    tip = done[-1].commit if done else start
    commits = tree.repo.text("log", "--reverse", "--format=%T", f"{base.commit}..{tip}").split()
    trees = {c.name: t for c, t in zip(loaded.changes, commits, strict=True)}
    write_atomic(paths.patches / "series.lock", series.lock_text(base.tree, trees))
    worktree.move_to(tree, tip)
    return Outcome(tree.repo.tree(tip), True, how)


def _open_conflict(paths: Paths, tree: WorkTree, conflict: replay.Conflict, start: str) -> None:
    """Keep what applied, and open the work tree at the change that did not."""
    parents = [start, *(d.commit for d in conflict.done)]
    for one, parent in zip(conflict.done, parents, strict=False):
        series.save(paths.patches, replay.to_change(tree.repo, one.change.name, parent, one.commit, one.change.message))
    if not conflict.tree:
        return
    parent = parents[-1]
    # Interrupted from here on, the edit that was refreshed is closed (it is in patches/), and refresh comes here again.
    worktree.checkout(tree, parent, None)
    tree.save(replace(tree.state, checkout=parent))
    tree.repo.run("read-tree", "-m", "-u", parent, conflict.tree)
    tree.repo.run("read-tree", parent)  # the index stays at the parent, so that `git diff` shows the change
    tree.save(State(parent, "", Edit(conflict.change.name, parent)))
    conflict.do = f"resolve the markers in {tree.path}, then llamafork patch refresh (or llamafork patch edit --abort)"
    console.warn(f"the edit is now open at {conflict.change.name}")


def _edit_open(tree: WorkTree) -> PatchError:
    name = tree.state.edit.name if tree.state.edit else "?"
    return PatchError(
        f"an edit of {name} is open",
        why="the work tree stands at that change",
        do="llamafork patch refresh keeps it; llamafork patch edit --abort drops it",
    )
