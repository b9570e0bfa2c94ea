"""Generated lists cannot drift."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_generated_docs_are_current() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/generate-docs", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_links_between_pages_lead_somewhere() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    dead = [f"{page.name}: {link}" for page in pages for link in re.findall(r"\]\(([^)#]+)\)", page.read_text())
            if "://" not in link and not (page.parent / link).exists()]  # fmt: skip
    assert dead == []


def test_modules_stay_readable() -> None:
    long = [
        f"{f.name}: {n}" for f in (ROOT / "llamafork").rglob("*.py") if (n := len(f.read_text().splitlines())) > 400
    ]
    assert long == []
