"""`llamafork make-model` as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
    assert "is a folder" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert cli.main(["make-model", *SMALL, str(tmp_path / "file" / "x.gguf")]) == Exit.USAGE
    assert "is a file" in capsys.readouterr().err


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
