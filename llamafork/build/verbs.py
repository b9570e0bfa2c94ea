"""`llamafork build` and `llamafork builds …`."""

from __future__ import annotations

import argparse
import os
import shlex
import time

from llamafork import console, proc
from llamafork.build import cuda, make, store, toolchain
from llamafork.build.request import Plan, Request, Tools, make_plan
from llamafork.build.store import Build
from llamafork.errors import Exit, PatchError, UsageError
from llamafork.paths import Paths, remove_tree, sweep_removed
from llamafork.source import prepare, worktree
from llamafork.source.git import Git

OPTIONS = {
    "LLAMA_OPENSSL": ("CMakeLists.txt", "option(LLAMA_OPENSSL"),
    "LLAMA_FORK_SERIES": ("cmake/llamafork.cmake", "LLAMA_FORK_SERIES"),
}


def build(ns: argparse.Namespace, paths: Paths) -> int:
    request = _request(ns)
    repo, number, tree = _tree(ns, request, paths)
    tools = find_tools(request, paths)
    has_option = {name: _mentions(repo, tree, *where) for name, where in OPTIONS.items()}
    plan = make_plan(request, tools, build=number, tree=tree, has_option=has_option)
    if ns.dry_run:
        return _dry_run(plan)
    for note in plan.notes:
        console.warn(note)
    made, fresh = make.make(plan, repo, paths, again=ns.rebuild)
    if not made.why_not_current:
        store.use(paths, made)
    _report(made, fresh)
    now = store.current(paths)
    if now is None or now.key != made.key:
        console.say(f"  not made current ({made.why_not_current}): llamafork builds use {made.key}")
    return Exit.OK


def _request(ns: argparse.Namespace) -> Request:
    chosen = [name for name in ("stock", "work_tree", "upstream") if getattr(ns, name)]
    if len(chosen) > 1:
        raise UsageError(f"--{' and --'.join(chosen)} exclude each other".replace("_", "-"), do="choose one")
    kind = {"stock": "stock", "work_tree": "tree", "upstream": "upstream"}.get(chosen[0], "") if chosen else "fork"
    backends = tuple(dict.fromkeys(["cpu", *(ns.backend or _default_backends())]))
    if ns.profile != "release":
        backends = tuple(dict.fromkeys([*backends, "rpc", "sim"]))
    arch = cuda.architectures(ns.cuda_arch or os.environ.get("CUDAARCHS", "")) if "cuda" in backends else ""
    if ns.cuda_arch and "cuda" not in backends:
        raise UsageError("--cuda-arch is given but the cuda backend is not", do="add --backend cuda")
    if ns.offline and ns.ui == "build":
        raise UsageError(
            "--ui build needs the network", why="npm fetches what it builds with", do="leave out --offline"
        )
    words = (*_cmake_args(), *ns.cmake_arg)
    return Request(
        kind,
        backends,
        ns.profile,
        arch,
        tuple(ns.target or ()),
        ns.ui,
        not ns.portable,
        words,
        ns.jobs,
        not ns.no_ccache,
        ns.offline,
    )


def _cmake_args() -> list[str]:
    try:
        return shlex.split(os.environ.get("CMAKE_ARGS", ""))
    except ValueError as error:
        raise UsageError("CMAKE_ARGS cannot be read", why=str(error), do="check its quotes") from error


def _default_backends() -> list[str]:
    """cpu and rpc everywhere; cuda where nvidia-smi shows a GPU; metal on a Mac. Others are asked for by name."""
    found = ["rpc"]
    if cuda.visible_architectures():
        found.append("cuda")
    if os.uname().sysname == "Darwin":
        found.append("metal")
    return found


def _tree(ns: argparse.Namespace, request: Request, paths: Paths) -> tuple[Git, int, str]:
    """(repository, build number, tree hash) of what is to be compiled."""
    if request.kind == "upstream":
        made = prepare.on_upstream(paths, ns.upstream, ns.upstream_build, offline=ns.offline)
        return made.repo, made.base.pin.build, made.tree
    if request.kind == "stock":
        made = prepare.stock(paths, request.backends, offline=ns.offline)
        return made.repo, made.base.pin.build, made.tree
    made = prepare.stack(paths, offline=ns.offline)
    tree = worktree.look(paths)
    if request.kind == "tree":
        if tree is None:
            raise PatchError("there is no work tree", do="llamafork patch apply")
        return tree.repo, made.base.pin.build, tree.snapshot()
    if tree is not None and tree.state.head and (tree.state.edit or tree.dirty()):
        console.warn(
            "the work tree has edits that are not in the series; this builds the series "
            "(--work-tree builds the tree as it is)"
        )
    return made.repo, made.base.pin.build, made.tree


def _mentions(repo: Git, tree: str, path: str, word: str) -> bool:
    done = repo.run("cat-file", "blob", f"{tree}:{path}", check=False)
    return done.ok and word in done.out


