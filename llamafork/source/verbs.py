"""`llamafork source …` and `llamafork patch …`: arguments in, one call, a few lines out."""

from __future__ import annotations

import argparse
from pathlib import Path

from llamafork import console
from llamafork.errors import Exit, PatchError, UsageError
from llamafork.paths import Paths, remove_tree
from llamafork.source import edit, export, fetch, lint, pin, prepare, series, worktree


def source_fetch(ns: argparse.Namespace, paths: Paths) -> int:
    chosen = pin.load(paths.pin)
    with prepare.locked(paths):
        if ns.origin:
            found = fetch.local(paths, chosen, Path(ns.origin).expanduser())
        else:
            found = fetch.fetch(paths, chosen, offline=ns.offline)
    console.result(f"upstream {chosen.version}: tree {found.tree} ({found.source})")
    console.emit("source", {"build": chosen.build, "tree": found.tree, "from": found.source})
    return Exit.OK


def source_status(ns: argparse.Namespace, paths: Paths) -> int:
    chosen = pin.load(paths.pin)
    found = fetch.cached(paths, chosen)
    tree = worktree.look(paths)
    state = tree.state if tree else worktree.State()
    facts: dict[str, object] = {
        "build": chosen.build,
        "pinned tree": chosen.tree,
        "fetched": bool(found),
        "work tree": str(paths.work_tree) if tree else "none (llamafork patch apply makes it)",
        "at": state.head or "-",
        "open edit": state.edit.name if state.edit else "-",
        "edited files": len(tree.dirty()) if tree and state.head else 0,
        "left half done": ", ".join(tree.unfinished()) if tree else "",
    }
    shown = {**facts, "fetched": "yes" if found else "no", "left half done": facts["left half done"] or "nothing"}
    for key, value in shown.items():
        console.result(f"{key:15} {value}")
    console.emit("source", facts)
    return Exit.OK


def source_clean(ns: argparse.Namespace, paths: Paths) -> int:
    with prepare.locked(paths):
        gone = fetch.clean(paths)
        tree = worktree.look(paths) if ns.work_tree else None
        if tree is not None:
            worktree.guard(tree, force=ns.force)
            remove_tree(tree.path)
            gone.append(tree.path)
        if ns.work_tree:
            fetch.sweep_removed(paths.work_tree.parent)
    for path in gone:
        console.result(f"removed {path}")
    console.emit("source", {"removed": gone})
    return Exit.OK


def patch_list(ns: argparse.Namespace, paths: Paths) -> int:
    loaded = series.load(paths.patches)
    rows = [
        (c.name, c.trailers.get("Default", "?"), c.hook_lines, sum(x.count(b"\n") for x in c.new.values()), c.subject)
        for c in loaded.changes
    ]
    console.table(("change", "default", "hook lines", "new lines", "subject"), rows)
    keys = ("name", "default", "hook_lines", "new_lines", "subject")
    console.emit("patches", {"changes": [dict(zip(keys, row, strict=True)) for row in rows]})
    return Exit.OK


def patch_show(ns: argparse.Namespace, paths: Paths) -> int:
    change = series.load(paths.patches).find(ns.name)
    console.result(change.message)
    for path in change.touched:
        console.result(f"edits {path}")
    for path, content in change.new.items():
        lines = content.count(b"\n")
        console.result(f"adds  {path} ({lines} lines)")
    if ns.diff:
        console.result("\n" + change.hooks.decode("utf-8", "replace"))
    console.emit(
        "patch",
        {
            "name": change.name,
            "message": change.message,
            "trailers": change.trailers,
            "edits": change.touched,
            "adds": list(change.new),
        },
    )
    return Exit.OK


def patch_apply(ns: argparse.Namespace, paths: Paths) -> int:
    with console.step("apply the series") as step:
        done = edit.apply(paths, until=ns.until, force=ns.force, offline=ns.offline)
        step.note = f"{len(done.changes)} changes" if done.moved else "nothing to do"
    return _outcome(done, paths)


def patch_edit(ns: argparse.Namespace, paths: Paths) -> int:
    if ns.abort:
        name = edit.abort(paths)
        console.result(f"closed the edit of {name}; llamafork patch apply brings the whole series back")
        console.emit("edit", {"closed": name})
        return Exit.OK
    if not ns.name:
        raise UsageError("patch edit needs the name of a change", do="llamafork patch list")
    opened = edit.edit(paths, ns.name, new=ns.new, force=ns.force, offline=ns.offline)
    console.result(f"{paths.work_tree} stands at {opened.name}: edit there, then llamafork patch refresh")
    console.emit("edit", {"name": opened.name, "parent": opened.parent, "work_tree": paths.work_tree})
    return Exit.OK


def patch_refresh(ns: argparse.Namespace, paths: Paths) -> int:
    with console.step("refresh the series"):
        done = edit.refresh(paths, offline=ns.offline)
    return _outcome(done, paths)


def _outcome(done: edit.Outcome, paths: Paths) -> int:
    for name, how in done.changes.items():
        console.result(f"{how:9} {name}")
    console.result(f"tree      {done.tree}")
    console.emit(
        "series", {"tree": done.tree, "moved": done.moved, "changes": done.changes, "work_tree": paths.work_tree}
    )
    return Exit.OK


def patch_export(ns: argparse.Namespace, paths: Paths) -> int:
    with prepare.locked(paths):
        return _export(ns, paths)


def _export(ns: argparse.Namespace, paths: Paths) -> int:
    made = prepare.stack(paths, offline=ns.offline)
    if ns.check:
        different = export.check(made)
        if different:
            raise PatchError(
                f"the series does not round-trip: {', '.join(different)}",
                do="llamafork patch refresh writes the canonical form",
            )
        console.result(f"{len(made.applied)} changes round-trip byte for byte; tree {made.tree}")
        console.emit("export", {"different": [], "tree": made.tree})
        return Exit.OK
    if not ns.mbox and not ns.folder:
        raise UsageError("patch export needs a target", do="--check, --mbox DIR or --folder DIR")
    if ns.mbox and ns.folder:
        raise UsageError("patch export takes --mbox or --folder, not both", do="run it twice")
    written = export.mbox(made, Path(ns.mbox)) if ns.mbox else export.folders(made, Path(ns.folder))
    for path in written:
        console.result(str(path))
    console.emit("export", {"files": written, "tree": made.tree})
    return Exit.OK


def patch_lint(ns: argparse.Namespace, paths: Paths) -> int:
    loaded = series.load(paths.patches)
    findings = lint.lint(loaded, paths.repo)
    for name, text in findings:
        console.result(f"{name}: {text}")
    console.emit("lint", {"findings": [{"change": n, "text": t} for n, t in findings]})
    if findings:
        console.say(f"{len(findings)} finding(s) in the series", style="red")
        return Exit.PATCH
    console.result(f"{len(loaded.changes)} changes, no findings")
    return Exit.OK
