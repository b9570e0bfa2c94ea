"""make-model killed at each file it opens, renames or removes: no half file, and the same bytes when run again."""

from __future__ import annotations

from pathlib import Path

import interrupted
import pytest

from llamafork import cli

SMALL = [
    "--layers",
    "2",
    "--embd",
    "32",
    "--heads",
    "1",
    "--kv-heads",
    "1",
    "--head-dim",
    "32",
    "--ff",
    "32",
    "--experts",
    "4",
    "--used",
    "2",
    "--vocab",
    "260",
]


@pytest.mark.parametrize("more", [(), ("--split", "3"), ("--mtp-file", "MTP")], ids=["whole", "split", "mtp file"])
def test_killed_anywhere_and_run_again_it_writes_the_same(tmp_path: Path, more: tuple[str, ...]) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    extra = [str(folder / "mtp.gguf") if word == "MTP" else word for word in more]
    words = ["--quiet", "make-model", str(folder / "m.gguf"), "--arch", "deepseek2", *SMALL, *extra]

    def files() -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in folder.iterdir()}

    def empty() -> None:
        for path in folder.iterdir():
            path.unlink()

    assert cli.main(words) == 0
    want, points = files(), 0
    first = sorted(name for name in want if name != "mtp.gguf")[0]
    empty()
    for at in interrupted.everywhere(words, folder):
        there = files()
        assert first not in there or there == {**want, **there}, f"{at}: loads, but is not whole"
        assert all(there[name] == data for name, data in want.items() if name in there), at
        assert cli.main([*words, "--force"] if first in there else words) == 0
        assert files() == want, at
        empty()
        points += 1
    assert points >= len(want)
    assert files() == want
