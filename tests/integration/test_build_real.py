"""The builds that users get: stamped, relocatable, complete, and reused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import psutil
import pytest
from real_builds import ROOT, complete, find, llamafork, serving

from llamafork.build import check
from llamafork.build.store import Build
from llamafork.run import client
from llamafork.source import pin, series


def test_building_again_has_nothing_to_do(fork: Build) -> None:
    done = json.loads(llamafork("build", "--json").stdout)
    assert (done["key"], done["fresh"]) == (fork.key, False)


def test_build_json_says_what_was_built(fork: Build, stock: Build) -> None:
    lock = series.read_lock(ROOT / "patches" / "series.lock")
    assert fork.info["tree"] == list(lock.values())[-1]
    assert stock.info["tree"] == lock["pin"] == pin.load(ROOT / "vendor/upstream.toml").tree
    for build in (fork, stock):
        assert build.info["build"] == 11434
        assert build.info["seconds"] > 0
        assert "cpu" in build.info["backends"]
        assert build.info["compiler"]


@pytest.mark.parametrize(
    "program", ["llama-server", "llama-cli", "llama-bench", "llama-completion", "llama-perplexity"]
)
def test_a_build_runs_anywhere(fork: Build, tmp_path: Path, program: str) -> None:
    """A4: moved as a whole, or called through a link, with no loader path set."""
    moved = tmp_path / "moved here"
    shutil.copytree(fork.root, moved, symlinks=True)
    link = tmp_path / "link"
    link.symlink_to(moved / "bin" / program)
    assert check.unresolved(moved / "bin") == []
    env = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    done = subprocess.run([link, "--help"], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr


def test_the_same_answer_as_stock(fork: Build, stock: Build, model: Path) -> None:
    """Off means stock: with no feature on, tokens and log probabilities are the twin's, digit for digit."""
    ours = json.loads(complete(fork, model).answer)
    assert len(ours["tokens"]) == 32
    assert len(ours["completion_probabilities"]) == 32
    assert ours == json.loads(complete(stock, model).answer)


def test_bench_passes_everything_on(fork: Build, model: Path) -> None:
    done = llamafork("bench", "-m", str(model), "-p", "8", "-n", "4", "-r", "1", "-o", "json")
    rows = json.loads(done.stdout)
    assert {row["n_prompt"] for row in rows} == {8, 0}
    assert all(row["build_number"] == 11434 for row in rows)


def test_cli_runs_the_built_program(fork: Build) -> None:
    done = llamafork("cli", "--version")
    assert "build 11434" in done.stdout + done.stderr


@pytest.mark.slow
def test_the_series_applies_to_another_upstream(fork: Build, model: Path) -> None:
    """By git's own 3-way merge, onto b11401; it builds there and runs."""
    made = find("--upstream", "sdist:11401", "--target", "llama-completion", "--target", "llama-server")
    done = subprocess.run([made.program("llama-server"), "--version"], capture_output=True, text=True)
    assert "build 11401" in done.stderr
    assert "llamafork: b11401" in done.stderr
    assert len(json.loads(complete(made, model).answer)["tokens"]) == 32


@pytest.mark.slow
def test_a_wheel_does_what_a_checkout_does(fork: Build, model: Path, tmp_path: Path) -> None:
    """Built by pip from the checkout, installed in an empty environment elsewhere: build and serve."""
    clean = tmp_path / "source"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clean)], check=True)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(tmp_path), str(clean)], check=True)
    wheel = next(tmp_path.glob("llamafork-*-py3-none-any.whl"))
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "-q", "--disable-pip-version-check", "install", str(wheel), "cmake", "ninja"],
                   check=True)  # fmt: skip
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "LLAMAFORK_HOME": str(tmp_path / "home"),
           "CCACHE_DIR": os.environ.get("CCACHE_DIR", str(Path.home() / ".cache/llamafork/ccache"))}  # fmt: skip
    env |= {k: v for k, v in os.environ.items() if k.startswith(("PIP_", "http", "HTTP", "SSL_", "REQUESTS_"))}
    done = subprocess.run([python, "-m", "llamafork", "build", "--json"], capture_output=True, text=True, env=env,
                          cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    made = json.loads(done.stdout)
    assert made["tree"] == fork.info["tree"]
    with serving("-m", str(model), env=env, tool=(str(python), "-m", "llamafork"), cwd=tmp_path) as (url, server):
        assert client.session().get(f"{url}/props", timeout=10).json()["llamafork"]["series"] == fork.info["tree"]
        (child,) = (p for p in psutil.Process(server.pid).children() if p.name() == "llama-server")
        assert child.exe().startswith(made["root"])
