"""Our options, the program's vocabulary, renames, what is read from flags, environment and config.ini."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from run_world import World

from llamafork.errors import EnvironmentFault, UsageError
from llamafork.run import args, vocabulary
from llamafork.run.args import Known, Own
from llamafork.run.vocabulary import Vocabulary

HELP = """----- common params -----

-h,    --help, --usage                  print usage and exit
-c,    --ctx-size N                     size of the prompt context, see
                                        --this-is-text and -x
-fa,   --flash-attn [on|off|auto]       set Flash Attention use
-ngl,  --gpu-layers, --n-gpu-layers N   layers
-md,   --model-draft FNAME              draft
-m,    --model FNAME                    model
-mg,   --main-gpu INDEX                 gpu
-p,    --prompt PROMPT                  prompt
-lm,   --load-mode MODE                 mode
--control-vector-layer-range START END
                                        layer range
-ot,   --override-tensor <tensor name pattern>=<buffer type>,...
                                        override
--fim-qwen-1.5b-default                 preset
--host HOST                             host
--port PORT                             port
--api-key KEY                           key
--api-key-file FNAME                    keys
--spec-draft-n-max N                    tokens
--no-slots                              none
--draft, --draft-n, --draft-max N       the argument has been removed. use --spec-draft-n-max or
                                        --spec-ngram-mod-n-max
"""
BENCH = """usage: llama-bench [options]

options:
  -h, --help
  --numa <distribute|isolate|numactl>         numa mode (default: disabled)
  -fa, --flash-attn <on|off|auto>             (default: auto)
  -ot --override-tensor <tensor name pattern>=<buffer type>;...
                                              (default: disabled)
  -pg <pp,tg>                                 (default: )
