"""Change fork-stamp: which upstream build and which series a program is."""

from __future__ import annotations

import subprocess
from pathlib import Path

from real_builds import serving

from llamafork.build.store import Build
from llamafork.run import client


def version(build: Build, program: str) -> str:
    done = subprocess.run([build.program(program), "--version"], capture_output=True, text=True)
    assert done.returncode == 0
    return done.stdout + done.stderr


def test_programs_name_the_pin_and_the_series(fork: Build) -> None:
    for program in ("llama-server", "llama-cli", "llama-completion"):
        text = version(fork, program)
        assert "build 11434," in text
        assert f"llamafork: b11434, series {fork.info['tree']}" in text


def test_the_twin_does_not_claim_to_be_the_fork(stock: Build) -> None:
    text = version(stock, "llama-server")
    assert "build 11434," in text
    assert "llamafork" not in text


def test_props_names_both(fork: Build, model: Path) -> None:
    with serving("-m", str(model), "-c", "512") as (url, _):
        props = client.session().get(f"{url}/props", timeout=10).json()
    assert props["llamafork"] == {"build": 11434, "series": fork.info["tree"]}
    assert props["build_info"].startswith("b11434-")
    assert props["build_info"].endswith(f"-lf.{fork.info['tree'][:8]}")
