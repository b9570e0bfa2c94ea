"""What `source fetch` does with a package index: through pip itself, on a folder of files, and with none at all."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from fake_upstream import World

from llamafork.errors import EnvironmentFault, Exit, SourceError
from llamafork.source import fetch, pin
from llamafork.source.git import environment
from llamafork.source.pin import Source

SOURCE = """\
[[source]]
kind = "sdist"
name = "fake-llama"
version = "11434.0.0"
sha256 = "{sha256}"
subfolder = "llama.cpp"
"""
# Of its own, so that pip needs nothing else to look at the sdist.
BACKEND = """\
import os
def prepare_metadata_for_build_wheel(folder, settings=None):
    os.makedirs(f"{folder}/fake_llama-11434.0.0.dist-info")
    with open(f"{folder}/fake_llama-11434.0.0.dist-info/METADATA", "w") as out:
        out.write("Metadata-Version: 2.1\\nName: fake-llama\\nVersion: 11434.0.0\\n")
    return "fake_llama-11434.0.0.dist-info"
def build_wheel(*_): raise SystemExit("not built here")
"""
PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def sdist(world: World) -> Path:
    root = world.base / "fake_llama-11434.0.0"
    world.write(root / "pyproject.toml", PYPROJECT)
    world.write(root / "backend.py", BACKEND)
    world.write(root / "PKG-INFO", "Metadata-Version: 2.1\nName: fake-llama\nVersion: 11434.0.0\n")
    packed = world.base / "wheels" / "fake_llama-11434.0.0.tar.gz"
    packed.parent.mkdir()
    with tarfile.open(packed, "w:gz") as out:
        out.add(root, arcname=root.name)
        out.add(world.upstream, arcname=f"{root.name}/llama.cpp")
    return packed


def pinned(world: World, sha256: str) -> Source:
    at = world.repo / "vendor/upstream.toml"
    world.write(at, at.read_text().partition("[[source]]")[0] + SOURCE.format(sha256=sha256))
    return pin.load(at).sources[0]


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def wheels(world: World, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An sdist of the right name in a local folder, the only place where pip looks."""
    packed = sdist(world)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(packed.parent))
    return packed


def kept(world: World) -> list[Path]:
    return [f for f in (world.home / "cache/downloads").rglob("*") if f.is_file()]


def test_an_sdist_gives_the_tree_of_its_folder(world: World, wheels: Path) -> None:
    want = fetch.local(world.paths, pin.load(world.repo / "vendor/upstream.toml"), world.upstream).tree
    world.ok("source", "clean")
    pinned(world, sha256(wheels))
    assert world.json("source", "fetch")["tree"] == want
    wheels.unlink()
    world.ok("source", "fetch", "--offline")
    assert [f.name for f in kept(world)] == [wheels.name]


def test_a_wrong_sdist_is_refused_and_not_kept(world: World, wheels: Path) -> None:
    source = pinned(world, "0" * 64)
    code, _, err = world.run("source", "fetch")
    assert code == Exit.SOURCE
    assert "wrong hash" in err
    assert kept(world) == []
    assert fetch.cached(world.paths, pin.load(world.repo / "vendor/upstream.toml")) is None
    with pytest.raises(SourceError, match="wrong hash"):
        fetch.download(world.paths, source)


def test_no_network_is_said_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PIP_INDEX_URL", "http://127.0.0.1:9/simple"), ("PIP_RETRIES", "1"), ("NO_PROXY", "*")):
        monkeypatch.setenv(name, value)
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    source = pinned(world, "0" * 64)
    with pytest.raises(SourceError, match="no network") as caught:
        fetch.download(world.paths, source)
    assert caught.value.code == Exit.SOURCE
    assert kept(world) == []


def fake_pip(world: World, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    world.write(world.base / "fake/pip/__init__.py", "")
    world.write(world.base / "fake/pip/__main__.py", f"import os, sys, time\nfrom pathlib import Path\n{body}\n")
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(world.base / "fake"), *([before] if before else [])]))


