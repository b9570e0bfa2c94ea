"""docs/pitfalls.md: 42 rows, and every test that a row names is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/pitfalls.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if re.match(r"\| \d+ ", line)
]
NAMED = re.compile(r"`((?:unit|integration)/[\w/]+\.py(?:::\w+)+|test-[\w-]+ [\w-]+)`")


@cache
def python_tests(name: str) -> set[str]:
    """Their node names in a file below tests/."""
    tree = ast.parse((ROOT / "tests" / name).read_text())
    classes = {
        f"{node.name}::{part.name}"
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for part in node.body
        if isinstance(part, ast.FunctionDef)
    }
    return classes | {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@cache
def program_cases(name: str) -> set[str]:
    """The cases of a test program of the series, from its list of them."""
    sources = sorted(ROOT.glob(f"patches/*/new/tests/{name}.cpp"))
    return {case for source in sources for case in re.findall(r'^\s+\{ "([\w-]+)",', source.read_text(), re.M)}


def exists(named: str) -> bool:
    if " " in named:
        program, case = named.split()
        return case in program_cases(program)
    file, _, test = named.partition("::")
    return (ROOT / "tests" / file).is_file() and test in python_tests(file)


def test_the_list_is_whole() -> None:
    assert [int(row[0]) for row in ROWS] == list(range(1, 43))
    assert all(len(row) == 4 and all(row) for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_has_a_test_that_exists_or_a_reason(row: list[str]) -> None:
    named = NAMED.findall(row[3])
    assert named or re.match(r"none: .{8,}", row[3])
    assert [name for name in named if not exists(name)] == []
    assert (
        re.sub(r"\s|,|\(.*?\)", "", NAMED.sub("", row[3])) == "" or not named
    )  # nothing that looks like one and is not


def test_names_in_guards_are_in_the_series() -> None:
    code = "".join(f.read_text() for f in (ROOT / "patches").rglob("*") if f.suffix in (".cpp", ".h", ".c", ".diff"))
    words = {w for row in ROWS for w in re.findall(r"`([a-z_:]+)`", row[2])}
    assert words
    assert [w for w in sorted(words) if w.split("::")[-1] not in code] == []
