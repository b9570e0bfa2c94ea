"""Change expert-trace: what it records is what the model chose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from real_builds import llamafork

from llamafork.build.store import Build
from llamafork.trace import format as files
from llamafork.trace import simulate

TEXT = "A prompt warms the cache; a restart does not cool it down. " * 3


@pytest.fixture(scope="module")
def recorded(fork: Build, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trace") / "small.trace"
    done = llamafork("trace", "record", str(model), str(out), "-p", TEXT, "-n", "100", "--json", "--build", fork.key,
                     "--", "--ignore-eos", "--temp", "0", "-ngl", "0")  # fmt: skip
    facts = json.loads(done.stdout)
    assert facts["decode"] == 100
    return out


def test_every_token_has_distinct_experts_in_every_layer(recorded: Path) -> None:
    trace = files.load(recorded)
    assert not trace.cut
    assert not recorded.with_name(recorded.name + ".part").exists()
    assert trace.layers == (1, 2, 3, 4, 5)  # the first has none
    assert len(trace) > 200
    assert (trace.phases[-100:] == files.DECODE).all()
    assert (trace.phases[:-100] == files.PROMPT).all()
    for token in trace.experts.reshape(-1, trace.n_used).tolist():
        assert len(set(token)) == trace.n_used


def test_the_batch_does_not_decide_what_is_recorded(recorded: Path, fork: Build, model: Path, tmp_path: Path) -> None:
    """The prompt one token at a time: the ids of all layers belong to the same tokens in the same order."""
    out = tmp_path / "one"
    llamafork("trace", "record", str(model), str(out), "-p", TEXT, "-n", "1", "--build", fork.key,
              "--", "-b", "1", "-ub", "1", "--temp", "0", "-ngl", "0")  # fmt: skip
    one, many = files.load(out), files.load(recorded)
    n = int((one.phases == files.PROMPT).sum())
    assert one.tokens[:n].tolist() == many.tokens[:n].tolist()
    same = (one.experts[:n, :, :, None] == many.experts[:n, :, None, :]).any(axis=3)  # the order of equals may differ
    assert same[:, 0].mean() > 0.99  # batches round differently, so a near tie may fall the other way,
    assert same.mean() > 0.9  # and what follows in later layers with it; chance is a quarter


def test_a_context_too_small_is_refused(fork: Build, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "none"
    done = llamafork("trace", "record", str(model), str(out), "-p", TEXT, "-n", "5000", "--build", fork.key,
                     "--", "-c", "512", "-ngl", "0", check=False)  # fmt: skip
    assert done.returncode == 9
    assert "do not fit the context" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("reuse", "skew"), [(0.8, 1.0), (0.2, 0.2)])
def test_a_bench_models_printed_hit_rates_are_those_of_its_trace(
    fork: Build, tmp_path: Path, reuse: float, skew: float
) -> None:
    words = ("--experts", "64", "--used", "8", "--layers", "6", "--embd", "256", "--ff", "64", "--seed", "3")
    words += ("--bench", "--reuse", str(reuse), "--skew", str(skew))
    file, out = tmp_path / "bench.gguf", tmp_path / "bench.trace"
    said = llamafork("make-model", str(file), "--arch", "qwen3moe", *words).stdout.splitlines()
    printed = {a: float(b.rstrip("%")) / 100 for a, b in (x.split("\t") for x in said if x[0].isdigit() and "\t" in x)}
    sampled = ("-t", "1", "-c", "2048", "-s", "1", "--ignore-eos")
    sampled += ("--temp", "1", "--top-k", "0", "--top-p", "1", "--min-p", "0")
    llamafork("trace", "record", str(file), str(out), "-p", "Hello", "-n", "1000", "--build", fork.key, "--", *sampled)
    trace = files.load(out).decode_only()
    assert set(printed) == {"12.5%", "25.0%", "50.0%", "75.0%"}
    for share, rate in printed.items():
        slots = round(float(share.rstrip("%")) / 100 * trace.n_expert)
        assert abs(simulate.run(trace, "lru", slots, skip=64).rate - rate) < 0.1, share
