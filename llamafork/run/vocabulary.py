"""What a program's own ``--help`` says about its flags: their names, how many values they eat, which are gone."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llamafork import proc
from llamafork.errors import EnvironmentFault
from llamafork.paths import show

HELP_SECONDS = 120.0
NAME = r"-{1,2}[A-Za-z][\w.-]*"
ENTRY = re.compile(rf"^ {{0,8}}(?P<names>{NAME}(?:,?\s+{NAME}(?=[\s,]|$))*)(?P<rest>.*)$")
PAIR = re.compile(r"^[A-Z]+ [A-Z]+$")
ONE_OF = re.compile(r"^(N|SEED|INDEX|PORT|[<\[{(].*)$")
REMOVED = "the argument has been removed."


@dataclass(frozen=True)
class Vocabulary:
    """``arity``: flag to number of values; ``strict``: flags whose value is a number or one of a list;
    ``removed``: flags that still parse, only to fail, with upstream's advice."""

    arity: Mapping[str, int]
    strict: frozenset[str] = frozenset()
    removed: Mapping[str, str] = field(default_factory=dict)

    @property
    def flags(self) -> frozenset[str]:
        return frozenset(self.arity)


def parse(text: str) -> Vocabulary:
    """Read the output of ``--help`` of llama-server, llama-cli or llama-bench."""
    arity: dict[str, int] = {}
    strict: set[str] = set()
    removed: dict[str, str] = {}
    for names, hint, about in _entries(text):
        if about.startswith(REMOVED):
            removed.update(dict.fromkeys(names, about.removeprefix(REMOVED).strip()))
            continue
        arity.update(dict.fromkeys(names, 0 if not hint else 2 if PAIR.match(hint) else 1))
        if ONE_OF.match(hint):
            strict.update(names)
    return Vocabulary(arity, frozenset(strict), removed)


def _entries(text: str) -> Iterator[tuple[list[str], str, str]]:
    """Names, value hint and description of each flag; descriptions go on in indented lines."""
    names: list[str] = []
    hint = about = ""
    for line in text.splitlines():
        found = ENTRY.match(line)
        if found is None:
            about = f"{about} {line.strip()}".strip()
            continue
        if names:
            yield names, hint, about
        names = re.findall(NAME, found["names"])
        hint, _, about = found["rest"].strip("\r\n").removeprefix(" ").partition("  ")
        hint, about = hint.strip(), about.strip()
    if names:
        yield names, hint, about


_known: dict[tuple[str, int, int], Vocabulary] = {}


def of(program: Path) -> Vocabulary:
    """The vocabulary of *program*, asked once per process for each version of the file.

    Raises :class:`EnvironmentFault` when the program is missing or does not start.
    """
    try:
        stamp = program.stat()
    except OSError as error:
        raise EnvironmentFault(
            f"there is no program {show(program)}", why=error.strerror or str(error), do="run `llamafork build`"
        ) from error
    key = (str(program), stamp.st_mtime_ns, stamp.st_size)
    if key not in _known:
        _known[key] = _ask(program)
    return _known[key]


def help_flags(program: Path) -> frozenset[str]:
    """The flags that *program* accepts, by its own ``--help``."""
    return of(program).flags


def _ask(program: Path) -> Vocabulary:
    # a bad LLAMA_ARG_ variable would keep the program from answering, and look like a broken build
    env = {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_ARG_")}
    answer = proc.run([program, "--help"], timeout=HELP_SECONDS, env=env)
    vocabulary = parse(answer.out or answer.err)
    if len(vocabulary.arity) < 2:
        last = (answer.err or answer.out).strip().splitlines()[-1:]
        raise EnvironmentFault(
            f"{show(program)} does not start",
            why=last[0] if last else f"`--help` printed nothing and ended with {proc.exit_code(answer.code)}",
            do="run `llamafork doctor`, or `llamafork build` again",
        )
    return vocabulary
