"""The identity suite on what programs print: what counts as the same, and that every kind of difference is seen."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from fake_upstream import World

from llamafork.compare import identity, report, target
from llamafork.compare.identity import Outcome
from llamafork.compare.report import Report, Row
from llamafork.errors import UnhealthyError, UsageError

LOG = """\
0.00.012.001 I load: something else
## SPLIT #0: CPU # 0 inputs0.00.015.780 D
0.00.021.250 D node #  0 (  GET_ROWS):  embd (   1K) [  CPU ] use=2:0.00.021.252 D  inp_t (   0K) [  CPU ]0.00.021.253 D
## SPLIT #1: RPC0[127.0.0.1:33749] # 2 inputs: [embd (   1K)] 0.00.016.000 D
0.00.021.250 D node #  1 (       MUL):  x (   1K) [RPC0[127.0 ] use=1,c=1:
"""
CPU = target.PLACES["cpu"]
DUMP = identity.dump(LOG)
SAME = {1: Outcome("aa", DUMP), 0: Outcome("bb")}


def test_stamps_and_ports_do_not_count() -> None:
    other = LOG.replace("0.00.021.25", "9.59.999.99").replace("33749", "41").replace("load", "mmap")
    assert identity.dump(other) == DUMP
    assert [line[:10] for line in DUMP] == ["## SPLIT #", "node #  0 ", "## SPLIT #", "node #  1 "]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("## SPLIT #1: RPC0", "## SPLIT #1: RPC1"),
        ("# 2 inputs", "# 3 inputs"),
        ("MUL)", "ADD)"),
        ("[  CPU ] use", "[ SIM0 ] use"),
        ("use=1", "use=2"),
        ("## SPLIT #0: CPU # 0 inputs0.00.015.780 D\n", ""),
    ],
)
def test_another_split_node_or_backend_does(old: str, new: str) -> None:
    changed = LOG.replace(old, new, 1)
    assert changed != LOG
    (found,) = identity.differences(CPU, {1: Outcome("aa", identity.dump(changed))}, {1: Outcome("aa", DUMP)})
    assert found.what == "splits"
    assert found.detail


def test_the_same_is_the_same() -> None:
    assert identity.differences(CPU, SAME, SAME) == []


def test_logits_and_words_are_compared_apart() -> None:
    logits = identity.differences(CPU, SAME, {**SAME, 1: Outcome("ab", DUMP)})
    assert [(d.width, d.what) for d in logits] == [(1, "logits")]
    words = identity.differences(CPU, SAME, {**SAME, 0: Outcome("xx")})
    assert [(d.width, d.what) for d in words] == [(0, "words or their probabilities")]


def test_drafts_are_compared_too_and_need_no_splits() -> None:
    same = {**SAME, identity.DRAFTED: Outcome("cc", ("draft_n 31", "draft_n_accepted 20"))}
    assert identity.differences(CPU, same, same) == []
    for other, what in ((Outcome("cc", ("draft_n 30",)), "number of drafts"), (Outcome("cd", ()), "words with drafts")):
        found = identity.differences(CPU, same, {**same, identity.DRAFTED: other})
        assert what in found[0].what
    neither = {**SAME, identity.DRAFTED: Outcome("no drafts")}
    assert identity.differences(CPU, neither, neither) == []
    assert identity.differences(CPU, same, neither) != []


def test_the_models_with_a_block_to_draft_with_are_known(world: World, tmp_path: Path) -> None:
    for name, words in (("plain", ()), ("with", ("--mtp",))):
        file = tmp_path / f"{name}.gguf"
        world.ok("make-model", str(file), "--arch", "glm4moe", "--layers", "2", "--embd", "64", "--ff", "32",
                 "--vocab", "260", *words)  # fmt: skip
        assert identity.has_mtp(file) is (name == "with")


def test_no_dump_is_a_difference_since_nothing_was_compared() -> None:
    bare = {width: replace(outcome, dump=()) for width, outcome in SAME.items()}
    assert [d.detail for d in identity.differences(CPU, bare, bare)] == ["a program printed no splits"]


def test_reports_say_which_case_failed() -> None:
    rows = (Row("identity", "m.gguf", "cpu", report.IDENTICAL, bad=False),
            Row("identity", "m.gguf", "sim", report.DIFFERENT, bad=True, detail="logits | at width 1"))  # fmt: skip
    made = Report("ours", "stock", rows)
    suite = ET.fromstring(report.junit(made))
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    assert [case.find("failure") is not None for case in suite] == [False, True]
    assert "| m.gguf | sim |  | different output | logits / at width 1 |" in report.markdown(made)
    assert json.loads(json.dumps(made.as_dict()))["ok"] is False


def test_places_are_named_and_unknown_ones_refused() -> None:
    assert [place.name for place in target.places(["sim2", "cpu", "sim2"])] == ["sim2", "cpu"]
    assert len(target.places([])) == len(target.PLACES)
    with pytest.raises(UsageError, match="'gpu'"):
        target.places(["gpu"])


def test_the_users_environment_does_not_reach_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_N_GPU_LAYERS", "3")
    monkeypatch.setenv("GGML_SIM_DEVICES", "7")
    assert "LLAMA_ARG_N_GPU_LAYERS" not in target.environment(CPU)
    assert "GGML_SIM_DEVICES" not in target.environment(CPU)
    assert target.environment(target.PLACES["sim2"])["GGML_SIM_DEVICES"] == "mem=2G;mem=1G"


def test_a_folder_of_any_tree_is_a_target(world: World, tmp_path: Path) -> None:
    programs = tmp_path / "their build" / "bin"
    programs.mkdir(parents=True)
    (programs / "llama-server").write_text("#!/bin/sh\n")
    (programs / "llama-server").chmod(0o755)
    found = target.resolve(world.paths, str(programs.parent))
    assert found.folder == programs
    assert found.program("llama-server") == programs / "llama-server"
    with pytest.raises(UsageError, match="has no llama-results"):
        found.program("llama-results")


@pytest.mark.parametrize("cut", [0, 3, identity.TRIES])
def test_a_log_that_was_cut_short_is_asked_for_again(tmp_path: Path, cut: int) -> None:
    program, count = tmp_path / "llama-results", tmp_path / "count"
    program.write_text(
        f"#!/bin/bash\necho x >> {count}; echo logits > ${{@: -1}}; echo '## SPLIT #0: CPU # 0 inputs'\n"
        f"[ $(wc -l < {count}) -le {cut} ] || echo '0.00.108.777 I main: writing results to x...'\n"
    )
    program.chmod(0o755)
    run = (target.Target("x", tmp_path), CPU, [], tmp_path / "text", tmp_path, 8)
    if cut == identity.TRIES:
        with pytest.raises(UnhealthyError, match="lost the end of its log"):
            identity._results(*run)
    else:
        assert identity._results(*run).dump == ("## SPLIT #0: CPU # 0 inputs",)
        assert len(count.read_text().split()) == cut + 1
