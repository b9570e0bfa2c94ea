"""serve from the outside: C11 (ready), C6 (flags), C12 (names), exit codes, logs, ports."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from run_world import World, Wrapper, split_parts, tiny_gguf, wait_for

from llamafork.run import verbs


def stop(wrapper: Wrapper) -> tuple[int, str, str]:
    wrapper.process.send_signal(signal.SIGTERM)
    return wrapper.end()


# C11


def test_ready_only_when_health_says_so_and_without_a_proxy(world: World) -> None:
    dead = "http://127.0.0.1:9"
    proxies = dict.fromkeys(("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"), dead)
    started = time.monotonic()
    wrapper = world.serve(mood="ready=1,chatty", **proxies)
    line = wrapper.until("ready: http")
    assert time.monotonic() - started >= 1
    assert line.startswith(f"ready: http://127.0.0.1:{world.port} (build LLAMAFORK_PROGRAM_DIR, ")
    assert f"http://127.0.0.1:{world.port}/v1" in wrapper.until("OpenAI API")
    assert stop(wrapper)[0] == 0


def test_a_server_that_dies_while_loading_is_noticed_at_once_with_its_last_words(world: World) -> None:
    started = time.monotonic()
    code, _, err = world.serve(mood="ready=60,dies=1,code=7").end()
    assert code == 7
    assert time.monotonic() - started < 5
    explained = err.partition("error: llama-server ended with exit code 7 before it was ready")[2]
    assert "error: tensor 'blk.7.ffn' is cursed" in explained
    assert "the whole log: " in explained


def test_a_server_that_ends_well_without_being_ready_is_unhealthy(world: World) -> None:
    code, _, err = world.serve(mood="last-words").end()
    assert code == 9
    assert "before it was ready" in err


def test_a_server_that_dies_at_once_passes_its_code_on(world: World) -> None:
    code, out, err = world.start(
        "--json", "serve", "-m", world.model, "--port", str(world.port), mood="last-words,code=3"
    ).end()
    assert code == 3
    assert json.loads(out)["exit"] == 3
    assert err.count("out of memory on CUDA0") == 2


def test_a_server_that_dies_later_passes_its_code_on(world: World) -> None:
    wrapper = world.serve(mood="dies=1.5,code=5")
    wrapper.until("ready: http")
    code, _, err = wrapper.end()
    assert code == 5
    assert "ended with exit code 5\n" in err


def test_the_cap_on_loading(world: World) -> None:
    code, _, err = world.serve("--ready-timeout", "0.5", "--grace", "5", mood="ready=60").end()
    assert code == 9
    assert "not ready within 0.5 s" in err
    assert wait_for(lambda: not _answers(world.port))


def _answers(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def test_a_server_on_all_addresses_is_probed_on_loopback_and_warned_about(world: World) -> None:
    wrapper = world.serve("--host", "0.0.0.0")
    assert f"http://127.0.0.1:{world.port} " in wrapper.until("ready: http")
    assert "anyone who can reach 0.0.0.0" in stop(wrapper)[2]


def test_no_warning_with_a_key_and_the_key_is_never_printed(world: World) -> None:
    wrapper = world.serve("--host", "0.0.0.0", "--api_key", "sesame-1", mood="dies=0.5,code=4")
    _, out, err = wrapper.end()
    assert "anyone" not in err
    logs = "".join(log.read_text() for log in (world.root / "own/state/logs").iterdir())
    assert "sesame-1" not in out + err + logs
    assert "sesame-1" in json.dumps(wrapper.facts["argv"])


def test_a_unix_socket_and_a_prefix(world: World, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("s") / "x.sock"
    wrapper = world.serve("--host", path, "--api-prefix", "/llm")
    assert f"ready: unix://{path}/llm " in wrapper.until("ready: ")
    assert stop(wrapper)[0] == 0


def test_tls_is_probed_without_verification(world: World) -> None:
    key, cert = world.root / "key.pem", world.root / "cert.pem"
    request = shlex.split("openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=x")
    made = subprocess.run([*request, "-keyout", key, "-out", cert], capture_output=True)
    assert made.returncode == 0
    wrapper = world.serve("--ssl-key-file", key, "--ssl-cert-file", cert)
    assert wrapper.until("ready: ").startswith(f"ready: https://127.0.0.1:{world.port} ")
    assert stop(wrapper)[0] == 0


def test_a_used_port_is_found_before_the_start(world: World) -> None:
    with socket.create_server(("127.0.0.1", world.port)):
        code, _, err = world.serve().end()
    assert code == 3
    assert f"port {world.port} is already in use" in err
    assert f"(process {os.getpid()}) listens there" in err
    assert "use --port " in err
    assert not world.record.exists()


def test_port_zero_is_chosen_by_us(world: World) -> None:
    wrapper = world.serve("--port", "0")
    port = wrapper.until("ready: http").split(":")[3].split()[0]
    assert int(port) > 0
    assert stop(wrapper)[0] == 0
    assert "0" not in wrapper.facts["argv"]  # type: ignore[operator]


# pass-through, logs


def test_output_is_passed_through_unaltered_and_kept(world: World) -> None:
    wrapper = world.serve(mood="no-end-of-line")
    wait_for(world.record.exists)
    time.sleep(0.6)
    _, out, err = stop(wrapper)
    assert out == "out: bound\x1b[0m \xe4\n"
    assert "loading ...." in err
    (log,) = (world.root / "own/state/logs").iterdir()
    assert log.name.startswith("serve-")
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert "out: bound\x1b[0m" in log.read_text()
    assert "llama-server -m" in log.read_text().splitlines()[0]


def test_only_the_newest_logs_are_kept(world: World) -> None:
    folder = world.root / "own/state/logs"
    folder.mkdir(parents=True)
    for number in range(30):
        (folder / f"serve-20200101-0000{number:02d}-1.log").write_text("old")
    world.serve(mood="last-words,code=1").end()
    names = sorted(log.name for log in folder.iterdir())
    assert len(names) == 20
    assert names[0] == "serve-20200101-000011-1.log"


def test_a_place_without_logs_does_not_stop_the_server(world: World) -> None:
    (world.root / "own").write_text("a file where a folder should be")
    wrapper = world.serve()
    wrapper.until("no log is kept")
    wrapper.until("ready: http")
    assert stop(wrapper)[0] == 0


# C6


@pytest.mark.parametrize("vocabulary", ["current", "old", "fork"])
def test_flags_are_checked_against_the_program_that_runs(world: World, vocabulary: str) -> None:
    code, _, err = world.serve("--moe-expert-cache", "4", "--dry-run", FAKE_HELP=vocabulary).end()
    assert code == (0 if vocabulary == "fork" else 2)
    assert ("no flag --moe-expert-cache" in err) == (vocabulary != "fork")


def test_a_bare_flash_attention_does_not_eat_the_next_flag(world: World) -> None:
    wrapper = world.serve("-fa", "-ngl", "-1", "--temp", "-1")
    wrapper.until("ready: http")
    _, _, err = stop(wrapper)
    assert "-fa now takes a value; read as -fa on" in err
    argv = wrapper.facts["argv"]
    assert isinstance(argv, list)
    assert argv[-8:] == ["-fa", "on", "-ngl", "-1", "--temp", "-1", "--host", "127.0.0.1"]


def test_a_rename_of_equal_meaning_is_made_and_said(world: World) -> None:
    code, out, err = world.serve("--no-mmap", "--dry-run").end()
    assert code == 0
    assert "--load-mode none" in out
    assert "--no-mmap is now --load-mode none" in err
    code, out, err = world.serve("--no-mmap", "--dry-run", FAKE_HELP="old").end()
    assert "--no-mmap" in out
    assert "note" not in err


def test_an_unknown_flag_is_named_and_values_are_not(world: World) -> None:
    code, out, err = world.serve("--api-key", "sesame-2", "--ctx-sise=sesame-3").end()
    assert code == 2
    assert "no flag --ctx-sise" in err
    assert "did you mean --ctx-size?" in err
    assert "sesame" not in out + err


# C12


@pytest.mark.parametrize(
    "name",
    [" my (model) [v1].gguf", "-x.gguf", "мой 空.gguf", 'it\'s "q" $HOME `x`.gguf', b"bad-\xff\xfe.gguf", "blob"],
)
def test_strange_names_work_and_are_printed_quoted(
    world: World, name: str | bytes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    raw = os.fsencode(name)
    monkeypatch.chdir(world.root)
    monkeypatch.setenv("LLAMAFORK_PROGRAM_DIR", str(world.programs))
    Path(os.fsdecode(raw)).write_bytes(tiny_gguf())
    assert verbs.serve(["-m", os.fsdecode(raw), "--dry-run"], world.paths) == 0
    shown = shlex.split(capfd.readouterr().out)
    assert shown[:2] == [str(world.programs / "llama-server"), "-m"]
    escaped = raw.decode("utf-8", "backslashreplace")
    assert shown[2] == ("./-x.gguf" if name == "-x.gguf" else escaped)
    wrapper = world.start("serve", "-m", raw, "--port", str(world.port))
    wrapper.until("ready: http")
    assert stop(wrapper)[0] == 0
    argv = wrapper.facts["argv"]
    assert isinstance(argv, list)
    assert os.fsencode(argv[1]) == (b"./-x.gguf" if name == "-x.gguf" else raw)


def test_programs_and_temporary_files_in_strange_folders(world: World) -> None:
    folder = world.root / "мой dir 空"
    (world.programs).rename(folder)
    (world.root / "tmp dir").mkdir()
    env = {"LLAMAFORK_PROGRAM_DIR": str(folder), "TMPDIR": str(world.root / "tmp dir")}
    wrapper = world.serve(**env)
    wrapper.until("ready: http")
    assert stop(wrapper)[0] == 0


def test_a_missing_model_with_undecodable_name_is_one_line(world: World) -> None:
    code, _, err = world.start("serve", "-m", b"no-\xff.gguf").end()
    assert code == 6
    assert "no-\\xff.gguf" in err
    assert "Traceback" not in err


# C2, C3 through the verb


def test_a_short_model_stops_before_the_launch(world: World) -> None:
    world.model.write_bytes(tiny_gguf()[:-1])
    code, _, err = world.serve().end()
    assert code == 6
    assert "token_embd.weight" in err
    assert not world.record.exists()


def test_any_part_of_a_split_model_is_accepted_and_the_first_passed_on(world: World) -> None:
    split_parts(world.root)
    code, out, _ = world.start("serve", "-m", "m-00002-of-00002.gguf", "--dry-run").end()
    assert code == 0
    assert "-m m-00001-of-00002.gguf" in out


# dry run, JSON, no model


def test_a_dry_run_in_json_has_args_models_and_reasons(world: World) -> None:
    code, out, _ = world.start(
        "--json", "serve", "-m", world.model, "--api-key", "sesame-4", "--dry-run", LLAMA_ARG_PORT="9123"
    ).end()
    plan = json.loads(out)
    assert code == 0
    assert "sesame-4" not in out
    assert plan["models"] == [{"path": str(world.model), "size": 384, "architecture": "llama", "experts": 0}]
    by_name = {row["name"]: row for row in plan["settings"]}
    assert by_name["port"] == {"name": "port", "value": "9123", "source": "env", "reason": ""}
    assert by_name["host"]["source"] == "default"
    assert "--port" not in plan["args"]
    assert plan["env"] == {}
    assert not world.record.exists()


def test_no_model_and_no_terminal(world: World) -> None:
    code, out, err = world.start("serve").end()
    assert code == 2
    assert "no model is given" in err
    assert out == ""


def test_no_model_in_a_terminal_lists_what_is_there(world: World) -> None:
    (world.root / "own/data/models").mkdir(parents=True)
    (world.root / "own/data/models/my moe.gguf").write_bytes(tiny_gguf())
    text, code = in_terminal(world, "serve")
    assert code == 2
    plain = text.replace("\r\n", "")
    assert "tiny.gguf" in plain
    assert "llamafork serve -m" in plain
    assert "my moe.gguf" in plain


def in_terminal(world: World, *words: str, feed: bytes = b"") -> tuple[str, int]:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(world.root)
        os.execve(sys.executable, world.command(*words), {**world.env, "COLUMNS": "400"})
    os.write(terminal, feed)
    text = b""
    while True:
        try:
            piece = os.read(terminal, 65536)
        except OSError:
            break
        if not piece:
            break
        text += piece
    os.close(terminal)
    return text.decode("utf-8", "replace"), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_help_shows_our_options_and_the_programs(world: World) -> None:
    code, out, _ = world.start("serve", "--help").end()
    assert code == 0
    assert out.index("--ready-timeout") < out.index("--ctx-size")


def test_a_program_that_does_not_start_is_explained(world: World) -> None:
    code, _, err = world.serve(mood="broken").end()
    assert code == 3
    assert "libcuda.so.1" in err


def test_a_missing_program_is_explained(world: World) -> None:
    (world.programs / "llama-server").unlink()
    code, _, err = world.serve().end()
    assert code == 3
    assert "there is no program" in err


# cli and bench


TOOL = """import os, signal, sys
if "--help" in sys.argv:
    print("-m,    --model FNAME      model\\n-c,    --ctx-size N       context")
    sys.exit()
