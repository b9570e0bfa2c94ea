"""Programs end with the wrapper or keep its lock until they do; nothing else is left of a killed run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from llamafork import proc
from llamafork.errors import EnvironmentFault

pytestmark = pytest.mark.skipif(os.name != "posix", reason="process groups and flock; run on Linux or macOS to un-skip")

# Runs a program under the lock; the program writes its number, waits, and writes again.
WRAPPER = """\
import sys
from pathlib import Path
from llamafork import proc
from llamafork.errors import EnvironmentFault
folder, guarded = Path(sys.argv[1]), sys.argv[2] == "guarded"
script = f"echo $$ > {folder}/pid; sleep {sys.argv[3]}; echo late > {folder}/late"
with proc.lock(folder / "lock"):
    proc.run(["sh", "-c", script], guarded=guarded)
"""


def killed(folder: Path, kind: str, seconds: float, sent: signal.Signals = signal.SIGKILL) -> psutil.Process:
    """The program that a wrapper had started when it alone was killed."""
    wrapper = subprocess.Popen([sys.executable, "-c", WRAPPER, str(folder), kind, str(seconds)], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 10
    while not ((folder / "pid").is_file() and (folder / "pid").read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    left = psutil.Process(int((folder / "pid").read_text()))
    wrapper.send_signal(sent)
    wrapper.communicate()
    return left


def gone(left: psutil.Process) -> bool:
    return not left.is_running() or left.status() == psutil.STATUS_ZOMBIE


def ended(left: psutil.Process) -> None:
    """A dying process closes its files, and with them frees the lock, shortly before it counts as gone."""
    deadline = time.monotonic() + 5
    while not gone(left):
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def test_a_lock_outlives_a_killed_wrapper_as_long_as_its_program(tmp_path: Path) -> None:
    left = killed(tmp_path, "plain", 1.5)
    assert not gone(left)
    with proc.lock(tmp_path / "lock"):
        assert (tmp_path / "late").exists()


def test_a_guarded_program_dies_with_a_killed_wrapper(tmp_path: Path) -> None:
    left = killed(tmp_path, "guarded", 60)
    started = time.monotonic()
    with proc.lock(tmp_path / "lock"):
        ended(left)
    assert time.monotonic() - started < 10
    assert not (tmp_path / "late").exists()


@pytest.mark.parametrize("kind", ["plain", "guarded"])
def test_an_interrupted_wrapper_ends_its_program(tmp_path: Path, kind: str) -> None:
    assert gone(killed(tmp_path, kind, 3, signal.SIGINT))


def test_a_lock_is_free_after_use_and_may_be_taken_twice(tmp_path: Path) -> None:
    at = tmp_path / "lock"
    for _ in range(2):
        with proc.lock(at), proc.lock(at):
            assert len(proc.shared_fds()) == 1
    assert proc.shared_fds() == ()


def test_a_daemon_that_a_program_left_behind_does_not_keep_the_lock(tmp_path: Path) -> None:
    with proc.lock(tmp_path / "lock"):
        daemon = int(proc.run(["sh", "-c", "sleep 30 >/dev/null 2>&1 & echo $!"]).out)
    try:
        started = time.monotonic()
        with proc.lock(tmp_path / "lock"):
            assert time.monotonic() - started < 5
    finally:
        os.kill(daemon, signal.SIGKILL)


def test_a_program_that_does_not_answer_is_ended(tmp_path: Path) -> None:
    for guarded in (False, True):
        done = proc.run(["sleep", "30"], timeout=0.2, guarded=guarded)
        assert done.code == 124


def test_output_is_kept_undecoded_too() -> None:
    done = proc.run(["printf", r"\377a"])
    assert (done.raw, done.out) == (b"\xffa", "�a")


def test_a_guarded_program_does_not_start_before_the_guardian_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kill between the two leaves: the gate's pipe ends, and so does the gate."""
    begun = []

    def killed_here(watcher: object, text: str) -> None:
        if text != "done\n":
            time.sleep(0.3)
            begun.append((tmp_path / "begun").exists())
            raise KeyboardInterrupt

    monkeypatch.setattr(proc, "_write", killed_here)
    with pytest.raises(KeyboardInterrupt):
        proc.run(["touch", tmp_path / "begun"], guarded=True)
    assert begun == [False]
    assert not (tmp_path / "begun").exists()


@pytest.mark.parametrize("guarded", [False, True])
def test_a_guarded_program_gets_its_input_and_nothing_more(guarded: bool) -> None:
    assert proc.run(["cat"], stdin="one\ntwo\n", guarded=guarded).out == "one\ntwo\n"
    assert proc.run(["cat"], guarded=guarded).out == ""


@pytest.mark.parametrize("guarded", [False, True])
def test_a_program_that_is_not_there_says_so(guarded: bool) -> None:
    with pytest.raises(EnvironmentFault, match="cannot run no-such-program"):
        proc.run(["no-such-program"], guarded=guarded)


@pytest.mark.parametrize("kind", ["plain", "guarded"])
def test_ctrl_c_while_a_program_starts_is_not_lost_and_leaves_none(tmp_path: Path, kind: str) -> None:
    for delay in (0.0, 0.002, 0.005, 0.01, 0.02):
        folder = tmp_path / str(delay)
        folder.mkdir()
        wrapper = subprocess.Popen(
            [sys.executable, "-c", WRAPPER.replace("with proc.lock", "print(flush=True)\nwith proc.lock"),
             str(folder), kind, "60"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert wrapper.stdout is not None
        wrapper.stdout.readline()
        time.sleep(delay)
        wrapper.send_signal(signal.SIGINT)
        wrapper.communicate(timeout=10)
        at = folder / "pid"
        if at.is_file() and at.read_text().strip():
            ended(psutil.Process(int(at.read_text())))
        assert not (folder / "late").exists()
