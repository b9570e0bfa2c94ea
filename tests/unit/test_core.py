"""The shared floor: files written whole, secrets kept, processes ended, one JSON object, plain lines."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fake_upstream import World

from llamafork import console, errors, paths, proc
from llamafork.errors import EnvironmentFault, Exit, UsageError


def test_every_exit_code_has_a_meaning_and_every_error_a_code() -> None:
    assert set(errors.MEANING) == set(Exit)
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.LlamaforkError)]
    assert len(kinds) >= 8
    assert all(k("x").as_dict()["exit"] in set(Exit) for k in kinds)


def half_written(target: Path) -> None:
    with paths.atomic(target) as temporary:
        temporary.write_text("half")
        raise RuntimeError


def test_an_atomic_write_shows_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    target = tmp_path / "file"
    paths.write_atomic(target, "old")
    with pytest.raises(RuntimeError):
        half_written(target)
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_what_a_killed_writer_left_is_swept_and_a_living_one_is_not(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f".file.{dead.pid}.x.tmp").write_text("left")
    mine = tmp_path / f".file.{os.getpid()}.x.tmp"
    mine.write_text("being written")
    paths.write_atomic(tmp_path / "file", "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([mine.name, "file"])


def odd(folder: Path) -> dict[str, Path]:
    """What has a name and is no file; a device only by a link, so that a failing test does no harm."""
    made = {"a folder": folder / "folder", "a pipe": folder / "pipe", "a socket": folder / "s"}
    made["a device"] = folder / "null"
    made["a device"].symlink_to("/dev/null")
    made["a folder"].mkdir()
    os.mkfifo(made["a pipe"])
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(made["a socket"]))  # the whole name may be too long for a socket
    return made


def test_what_is_no_file_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for kind, there in odd(tmp_path).items():
        link = tmp_path / f"link to {kind}"
        link.symlink_to(there)
        for name in (there, link):
            before = there.stat()
            with pytest.raises(UsageError, match=kind), paths.atomic(name):
                pass
            assert (there.stat().st_mode, there.stat().st_ino) == (before.st_mode, before.st_ino)
        assert link.is_symlink()
    for kind in ("a folder", "a socket"):
        with pytest.raises(UsageError, match=kind):
            paths.check_result(tmp_path / f"link to {kind}", stream=True)
    with pytest.raises(UsageError, match="is not open"):
        paths.check_result(Path("/dev/fd/999"), stream=True)


def test_a_link_is_replaced_itself(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    for name in ("file", "nothing"):
        link = tmp_path / f"link-{name}"
        link.symlink_to(tmp_path / name)
        paths.write_atomic(link, "new")
        assert not link.is_symlink()
        assert link.read_text() == "new"
    assert (tmp_path / "file").read_text() == "kept"


def test_devices_and_pipes_are_written_to_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "null").symlink_to("/dev/null")
    paths.write_atomic(tmp_path / "null", "x")
    assert (tmp_path / "null").is_char_device()
    os.mkfifo(tmp_path / "pipe")
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append((tmp_path / "pipe").read_text()))
    reader.start()
    paths.write_atomic(tmp_path / "pipe", "through it")
    reader.join(timeout=30)
    assert got == ["through it"]
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1"])
def test_standard_output_that_is_a_file_keeps_what_it_has(tmp_path: Path, name: str) -> None:
    code = "from llamafork import paths; print('a'); paths.write_atomic(paths.Path('link'), 'b\\n'); print('c')"
    (tmp_path / "link").symlink_to(name)
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", code], stdout=out, check=True, cwd=tmp_path)
    assert (tmp_path / "out").read_text() == "a\nb\nc\n"
    assert (tmp_path / "link").is_symlink()


def test_secrets_are_not_printed() -> None:
    words = ["serve", "--api-key", "s3cret", "--api-key=s3cret", "-hft", "s3cret", "--port", "1"]
    assert "s3cret" not in proc.command_line(words)
    assert "--port 1" in proc.command_line(words)
    assert "s3cret" not in console.redact("Authorization: Bearer s3cret and token=s3cret, HF_TOKEN=s3cret")


def test_a_printed_command_can_be_pasted() -> None:
    words = ["/a b/prog", "-m", " my (model) [v1].gguf", "it's", "$HOME"]
    done = subprocess.run(["sh", "-c", f"printf '%s\\n' {proc.command_line(words)}"], capture_output=True, text=True)
    assert done.stdout.splitlines() == words


def test_a_program_that_is_not_there_is_a_fault() -> None:
    with pytest.raises(EnvironmentFault) as caught:
        proc.run(["no-such-program-anywhere"])
    assert "install no-such-program-anywhere" in caught.value.do


def test_the_shutdown_ladder_ends_with_kill_of_the_group() -> None:
    code = (
        "import signal, subprocess, sys, time; signal.signal(15, signal.SIG_IGN); "
        "p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    started = time.monotonic()
    assert proc.exit_code(proc.shut_down(child, grace=0.3)) == 128 + 9
    assert time.monotonic() - started < 5
    time.sleep(0.1)
    state = Path(f"/proc/{grandchild}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


def test_json_is_one_object_also_for_failures(world: World) -> None:
    code, out, _ = world.run("patch", "show", "nothing", "--json")
    assert code == Exit.PATCH
    assert json.loads(out)["exit"] == Exit.PATCH
    for words in (("source", "status"), ("patch", "list"), ("builds", "list")):
        assert str(world.json(*words)["schema"]).startswith("llamafork.")


def test_options_before_and_after_the_verb_mean_the_same(world: World) -> None:
    world.ok("patch", "refresh")
    before = world.run("--json", "patch", "list")[1]
    assert json.loads(before) == json.loads(world.run("patch", "list", "--json")[1])


def test_quiet_shows_results_only(world: World) -> None:
    code, out, err = world.run("-q", "source", "fetch")
    assert (code, err) == (0, "")
    assert "b11434" in out


def test_no_escape_codes_when_not_a_terminal(world: World) -> None:
    for words in (("source", "fetch"), ("doctor",), ("patch", "show", "nothing")):
        _, out, err = world.run(*words)
        assert "\x1b" not in out + err
        assert out + err


@pytest.mark.parametrize("home", ["/etc/passwd/x", "/proc/nothing/here"])
@pytest.mark.parametrize("words", [("source", "fetch"), ("build",), ("patch", "apply")], ids=" ".join)
def test_an_impossible_home_is_explained(
    world: World, monkeypatch: pytest.MonkeyPatch, home: str, words: list[str]
) -> None:
    world.ok("patch", "refresh")
    monkeypatch.setenv("LLAMAFORK_HOME", home)
    code, _, err = world.run(*words)
    assert code == Exit.ENVIRONMENT
    assert "LLAMAFORK_HOME" in err
    code, out, _ = world.run("doctor")
    assert code == Exit.ENVIRONMENT
    assert "\tbad\t" in out


def test_a_folder_without_permission_is_explained(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write anywhere, so the refusal is the operating system's own for a read-only place."""
    home = Path("/sys/llamafork")
    monkeypatch.setenv("LLAMAFORK_HOME", str(home))
    code, _, err = world.run("source", "fetch")
    assert code == Exit.ENVIRONMENT
    assert "/sys" in err