"""


def test_cli_reads_the_terminal_and_returns_the_programs_code(world: World) -> None:
    world.program("llama-cli", TOOL + "print('said', input('> '), sys.stdin.isatty(), sys.argv[1:])\nsys.exit(41)\n")
    text, code = in_terminal(world, "cli", "-m", "tiny.gguf", feed=b"hello\n")
    assert code == 41
    assert "said hello True ['-m', 'tiny.gguf']" in text


def test_ctrl_c_in_a_terminal_reaches_cli(world: World) -> None:
    waits = "signal.signal(2, lambda *_: os._exit(33))\nprint(end='up', flush=True)\nsignal.pause()\n"
    world.program("llama-cli", TOOL + waits)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, world.command("cli", "-m", world.model), world.env)
    seen = b""
    while not seen.endswith(b"up"):
        seen += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 33
    os.close(terminal)


def test_bench_dies_of_its_own_signals(world: World) -> None:
    """A compiled program inherits ignored signals; the shell shows what it got."""
    shell = "#!/bin/sh\n[ $1 = --help ] && echo '-m, --model F  x' && echo '-c N  y' && exit\nkill -PIPE $$\necho no\n"
    (world.programs / "llama-bench").write_text(shell)
    code, out, _ = world.start("bench", "-m", world.model).end()
    assert (code, out) == (-signal.SIGPIPE, "")


def test_bench_checks_every_model_of_its_list(world: World) -> None:
    code, _, err = world.start("bench", "-m", f"{world.model},none.gguf", "--dry-run").end()
    assert code == 6
    assert "there is no model none.gguf" in err


@pytest.mark.parametrize(("mood", "said"), [("page", "web UI: http://127.0.0.1:"), ("", "web UI: none in this build")])
def test_a_web_ui_is_announced_only_if_there_is_one(world: World, mood: str, said: str) -> None:
    wrapper = world.serve(mood=mood)
    assert said in wrapper.until("web UI")


@pytest.mark.parametrize("words", [("serve", "--json"), ("--json", "serve")])
def test_json_says_when_it_is_ready(world: World, words: tuple[str, ...]) -> None:
    wrapper = world.start(*words, "-m", world.model, "--port", str(world.port))
    wrapper.until("web UI")
    wrapper.process.terminate()
    code, out, _ = wrapper.end()
    assert code == 0
    found = json.loads(out)
    assert (found["schema"], found["url"]) == ("llamafork.ready/1", f"http://127.0.0.1:{world.port}")
    assert found["pid"] == wrapper.pid()
    assert found["web_ui"] is False
