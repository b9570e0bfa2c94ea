"""The wrapper alone is killed, at many points, and run again at once: the orphans it leaves must not be in the way."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable

import interrupted
import pytest
from fake_upstream import World

from llamafork.source.git import environment

NAP = 0.2  # seconds that a git whose wrapper was killed goes on for, at least

# A git that says when it begins, and signals its parent (the wrapper, nothing else) at the call asked for,
# to go on as an orphan and say when it ends.
SHIM = """\
#!/bin/sh
echo begin >> {log}
if [ -n "$FAULT_AT" ]; then
  n=0
  while read -r _; do n=$((n + 1)); done < {log}
  if [ $n -eq "$FAULT_AT" ]; then
    kill -$FAULT_SIGNAL $PPID
    sleep {nap}
    {git} "$@"
    echo end >> {log}
    exit
  fi
fi
exec {git} "$@"
"""
CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir")  # audit events: Python itself changes files
SIGNALS = {"KILL": 9, "INT": 2}


class Faults:
    """A verb, the state that it starts from, and what it leaves when nothing disturbs it."""

    def __init__(self, world: World, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
        self.world, self.words, self.start = world, words, world.base.parent / f"{world.base.name}-start"
        self.log = world.base.parent / f"{world.base.name}.log"
        self.git = shutil.which("git") or ""
        shim = world.base.parent / f"{world.base.name}-bin" / "git"
        world.write(shim, SHIM.format(log=self.log, git=self.git, nap=NAP))
        shim.chmod(0o755)
        monkeypatch.setenv("PATH", f"{shim.parent}:{os.environ['PATH']}")
        subprocess.run(["cp", "-a", world.base, self.start], check=True)
        self.log.write_text("")
        self.code = world.run(*words)[0]
        self.calls = self.log.read_text().count("begin")
        self.want = self.state()

    def reset(self) -> None:
        for entry in self.world.base.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        subprocess.run(["cp", "-a", f"{self.start}/.", self.world.base], check=True)
        self.log.write_text("")

    def state(self) -> dict[str, object]:
        """Everything that a user could tell the two runs apart by; what a killed run may have left included."""
        world = self.world
        found: dict[str, object] = {"tree": world.files(), "patches": world.files(world.repo / "patches")}
        if world.tree.exists():
            for words in (("status", "--porcelain"), ("rev-parse", "HEAD^{tree}")):
                asked = [self.git, "-C", world.tree, *words]
                found[words[0]] = subprocess.run(asked, env=environment(), capture_output=True).stdout
            found["state"] = json.loads((world.tree / ".git/llamafork.json").read_text())
        left = [p for p in world.base.rglob(".*") if p.name.startswith((".gone-", ".part-"))]
        outs = {p.name: world.files(p) for p in world.base.glob("out*")}
        return {**found, "out": outs, "left": left, "fetched": (world.home / "cache/upstream.git").exists()}

    def apart(self, at: int, sent: str, *, in_git: bool) -> int:
        """The verb in a process of its own, signalled at the *at*-th git or change of a file; its exit status."""

        def prepare() -> None:
            if in_git:
                os.environ.update(FAULT_AT=str(at), FAULT_SIGNAL=str(SIGNALS[sent]))
            else:
                sys.addaudithook(self.count(at, SIGNALS[sent]))

        return interrupted.forked(list(self.words), prepare)

    def count(self, at: int, sent: int) -> Callable[[str, object], None]:
        seen = 0

        def hook(event: str, _: object) -> None:
            nonlocal seen
            if event in CHANGES:
                seen += 1
                if at == 0:
                    self.log.with_suffix(".count").write_text(str(seen))
                if seen == at:
                    os.kill(os.getpid(), sent)

        return hook

    def disturb(self, at: int, sent: str, *, in_git: bool) -> None:
        self.reset()
        assert self.apart(at, sent, in_git=in_git) in (-9, 130), f"no {sent} at {at}"
        code, _, err = self.world.run(*self.words)
        assert code == self.code, f"{sent} at {at}: {err}"
        assert self.state() == self.want, f"{sent} at {at}"

    def no_git_began_beside_the_orphan(self, at: int) -> None:
        lines = self.log.read_text().splitlines()
        assert lines[at] == "end", f"KILL at {at}"


def nothing(world: World) -> None:
    world.ok("source", "clean", "--work-tree")


def applied(world: World) -> None:
    world.ok("patch", "apply")


def opened(world: World) -> None:
    world.ok("patch", "edit", "first")
    world.edit("src/main.cpp", "int line_3_first;", "int line_3_better;")
    world.write(world.tree / "src/more.cpp", "int more;\n")


def conflicting(world: World) -> None:
    world.change("near", {"src/main.cpp": ("int line_3_first;", "int line_3_near;")})
    opened(world)


def begun(world: World) -> None:
    world.ok("patch", "edit", "--new", "thought")
    world.edit("src/main.cpp", "int line_9;", "int line_9_thought;")


VERBS: dict[str, tuple[Callable[[World], None], tuple[str, ...]]] = {
    "fetch": (nothing, ("source", "fetch")),
    "apply": (nothing, ("patch", "apply")),
    "refresh": (opened, ("patch", "refresh")),
    "refresh-conflict": (conflicting, ("patch", "refresh")),
    "edit": (applied, ("patch", "edit", "first")),
    "edit-new": (applied, ("patch", "edit", "--new", "thought")),
    "mbox": (applied, ("patch", "export", "--mbox", "out")),
    "folder": (applied, ("patch", "export", "--folder", "out")),
    "clean": (applied, ("source", "clean", "--work-tree")),
}


def spread(last: int, count: int) -> list[int]:
    return sorted({1 + round(n * (last - 1) / (count - 1)) for n in range(count)})


@pytest.mark.parametrize(("verb", "points"), [("fetch", 5), ("apply", 6), ("refresh", 6), ("edit", 5), ("mbox", 4)])
def test_killed_at_any_git_and_run_again_at_once(
    three: World, monkeypatch: pytest.MonkeyPatch, verb: str, points: int
) -> None:
    """The git that runs at that moment goes on as an orphan; the next run waits for it and ends as usual."""
    prepare, words = VERBS[verb]
    prepare(three)
    faults = Faults(three, monkeypatch, words)
    for n, at in enumerate(spread(faults.calls, points)):
        sent = "INT" if n % 3 == 1 else "KILL"
        faults.disturb(at, sent, in_git=True)
        if sent == "KILL":
            faults.no_git_began_beside_the_orphan(at)


@pytest.mark.parametrize(
    ("verb", "points"), [("refresh", 4), ("refresh-conflict", 4), ("edit-new", 3), ("folder", 4), ("clean", 6)]
)
def test_killed_between_two_files_and_run_again(
    three: World, monkeypatch: pytest.MonkeyPatch, verb: str, points: int
) -> None:
    prepare, words = VERBS[verb]
    prepare(three)
    faults = Faults(three, monkeypatch, words)
    faults.reset()
    assert faults.apart(0, "KILL", in_git=False) == faults.code
    for n, at in enumerate(spread(int(faults.log.with_suffix(".count").read_text()), points)):
        faults.disturb(at, "INT" if n % 3 == 1 else "KILL", in_git=False)