def find_tools(request: Request, paths: Paths) -> Tools:
    """All tools of *request*, gated by version; nothing is configured before this has passed."""
    cmake = toolchain.best("cmake", "cmake")
    name, program = toolchain.generator()
    cc, cxx, identity = toolchain.compilers()
    cache = toolchain.ccache() if request.cache else None
    ours = cache.path if cache else ""
    named = {k: os.environ.get(f"CMAKE_{k}_COMPILER_LAUNCHER", "") if request.cache else "" for k in ("C", "CXX")}
    tools = Tools(
        cmake.path,
        cmake.version,
        name,
        program,
        cc,
        cxx,
        identity,
        ccache=ours,
        launcher=named["CXX"] or ours,
        launcher_c=named["C"] or ours,
        openssl=toolchain.openssl(cc),
        cpu=toolchain.native_cpu(cxx) if request.native else "",
    )
    return cuda.add_to(tools, paths, offline=request.offline) if "cuda" in request.backends else tools


def _dry_run(plan: Plan) -> int:
    command = [plan.tools.cmake, "-S", "SRC", "-B", "BUILD", "-G", plan.tools.generator, *plan.args]
    console.result(f"key     {plan.key}\ntree    {plan.tree}\n{proc.command_line(command)}")
    for note in plan.notes:
        console.result(f"note    {note}")
    console.emit("build-plan", {"key": plan.key, "tree": plan.tree, "args": plan.args, "notes": plan.notes})
    return Exit.OK


def _report(made: Build, fresh: bool) -> None:
    info = made.info
    console.say(f"{'built' if fresh else 'up to date:'} {made.key}" + (f" in {info['seconds']:.0f} s" if fresh else ""))
    for line in str(info.get("version", "")).splitlines():
        console.detail(f"  {line}")
    for backend, said in info.get("backend_results", {}).items():
        console.say(f"  {backend}: {said}")
    ui = str(info.get("ui_result", ""))
    if ui.startswith("prebuilt assets of another"):
        console.warn(f"web UI: {ui}")
    if ui.startswith("none") and "not built" not in ui:
        hint = "" if "--ui none" in ui else "; --rebuild tries the network again, --ui build makes it with npm"
        console.say(f"  web UI: {ui}{hint}")
    for note in info.get("notes", []):
        if fresh:
            console.warn(str(note))
    console.result(str(made.root))
    console.emit("build", {**info, "root": made.root, "fresh": fresh})


def builds_list(ns: argparse.Namespace, paths: Paths) -> int:
    now = store.current(paths)
    rows, data = [], []
    for one in store.load_all(paths):
        mark = "*" if now and one.key == now.key else ""
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.made))
        rows.append((mark, one.key, f"b{one.info.get('build')}", "+".join(one.info.get("backends", [])), when))
        data.append({"key": one.key, "current": bool(mark), "root": one.root, "info": one.info})
    if rows or ns.json:
        console.table(("", "key", "upstream", "backends", "made"), rows)
    else:
        console.result("no builds yet: llamafork build")
    console.emit("builds", {"builds": data})
    return Exit.OK


def builds_use(ns: argparse.Namespace, paths: Paths) -> int:
    chosen = store.resolve(paths, ns.key)
    store.use(paths, chosen)
    console.result(f"current build: {chosen.key}")
    console.emit("builds", {"current": chosen.key})
    return Exit.OK


def builds_prune(ns: argparse.Namespace, paths: Paths) -> int:
    """Remove all but the newest; the current build and its stock twin always stay."""
    if ns.keep < 0:
        raise UsageError("--keep cannot be negative", do="give 0 or more")
    now = store.current(paths)
    builds = store.load_all(paths)
    twin = store.twin(builds, now)
    kept = {b.key for b in (now, twin, *builds[: ns.keep]) if b is not None}
    doomed = [b for b in builds if b.key not in kept]
    freed = 0
    for one in doomed:
        freed += 0 if ns.dry_run else store.remove(one)
        console.result(f"{'would remove' if ns.dry_run else 'removed'} {one.key}")
    if not ns.dry_run:
        for parent in (store.folder(paths), paths.cache / "work"):
            sweep_removed(parent)
    freed += _prune_work({str(b.info.get("work")) for b in builds if b.key in kept}, paths, dry_run=ns.dry_run)
    console.result(f"{len(doomed)} builds, {freed / 1e6:.0f} MB freed")
    console.emit("builds", {"removed": [b.key for b in doomed], "freed": freed, "dry_run": ns.dry_run})
    return Exit.OK


def _prune_work(used: set[str], paths: Paths, *, dry_run: bool) -> int:
    """Remove build folders of configurations that no kept build has; returns the bytes freed."""
    freed = 0
    for folder in sorted((paths.cache / "work").glob("*/")):
        if folder.name not in used:
            console.result(f"{'would remove' if dry_run else 'removed'} build folder {folder.name}")
            if not dry_run:
                freed += sum(f.stat().st_size for f in folder.rglob("*") if f.is_file() and not f.is_symlink())
                remove_tree(folder)
    return freed