def test_a_checkout_that_is_none_is_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMAFORK_REPO", "/nonexistent")
    code, _, err = world.run("patch", "list")
    assert code == Exit.ENVIRONMENT
    assert "LLAMAFORK_REPO" in err


def test_strange_outputs_end_without_a_traceback(world: World) -> None:
    run = [sys.executable, "-m", "llamafork"]
    for command in (f"{' '.join(run)} --json doctor > /dev/full", f"{' '.join(run)} doctor >&-",
                    f"{' '.join(run)} doctor | head -1", f"{' '.join(run)} --json frob"):  # fmt: skip
        done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
        assert "Traceback" not in done.stderr, (command, done.stderr)
    assert json.loads(done.stdout)["exit"] == Exit.USAGE


def test_a_name_that_is_too_long_is_explained(world: World) -> None:
    code, _, err = world.run("make-model", f"{'x' * 300}.gguf")
    assert code == Exit.ENVIRONMENT
    assert "too long" in err


def test_a_report_takes_the_place_of_no_model_and_no_program(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF and more")
    (tmp_path / "tool").write_bytes(b"\x7fELF")
    (tmp_path / "old.md").write_text("| a |")
    for name, what in (("m.gguf", "a model"), ("tool", "a program")):
        with pytest.raises(UsageError, match=what):
            paths.check_report(tmp_path / name)
    paths.check_report(tmp_path / "old.md")
    paths.check_report(tmp_path / "new.md")