"""
KNOWN = vocabulary.parse(HELP)


def words(*given: str, known: Vocabulary = KNOWN) -> tuple[str, ...]:
    return args.read(given, known).words


def test_the_servers_help_is_read() -> None:
    arity = KNOWN.arity
    assert {name: arity[name] for name in ("--usage", "-c", "-ot", "--fim-qwen-1.5b-default", "--n-gpu-layers")} == {
        "--usage": 0,
        "-c": 1,
        "-ot": 1,
        "--fim-qwen-1.5b-default": 0,
        "--n-gpu-layers": 1,
    }
    assert arity["--control-vector-layer-range"] == 2
    assert not {"--this-is-text", "-x", "--draft", "--spec-ngram-mod-n-max"} & KNOWN.flags
    assert KNOWN.removed["--draft-n"] == "use --spec-draft-n-max or --spec-ngram-mod-n-max"


def test_the_benchs_help_is_read() -> None:
    known = vocabulary.parse(BENCH)
    assert known.arity == {
        "-h": 0, "--help": 0, "--numa": 1, "-fa": 1, "--flash-attn": 1, "-ot": 1, "--override-tensor": 1, "-pg": 1,
    }  # fmt: skip


def test_a_vocabulary_is_asked_once_per_version_of_the_file(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    program = world.program("one", "print('--aa  x')\nprint('--bb  y')\n")
    assert vocabulary.help_flags(program) == {"--aa", "--bb"}
    monkeypatch.setattr(subprocess, "run", None)
    assert vocabulary.help_flags(program) == {"--aa", "--bb"}
    monkeypatch.undo()
    world.program("one", "print('--aa  x')\nprint('--changed  y')\n")
    assert vocabulary.help_flags(program) == {"--aa", "--changed"}


def test_a_program_for_another_machine_is_explained(tmp_path: Path) -> None:
    program = tmp_path / "x"
    program.write_bytes(b"\x7fELF but not really")
    program.chmod(0o755)
    with pytest.raises(EnvironmentFault):
        vocabulary.of(program)


def test_our_options_are_taken_out_and_the_rest_stays_in_order() -> None:
    ours = ["--build", "k1", "-b", "--dry-run", "--grace", "2", "--ready-timeout", "9"]
    own, rest = args.split(["-md", "a", *ours, "-mg", "0"])
    assert own == Own("k1", True, 9.0, 2.0)
    assert rest == ("-md", "a", "-b", "-mg", "0")


def test_behind_two_hyphens_nothing_is_ours() -> None:
    own, rest = args.split(["-c", "1", "--", "--dry-run", "--build", "--"])
    assert own == Own()
    assert rest == ("-c", "1", "--dry-run", "--build", "--")


def test_our_options_are_never_abbreviated() -> None:
    assert args.split(["--buil", "--dry", "-b", "--gra"]) == (Own(), ("--buil", "--dry", "-b", "--gra"))


@pytest.mark.parametrize(
    "argv",
    [["--build"], ["--grace", "soon"], ["--grace", "-1"], ["--ready-timeout", "inf"], ["--build=x"], ["--dry-run=1"]],
)
def test_wrong_options_of_ours(argv: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        args.split(argv)
    assert argv[0].partition("=")[0] in caught.value.what + caught.value.do


def test_cli_and_bench_have_fewer_options() -> None:
    assert args.split(["--grace", "1", "--build", "k"], args.TOOL) == (Own("k"), ("--grace", "1"))


@pytest.mark.parametrize(
    "given",
    [
        ("-ngl", "-1", "-c", "5"),
        ("-p", "-md"),
        ("-p", ""),
        ("--control-vector-layer-range", "-2", "-1", "-c", "5"),
        ("-m", "--strange.gguf"),
        ("--ctx_size", "7"),
        (),
    ],
)
def test_valid_words_are_untouched(given: tuple[str, ...]) -> None:
    command = args.read(given, KNOWN)
    assert command.words == given
    assert command.notes == ()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--ctx-sise", "5"), "--ctx-size"),
        (("--ctx-size=5",), "--ctx-size VALUE"),
        (("-c", "--port", "1"), "-c needs a value before --port"),
        (("-c",), "-c needs a value"),
        (("--control-vector-layer-range", "1"), "needs a value"),
        (("--draft-max", "8"), "--spec-draft-n-max"),
        (("--mlock",), "mmap+mlock"),
        (("--no-mmap", "--direct-io"), "choose one --load-mode"),
        (("-c", "1", "stray"), "behind -c"),
        (("-1",), "no flag -1"),
    ],
)
def test_wrong_words_are_explained(given: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        args.read(given, KNOWN)
    error = caught.value
    assert said in f"{error.what} {error.why} {error.do}"
    assert int(error.code) == 2


@pytest.mark.parametrize(
    "given",
    [("SECRET",), ("--nope=SECRET",), ("--nope", "SECRET"), ("--api-key", "a", "SECRET"), ("--api-key=SECRET",)],
)
def test_errors_never_quote_a_value(given: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        args.read(given, KNOWN)
    assert "SECRET" not in str(caught.value.as_dict())


def test_a_removed_flag_without_an_entry_of_ours_gets_upstreams_advice() -> None:
    known = vocabulary.parse("--aa N    x\n--gone N    the argument has been removed. use --aa\n")
    with pytest.raises(UsageError) as caught:
        args.read(("--gone", "1"), known)
    assert caught.value.do == "use --aa"


def test_equal_renames_are_made_and_noted() -> None:
    command = args.read(("--no-mmap", "--slots-endpoint-disable", "-c", "1"), KNOWN)
    assert command.words == ("--load-mode", "none", "--no-slots", "-c", "1")
    assert [note.partition(" is now ")[0] for note in command.notes] == ["--no-mmap", "--slots-endpoint-disable"]


def test_new_names_are_translated_for_an_older_program() -> None:
    old = vocabulary.parse("--draft-max N   x\n--webui   y\n--no-mmap    z\n")
    assert words("--spec-draft-n-max", "8", "--ui", known=old) == ("--draft-max", "8", "--webui")
    with pytest.raises(UsageError, match="--load-mode"):
        words("--load-mode", "none", known=old)


def test_every_row_of_the_table_is_well_formed() -> None:
    for old, rename in args._renames().items():
        assert old.startswith("-")
        assert old not in rename.new
        assert rename.new[0].startswith("--")
        assert rename.note


@pytest.mark.parametrize("given", [("-fa",), ("-fa", "-c", "1"), ("--flash-attn", "--host", "x")])
def test_a_former_switch_gets_its_value(given: tuple[str, ...]) -> None:
    assert words(*given) == (given[0], "on", *given[1:])
    assert words("-fa", "auto") == ("-fa", "auto")


def test_a_switch_of_an_old_program_stays_one() -> None:
    old = vocabulary.parse("-fa, --flash-attn      enable\n-c N   ctx\n")
    assert words("-fa", "-c", "1", known=old) == ("-fa", "-c", "1")


def test_the_command_line_wins_over_environment_and_config() -> None:
    command = args.read(("--port", "1", "--port", "2"), KNOWN)
    config = args.config_values(["port = 4\nhost=a\n[other]\nalias = no\n[*]\n; x = 1\nalias = yes", "host = b"])
    env = {"LLAMA_ARG_PORT": "3", "LLAMA_API_KEY": "k"}
    assert args.known(command, env, config) == {
        "port": Known("2", "user"),
        "api_key": Known("k", "env"),
        "host": Known("b", "config"),
        "alias": Known("yes", "config"),
    }


def test_defaults_are_added_only_where_nothing_is_set() -> None:
    assert [row[:2] for row in args.defaults({}, KNOWN)] == [("--host", "127.0.0.1"), ("--port", "8080")]
    assert [row[:2] for row in args.defaults({"host": Known("::", "env")}, KNOWN)] == [("--port", "8080")]
    assert args.defaults({}, Vocabulary({"--model": 1})) == []


@pytest.mark.parametrize(
    ("host", "key", "warned"),
    [
        ("127.0.0.1", "", False),
        ("localhost,::1", "", False),
        ("/run/x.sock", "", False),
        ("0.0.0.0", "", True),
        ("127.0.0.1,10.0.0.1", "", True),
        ("localhost.example.org", "", True),
        ("0.0.0.0", "k", False),
    ],
)
def test_an_open_server_without_a_key_is_warned_about(host: str, key: str, warned: bool) -> None:
    settings = {"host": Known(host, "user"), "api_key": Known(key, "user")}
    assert bool(args.warnings(settings)) is warned
