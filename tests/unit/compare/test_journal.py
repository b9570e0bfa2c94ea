"""An interrupted comparison goes on, and only the same one does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_upstream import World

from llamafork.compare import journal
from llamafork.compare.journal import Journal
from llamafork.compare.target import Target


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    file = tmp_path / "state" / "j.jsonl"
    calls: list[int] = []

    def work() -> dict[str, int]:
        calls.append(1)
        return {"n": len(calls)}

    first = Journal(file)
    assert first.step("one", work) == {"n": 1}
    with pytest.raises(KeyboardInterrupt):
        first.step("two", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    with file.open("a") as out:
        out.write('{"step": "two", "res')  # as a kill leaves it
    again = Journal(file)
    assert again.step("one", work) == {"n": 1}
    assert again.step("two", work) == {"n": 2}
    third = Journal(file)
    assert third.step("two", work) == {"n": 2}  # what came after the torn line is whole
    third.close()
    assert not file.exists()


def test_other_programs_models_or_options_are_another_comparison(world: World, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "llama-bench"
    program.parent.mkdir()
    program.write_text("one")
    model = tmp_path / "m"
    model.write_text("m")
    one = Target("a", program.parent)

    def name(options: object = 1) -> str:
        return journal.of(world.paths, [one], [model], options).file.name

    first = name()
    assert name() == first
    assert name(2) != first
    program.write_text("other")
    assert name() != first


def test_libraries_beside_and_later_parts_of_a_model_count(world: World, tmp_path: Path) -> None:
    program, library = tmp_path / "bin/llama-bench", tmp_path / "lib/libllama.so"
    first, second = (tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2))
    for file in (program, library, first, second):
        world.write(file, "one")

    def name() -> str:
        return journal.of(world.paths, [Target("a", program.parent)], [first], 1).file.name

    for file in (library, second):
        before = name()
        file.write_text("another")
        assert name() != before, file


def test_abandoned_ones_are_forgotten_and_those_in_use_are_not(world: World, tmp_path: Path) -> None:
    folder = world.paths.state / "compare"
    wanted = journal.of(world.paths, [], [], "this one").file
    hold = (
        "from llamafork.compare.journal import Journal; from pathlib import Path; import sys\n"
        "held = [Journal(Path(name)) for name in sys.argv[1:]]; held[1].step('two', int); print(flush=True); input()"
    )
    days = {"old": 31, "new": 29, "held": 31, "going on": 31, wanted.stem: 31}
    for name in days:
        world.write(folder / f"{name}.jsonl", '{"step": "one", "result": 1}\n')
    used = [str(folder / f"{name}.jsonl") for name in ("held", "going on")]
    words = [sys.executable, "-c", hold, *used]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        for name, age in days.items():
            os.utime(folder / f"{name}.jsonl", (time.time() - age * 86400,) * 2)
        assert journal.of(world.paths, [], [], "this one").done == {"one": 1}
        assert {file.stem for file in folder.iterdir()} == {"new", "held", "going on", wanted.stem}
        other.communicate(b"\n")
    journal.of(world.paths, [], [], "this one")
    assert {file.stem for file in folder.iterdir()} == {"new", wanted.stem}
