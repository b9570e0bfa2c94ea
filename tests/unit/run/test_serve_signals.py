"""C5: whatever ends the wrapper ends the server, its exit code is passed on, and nothing is left behind."""

from __future__ import annotations

import json
import os
import pty
import signal
import sys
import time

import pytest
from run_world import World, Wrapper, gone, no_zombies, wait_for

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="needs the parent-death signal of Linux; run there to un-skip"
)


def ready(world: World, *words: str, mood: str = "") -> Wrapper:
    wrapper = world.serve(*words, mood=mood)
    wrapper.until("ready: http")
    return wrapper


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_the_childs_code_returned(world: World, number: int) -> None:
    wrapper = ready(world)
    wrapper.process.send_signal(number)
    code, _, err = wrapper.end()
    assert code == 0
    assert wrapper.facts["signal"] == number
    assert "waiting up to 30 s for the server to stop; press Ctrl-C again to kill" in err
    assert no_zombies(wrapper.pid())


def test_a_hangup_ends_the_server_and_is_its_exit_code(world: World) -> None:
    wrapper = ready(world)
    wrapper.process.send_signal(signal.SIGHUP)
    assert wrapper.end()[0] == 128 + signal.SIGHUP
    assert no_zombies(wrapper.pid())


def test_a_server_that_ignores_the_signal_is_killed_after_the_grace_period(world: World) -> None:
    wrapper = ready(world, "--grace", "0.5", mood="stubborn,grandchild")
    started = time.monotonic()
    wrapper.process.send_signal(signal.SIGTERM)
    code, _, err = wrapper.end()
    assert code == 128 + signal.SIGKILL
    assert 0.5 <= time.monotonic() - started < 4
    assert "did not stop in time" in err
    assert no_zombies(wrapper.pid())
    wait_for(lambda: gone(wrapper.pid("grandchild")))


def test_a_second_ctrl_c_kills_at_once(world: World) -> None:
    wrapper = ready(world, mood="stubborn")
    started = time.monotonic()
    wrapper.process.send_signal(signal.SIGINT)
    wrapper.until("press Ctrl-C again")
    time.sleep(0.4)
    wrapper.process.send_signal(signal.SIGINT)
    assert wrapper.end()[0] == 128 + signal.SIGKILL
    assert time.monotonic() - started < 5


def test_one_ctrl_c_delivered_twice_does_not_kill(world: World) -> None:
    wrapper = ready(world, "--grace", "0.6", mood="stubborn")
    started = time.monotonic()
    wrapper.process.send_signal(signal.SIGINT)
    time.sleep(0.01)
    wrapper.process.send_signal(signal.SIGINT)
    wrapper.end()
    assert time.monotonic() - started >= 0.6


def test_a_grandchild_left_in_the_group_does_not_outlive_the_server(world: World) -> None:
    wrapper = ready(world, "--grace", "0.5", mood="grandchild")
    wrapper.process.send_signal(signal.SIGTERM)
    assert wrapper.end()[0] == 0
    wait_for(lambda: gone(wrapper.pid("grandchild")))


def test_a_deliberately_detached_process_is_left_alone(world: World) -> None:
    wrapper = ready(world, mood="detached")
    wrapper.process.send_signal(signal.SIGTERM)
    wrapper.end()
    assert not gone(wrapper.pid("detached"))


@linux
@pytest.mark.parametrize("mood", ["grandchild", "stubborn,grandchild,ready=60"])
def test_a_killed_wrapper_takes_server_and_grandchild_with_it(world: World, mood: str) -> None:
    wrapper = world.serve(mood=mood)
    wait_for(world.record.exists)
    wrapper.process.kill()
    wrapper.process.wait()
    wait_for(lambda: gone(wrapper.pid()))
    wait_for(lambda: gone(wrapper.pid("grandchild")))


@linux
def test_a_wrapper_whose_parent_has_gone_goes_on(world: World) -> None:
    """As below a daemoniser: the parent ends at once, the wrapper is handed to another, such as process 1."""
    fork = "import os, sys; os.fork() and os._exit(0); os.setsid(); os.execv(sys.argv[1], sys.argv[1:])"
    daemon = world.serve(tool=[sys.executable, "-c", fork])
    daemon.process.wait(10)
    daemon.until("ready: http")
    server = daemon.pid()
    time.sleep(0.5)
    assert not gone(server)
    os.kill(server, signal.SIGTERM)
    wait_for(lambda: gone(server))


@linux
def test_closing_the_terminal_ends_the_server(world: World) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        words = world.command("serve", "-m", world.model, "--port", str(world.port), "--grace", "0.4")
        os.execve(sys.executable, words, {**world.env, "FAKE_MOOD": "grandchild,chatty"})
    seen = b""
    while b"ready: http" not in seen:
        seen += os.read(terminal, 4096)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP
    facts = json.loads(world.record.read_text())
    assert no_zombies(facts["pid"])
    wait_for(lambda: gone(facts["grandchild"]))


@linux
def test_ctrl_c_in_a_terminal_reaches_the_wrapper_only(world: World) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        words = world.command("serve", "-m", world.model, "--port", str(world.port))
        os.execve(sys.executable, words, world.env)
    seen = b""
    while b"ready: http" not in seen:
        seen += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    while b"press Ctrl-C again" not in seen:
        seen += os.read(terminal, 4096)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0


def test_nohup_is_respected(world: World) -> None:
    ignore = "import signal, os, sys; signal.signal(1, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    wrapper = world.serve(tool=[sys.executable, "-c", ignore])
    wrapper.until("ready: http")
    wrapper.process.send_signal(signal.SIGHUP)
    time.sleep(0.4)
    assert wrapper.process.poll() is None
    assert not gone(wrapper.pid())
    wrapper.process.send_signal(signal.SIGTERM)
    assert wrapper.end()[0] == 0
