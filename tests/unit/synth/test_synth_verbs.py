"""`llamafork make-model` as a user meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llamafork import cli
from llamafork.errors import Exit

SMALL = ["--layers", "1", "--embd", "32", "--heads", "1", "--kv-heads", "1", "--head-dim", "32", "--ff", "32"]
SMALL += ["--experts", "4", "--used", "2", "--vocab", "260"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLAMAFORK_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_default_place(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["make-model", *SMALL]) == Exit.OK
    path = home / "data" / "models" / "qwen3moe-1l-4x2-q8_0.gguf"
    assert path.read_bytes()[:4] == b"GGUF"
    out, err = capsys.readouterr()
    assert out.startswith(f"{path}: qwen3moe, Q8_0, ")
    assert "part\ttype\ttensors\tparameters\tbytes" in out
    assert "writing" in err


def test_named_place_and_name(home: Path, tmp_path: Path) -> None:
    assert cli.main(["make-model", *SMALL, "--name", "mine"]) == Exit.OK
    assert (home / "data" / "models" / "mine.gguf").is_file()
    assert cli.main(["make-model", *SMALL, str(tmp_path / "deep" / "er" / "x.gguf")]) == Exit.OK
    assert (tmp_path / "deep" / "er" / "x.gguf").is_file()


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--json", "make-model", *SMALL, "--type", "q4_0", "--seed", "3", str(tmp_path / "x")]) == Exit.OK
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "llamafork.make-model/1"
    assert told["spec"]["quant"] == "Q4_0"
    assert told["spec"]["seed"] == 3
    assert told["bytes"] == (tmp_path / "x").stat().st_size
    assert {part["role"] for part in told["parts"]} >= {"norms", "router", "experts"}


def test_existing_file_is_refused_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "x.gguf"
    target.write_bytes(b"mine")
    assert cli.main(["make-model", *SMALL, str(target)]) == Exit.USAGE
    assert target.read_bytes() == b"mine"
    assert "--force" in capsys.readouterr().err
    assert cli.main(["make-model", *SMALL, str(target), "--force"]) == Exit.OK
    assert target.read_bytes()[:4] == b"GGUF"


def test_a_dangling_link_counts_as_existing(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").symlink_to(tmp_path / "nowhere")
    assert cli.main(["make-model", *SMALL, str(tmp_path / "x.gguf")]) == Exit.USAGE


def test_a_folder_or_a_file_in_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["make-model", *SMALL, str(tmp_path)]) == Exit.USAGE
    for count in ("0", "-3", "x"):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["make-model", *SMALL, str(tmp_path / "x.gguf"), "--split", count])
    assert "is a folder" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert cli.main(["make-model", *SMALL, str(tmp_path / "file" / "x.gguf")]) == Exit.USAGE
    assert "is a file" in capsys.readouterr().err


def test_what_is_no_file_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe, null = tmp_path / "pipe", tmp_path / "null"
    os.mkfifo(pipe)
    null.symlink_to("/dev/null")
    for words in ((str(pipe),), (str(null),), (str(tmp_path / "m"), "--mtp-file", str(null))):
        arch = ("--arch", "glm4moe") if len(words) > 1 else ()
        assert cli.main(["make-model", *words, *arch, "--force"]) == Exit.USAGE
        err = capsys.readouterr().err
        assert "is a pipe" in err or "is a device" in err
        assert "do:  name a file" in err
    assert pipe.is_fifo()
    assert null.is_char_device()
    assert not (tmp_path / "m").exists()


def test_an_impossible_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["make-model", *SMALL, "--used", "9", str(tmp_path / "x")]) == Exit.USAGE
    err = capsys.readouterr().err
    assert "--used 9 is more than --experts 4" in err
    assert "why:" in err
    assert "do:" in err
    assert not (tmp_path / "x").exists()


def test_help_loads_neither_numpy_nor_gguf() -> None:
    code = (
        "import sys\nfrom llamafork import cli\ncli.parser().format_help()\n"
        "print({'numpy', 'gguf', 'rich'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def made(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main(["--json", "make-model", *SMALL, *words]) == Exit.OK
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_options_of_an_architecture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = made(capsys, str(tmp_path / "x"), "--arch", "deepseek2", "--layers", "3", "--gate-up", "merged", "--mtp",
                "--layer-types", "q8_0, f16", "--shared", "2")  # fmt: skip
    assert told["spec"]["merged"]
    assert told["spec"]["mtp"]
    assert told["spec"]["layer_types"] == ["Q8_0", "F16"]
    assert (told["spec"]["n_dense"], told["spec"]["n_shared"]) == (1, 2)
    assert next(part for part in told["parts"] if part["role"] == "experts")["type"] == "Q8_0/F16"


def test_both_names_of_gpt_oss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert made(capsys, str(tmp_path / "x"), "--arch", "openai-moe")["spec"]["arch"] == "gpt-oss"
    assert made(capsys, str(tmp_path / "y"), "--arch", "gpt-oss")["spec"]["n_shared"] == 0


def test_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = made(capsys, str(tmp_path / "x.gguf"), "--split", "2")
    assert told["path"].endswith("x-00001-of-00002.gguf")
    assert sorted(one.name for one in tmp_path.iterdir() if one.is_file()) == [
        Path(one["path"]).name for one in told["files"]
    ]
    assert cli.main(["make-model", *SMALL, str(tmp_path / "x.gguf"), "--split", "2"]) == Exit.USAGE
    assert "x-00001-of-00002.gguf exists" in capsys.readouterr().err


def test_a_block_in_a_file_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--arch", "glm4moe", "--layers", "2", "--mtp-file", str(tmp_path / "mtp.gguf")]
    told = made(capsys, str(tmp_path / "x.gguf"), *words)
    assert not told["spec"]["mtp"]
    assert told["mtp_file"]["spec"]["mtp_only"]
    assert told["mtp_file"]["path"] == str(tmp_path / "mtp.gguf")
    assert cli.main(["make-model", *SMALL, str(tmp_path / "z.gguf"), *words, "--seed", "9"]) == Exit.USAGE
    assert not (tmp_path / "z.gguf").exists()
    assert cli.main(["make-model", *SMALL, str(tmp_path / "mtp.gguf"), *words, "--force"]) == Exit.USAGE
    assert "is the model's own file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--arch", "glm4moe", "--layers", "2", "--mtp", "--mtp-file", "y"], "cannot both be given"),
        (["--mtp"], "qwen3moe has no --mtp"),
        (["--layer-types", "q8_0,x"], "--layer-types X is not supported"),
        (["--reuse", "0.5"], "for models made with --bench"),
        (["--bench", "--reuse", "1.5"], "--reuse 1.5 is out of range"),
        (["--bench", "--reuse", "nan"], "--reuse nan is out of range"),
        (["--bench", "--skew", "-1"], "--skew -1 is out of range"),
    ],
)
def test_impossible_combinations(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["make-model", *SMALL, str(tmp_path / "x"), *words]) == Exit.USAGE
    assert said in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_bench_tells_hit_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = made(capsys, str(tmp_path / "x"), "--bench", "--reuse", "0.8")
    assert list(told["hit_rates"]) == ["0.125", "0.25", "0.5", "0.75"]
    assert told["name"] == "qwen3moe-1l-4x2-q8_0-bench-r0.8-k0.5"
    assert cli.main(["make-model", *SMALL, str(tmp_path / "y"), "--bench"]) == Exit.OK
    assert "experts cached\thits (LRU, estimate)\n12.5%\t" in capsys.readouterr().out