def test_a_disk_that_fills_up_during_the_download(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    dies = "into = Path(sys.argv[sys.argv.index('-d') + 1]) if '-d' in sys.argv else sys.exit(0)\n"
    dies += "(into / 'fake.tar.gz').write_text('half')\n"
    dies += "sys.exit('ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device')"
    fake_pip(world, monkeypatch, dies)
    source = pinned(world, "0" * 64)
    with pytest.raises(EnvironmentFault, match="no space left"):
        fetch.download(world.paths, source)
    assert world.run("source", "fetch")[0] == Exit.ENVIRONMENT
    assert kept(world) == []


@pytest.mark.parametrize("kind", ["sdist", "git"])
def test_offline_starts_no_program_that_would_use_the_network(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The same pin without --offline does start it, so that the guard is known to work."""
    called = world.base / "called"
    fake_pip(world, monkeypatch, f"Path({str(called)!r}).write_text('pip')\nsys.exit('ERROR: none')")
    shim = world.base / "bin/git"
    network = "fetch|clone|ls-remote|remote-*|pull"
    check = f'for word; do case "$word" in {network}) echo git > {called};; esac; done\n'
    world.write(shim, f'#!/bin/sh\n{check}PATH={os.environ["PATH"]} exec git "$@"\n')
    shim.chmod(0o755)
    monkeypatch.setenv("PATH", f"{shim.parent}:{os.environ['PATH']}")
    if kind == "sdist":
        pinned(world, "0" * 64)
    else:
        at = world.repo / "vendor/upstream.toml"
        head = at.read_text().partition("[[source]]")[0]
        world.write(at, f'{head}[[source]]\nkind = "git"\nurl = "file://{world.base}/none"\nref = "b11434"\n')
    for words in (("source", "fetch"), ("patch", "apply"), ("patch", "refresh"), ("build", "--dry-run")):
        code, _, err = world.run(*words, "--offline")
        assert code == Exit.SOURCE
        assert "--offline forbids" in err
        assert not called.exists(), words
    assert world.run("source", "fetch")[0] == Exit.SOURCE
    assert called.read_text().strip() == {"sdist": "pip", "git": "git"}[kind]


def test_a_killed_fetch_takes_pip_with_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the wrapper is killed; run again at once, no pip writes beside the new one."""
    waits = "if '-d' not in sys.argv: sys.exit(0)\n"
    waits += f"Path({str(world.base / 'pid')!r}).write_text(str(os.getpid()))\ntime.sleep(60)"
    fake_pip(world, monkeypatch, waits)
    pinned(world, "0" * 64)
    wrapper = subprocess.Popen([sys.executable, "-m", "llamafork", "source", "fetch"], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while not ((world.base / "pid").is_file() and (world.base / "pid").read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    left = psutil.Process(int((world.base / "pid").read_text()))
    wrapper.send_signal(signal.SIGKILL)
    wrapper.wait()
    (world.base / "fake/pip/__main__.py").write_text("raise SystemExit('ERROR: none')")
    assert world.run("source", "fetch")[0] == Exit.SOURCE
    deadline = time.monotonic() + 5
    while left.is_running() and left.status() != psutil.STATUS_ZOMBIE:  # it frees the lock shortly before
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert list((world.home / "cache/downloads").glob(".part-*")) == []


def test_full_clone_shallow_clone_and_tarball_give_the_same_tree(world: World) -> None:
    """B7: neither the history nor the way of packing has a say."""
    chosen = pin.load(world.repo / "vendor/upstream.toml")
    want = fetch.fetch(world.paths, chosen).tree
    origin = world.base / "origin"

    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(world.base), *words], check=True, env=environment(), capture_output=True)

    git("init", "-q", str(origin))
    world.write(origin / "CMakeLists.txt", "an older state\n")
    git("-C", str(origin), "add", "-A")
    git("-C", str(origin), "commit", "-q", "-m", "older")
    for name, content in world.files(world.upstream).items():
        world.write(origin / name, content.decode())
    git("-C", str(origin), "add", "-A", "-f")
    git("-C", str(origin), "commit", "-q", "-m", "the pin")
    git("-C", str(origin), "tag", "b11434")
    git("clone", "-q", str(origin), "full")
    git("clone", "-q", "--depth", "1", "--branch", "b11434", f"file://{origin}", "shallow")
    git("-C", str(origin), "archive", "--prefix=llama.cpp-b11434/", "-o", str(world.base / "up.tar.gz"), "b11434")
    assert (world.base / "shallow/.git/shallow").exists()
    for clone in ("full", "shallow"):
        for source in (Source("git", url=str(world.base / clone), ref="b11434"),
                       Source("folder", path=str(world.base / clone))):  # fmt: skip
            fetch.clean(world.paths)
            found = fetch.fetch(world.paths, replace(chosen, sources=(source,)))
            assert (found.tree, found.pin.build) == (want, 11434), source
    fetch.clean(world.paths)
    assert fetch.local(world.paths, chosen, world.base / "up.tar.gz").tree == want
