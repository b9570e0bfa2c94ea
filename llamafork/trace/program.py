"""Play a trace through the policy that ships: llama-expert-policy-sim of a build, the cache's own C++."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from llamafork import proc
from llamafork.build.store import Build
from llamafork.errors import BuildError, UnhealthyError
from llamafork.trace.simulate import Score

PROGRAM = "llama-expert-policy-sim"
POLICIES = ("score",)


def find(build: Build) -> Path:
    """The program of *build*; :class:`BuildError` for one made before there was one."""
    try:
        return build.program(PROGRAM)
    except BuildError as error:
        raise BuildError(
            f"build {build.key} has no {PROGRAM}, which plays the policy {POLICIES[0]}",
            why="it is stock, older than the change expert-policy, or has only some programs",
            do="llamafork build, choose another with --build, or name another --policy",
        ) from error


def run(
    program: Path, trace: Path, policy: str, slots: int, *, skip: int, everything: bool, more: Sequence[str] = ()
) -> Score:
    """Raises :class:`UnhealthyError` when the program fails or says what cannot be understood."""
    words = [program, trace, "--policy", policy, "--slots", slots, "--skip", skip, *(("--all",) if everything else ())]
    done = proc.run([str(word) for word in (*words, *more)])
    if not done.ok:
        why = next(iter(done.err.strip().splitlines()), f"exit {done.code}")
        raise UnhealthyError(f"{PROGRAM} failed", why=why, do=f"its options: {program}")
    try:
        said = json.loads(done.out)
        layers = tuple(row["hits"] / row["lookups"] if row["lookups"] else 0.0 for row in said["layers"])
        return Score(policy, slots, int(said["lookups"]), int(said["hits"]), int(said["uploads"]), layers)
    except (ValueError, KeyError, TypeError) as error:
        raise UnhealthyError(f"{PROGRAM} gave no result", why=done.out[:200] or "it printed nothing") from error
