"""One small checker per rule of the series; each yields findings as (change, message)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from llamafork.source.series import Change, Series

REQUIRED = ("Origin", "Upstream-Status", "Default", "Guard", "Drop-When", "Credit", "SPDX-License-Identifier")
OPTIONAL = ("Depends", "Backend", "Co-authored-by", "Assisted-by")
STATUS = re.compile(r"^(local|pending|(pending|submitted|rejected|merged) \S+)$")
SUBJECT = re.compile(r"^[a-z0-9_./+-]+ : \S.{3,100}$")
SOURCE_SUFFIX = (".c", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".m", ".cmake", ".py")
HOOK_LIMIT = 400  # added and removed lines; a longer hook has its idea in the wrong place

Finding = tuple[str, str]


@dataclass(frozen=True)
class Rule:
    name: str
    check: Callable[[Series, Change, Path | None], Iterator[str]]


def lint(series: Series, repo: Path | None) -> list[Finding]:
    """All findings. *repo* is the checkout that holds the tests a Guard names; without one they are not looked up."""
    found = [(c.name, f"{r.name}: {text}") for c in series.changes for r in RULES for text in r.check(series, c, repo)]
    return found + [("series", text) for text in _folder(series)]


def _folder(series: Series) -> Iterator[str]:
    known = {c.name for c in series.changes} | {"series", "series.lock"}
    for entry in sorted(series.folder.iterdir()):
        if entry.name not in known:
            yield f"{entry.name} is in the folder but not in the order file"


def _subject(_: Series, change: Change, __: Path | None) -> Iterator[str]:
    if not SUBJECT.match(change.subject):
        yield f"the subject is not `module : sentence`: {change.subject!r}"
    lines = change.message.splitlines()
    if len(lines) < 4 or lines[1] != "":
        yield "MESSAGE needs a subject, a blank line, the why, and trailers"
    if "one sentence that says what" in change.subject:
        yield "MESSAGE is still the template"


def _trailers(_: Series, change: Change, __: Path | None) -> Iterator[str]:
    trailers = change.trailers
    for key in REQUIRED:
        if key not in trailers:
            yield f"trailer {key} is missing"
    for key in trailers:
        if key not in REQUIRED + OPTIONAL:
            yield f"trailer {key} is not known"
    if trailers.get("Default", "on") not in {"on", "off"}:
        yield f"Default is on or off, not {trailers['Default']!r}"
    if not STATUS.match(trailers.get("Upstream-Status", "local")):
        yield f"Upstream-Status is local, pending, or a word and a URL, not {trailers['Upstream-Status']!r}"
    origin = trailers.get("Origin", "llamafork")
    if origin != "llamafork" and not re.match(r"^https://\S+$", origin):
        yield f"Origin is a URL or llamafork, not {origin!r}"
    if trailers.get("SPDX-License-Identifier", "MIT") != "MIT":
        yield "the licence is upstream's: MIT"


def _depends(series: Series, change: Change, _: Path | None) -> Iterator[str]:
    earlier = [c.name for c in series.changes[: series.changes.index(change)]]
    for name in change.depends:
        if name not in earlier:
            yield f"depends on {name}, which does not come before it"


def _guard(_: Series, change: Change, repo: Path | None) -> Iterator[str]:
    for guard in re.split(r"[,\s]+", change.trailers.get("Guard", "")):
        file = guard.partition("::")[0]
        if repo is not None and file.startswith("tests/") and not (repo / file).is_file():
            yield f"its guard {file} does not exist"


def _hooks(_: Series, change: Change, __: Path | None) -> Iterator[str]:
    if b"\r" in change.hooks:
        yield "hooks.diff has CR characters (line endings)"
    body = change.hooks.rstrip(b"\n").split(b"\n") if change.hooks else []
    for number, line in enumerate(body, 1):
        if line == b"":
            yield f"hooks.diff:{number}: bare blank context line (an editor stripped its leading space)"
        elif line.startswith(b"+") and line.rstrip(b" \t") != line and not line.startswith(b"+++"):
            yield f"hooks.diff:{number}: trailing blanks in an added line"
    if change.hook_lines > HOOK_LIMIT:
        yield f"hooks.diff changes {change.hook_lines} lines; more than {HOOK_LIMIT} belong into new/"
    if b"new file mode" in change.hooks:
        yield "hooks.diff creates a file; put it into new/"
    if b"deleted file mode" in change.hooks:
        yield "hooks.diff deletes an upstream file"


def _owners(series: Series, change: Change, _: Path | None) -> Iterator[str]:
    for other in series.changes:
        if other.name == change.name:
            continue
        for path in sorted(set(change.touched) & set(other.new)):
            yield f"edits {path}, which {other.name} owns"
        for path in sorted(set(change.new) & set(other.new)):
            yield f"{path} is in new/ of {other.name} too"


def _new(_: Series, change: Change, __: Path | None) -> Iterator[str]:
    if not change.hooks and not change.new:
        yield "neither hooks.diff nor new/"
    for path, content in change.new.items():
        if b"\r\n" in content:
            yield f"new/{path} has CRLF line endings"
        if path.endswith(SOURCE_SUFFIX) and b"SPDX-License-Identifier: MIT" not in content[:400]:
            yield f"new/{path} lacks its SPDX line"
        if any(line.rstrip(b" \t") != line for line in content.split(b"\n")):
            yield f"new/{path} has trailing blanks"
        if content and not content.endswith(b"\n"):
            yield f"new/{path} does not end with a newline"


RULES = (
    Rule("subject", _subject),
    Rule("trailers", _trailers),
    Rule("depends", _depends),
    Rule("guard", _guard),
    Rule("hooks", _hooks),
    Rule("owners", _owners),
    Rule("new", _new),
)
