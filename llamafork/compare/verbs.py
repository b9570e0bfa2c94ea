"""`llamafork compare A B --model …`."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from llamafork import console
from llamafork.compare import identity, journal, quality, report, speed, target
from llamafork.compare.journal import Journal
from llamafork.compare.report import Report, Row
from llamafork.compare.target import Place, Target
from llamafork.errors import Exit, UsageError
from llamafork.facts.gguf_file import check_model
from llamafork.paths import Paths


@dataclass(frozen=True)
class Case:
    """One model at one place, for both targets."""

    ours: Target
    theirs: Target
    model: Path
    place: Place
    options: argparse.Namespace
    journal: Journal

    def step(self, name: str, work: Callable[[], object]) -> object:
        return self.journal.step(f"{name} {self.model} {self.place.name}", work)


def compare(ns: argparse.Namespace, paths: Paths) -> int:
    """Run the suites on both, in turns; exit 8 when they differ or A is slower."""
    ours, theirs = target.resolve(paths, ns.a), target.resolve(paths, ns.b)
    if ours.folder == theirs.folder and not ns.self_test:
        raise UsageError("both are the same build", do="name two, or give --self-test to see what noise looks like")
    models = [Path(name).absolute() for name in ns.model]
    for model in models:
        check_model(model)
    suites = ns.suite or ["identity"]
    if ns.plot:
        report.check_plot(suites)
    if ns.rounds < speed.LEAST:
        raise UsageError(
            f"--rounds {ns.rounds} is too few", why="their spread says nothing", do=f"at least {speed.LEAST}"
        )
    places = target.places(ns.on or [])
    keys = [suites, ns.rounds, ns.repeat, ns.threads, ns.env_a, ns.text, ns.self_test]
    kept = journal.of(paths, [ours, theirs], models, keys)
    if kept.done:
        console.say(f"going on with an interrupted comparison: {len(kept.done)} steps are done")
    rows: list[Row] = []
    for suite in suites:
        for model in models:
            for place in places:
                rows += SUITES[suite](Case(ours, theirs, model, place, ns, kept))
    kept.close()
    return _tell(Report(ours.name, theirs.name, tuple(rows)), ns)


def _tell(made: Report, ns: argparse.Namespace) -> int:
    columns = ("suite", "model", "place", "verdict", "")
    console.table(columns, [(r.suite, r.model, r.place, r.verdict, r.detail) for r in made.rows])
    for path in report.write(made, markdown_file=ns.markdown, junit_file=ns.junit, plot_file=ns.plot):
        console.say(f"written {path}")
    console.emit("compare", made.as_dict())
    return Exit.REGRESSION if made.bad else Exit.OK


def _identity(case: Case) -> Iterator[Row]:
    started = time.monotonic()

    def work() -> list[list[object]]:
        with tempfile.TemporaryDirectory(prefix="llamafork-compare-") as scratch:
            one = identity.run(case.ours, case.place, case.model, Path(scratch) / "a")
            two = identity.run(case.theirs, case.place, case.model, Path(scratch) / "b")
        return [[d.width, d.what, d.detail] for d in identity.differences(case.place, one, two)]

    with console.step(f"identity: {case.model.name} at {case.place.name}") as step:
        found = case.step("identity", work)
        assert isinstance(found, list)
        step.note = report.DIFFERENT if found else report.IDENTICAL
    detail = "; ".join(
        f"{what} at width {width}: {text}" if width else f"{what}: {text}" for width, what, text in found
    )
    yield Row("identity", case.model.name, case.place.name, step.note, bool(found), detail, time.monotonic() - started)


def _speed(case: Case) -> Iterator[Row]:
    started = time.monotonic()
    work = speed.Work(threads=case.options.threads, repeat=case.options.repeat)
    more = dict(word.partition("=")[::2] for word in case.options.env_a or [])
    sides: tuple[list[speed.Times], list[speed.Times]] = ([], [])

    def round_of() -> tuple[speed.Times, speed.Times]:
        with tempfile.TemporaryDirectory(prefix="llamafork-compare-") as scratch:
            return speed.round_of((case.ours, case.theirs), case.place, case.model, work, Path(scratch), more)

    with console.step(f"speed: {case.model.name} at {case.place.name}") as step:
        for number in range(case.options.rounds):
            step.update(f"round {number + 1} of {case.options.rounds}")
            took = case.step(f"speed {number}", round_of)
            assert isinstance(took, list)
            for side, times in zip(sides, took, strict=True):
                side.append(times)
    for name, values in speed.ratios(*sides).items():
        found = speed.judge(values, threshold=case.options.threshold)
        ours, theirs = (statistics.median(x for one in side for x in one[name]) for side in sides)
        detail = (
            f"{name}: {found.ratio:.3f} ({found.low:.3f} to {found.high:.3f}); {ours:.1f} and {theirs:.1f} "
            f"{'starts' if name == 'start' else 'tokens'}/s"
        )
        bad = found.word == speed.SLOWER
        row = Row("speed", case.model.name, case.place.name, found.word, bad, detail, time.monotonic() - started)
        yield replace(row, ratio=found.ratio, low=found.low, high=found.high)


def _quality(case: Case) -> Iterator[Row]:
    started = time.monotonic()

    def work() -> dict[str, float]:
        with tempfile.TemporaryDirectory(prefix="llamafork-compare-") as scratch:
            source = Path(case.options.text).absolute() if case.options.text else None
            return asdict(quality.run(case.ours, case.theirs, case.place, case.model, Path(scratch), source))

    with console.step(f"quality: {case.model.name} at {case.place.name}") as step:
        took = case.step("quality", work)
        assert isinstance(took, dict)
        found = quality.Quality(**took)
        bad = found.worse_than(case.options.max_kl)
        step.note = report.DIFFERENT if bad else "no difference"
    detail = (
        f"KL {found.kl:.2e} (largest {found.kl_max:.2e}), perplexity {found.ppl:.4f} against {found.ppl_base:.4f} "
        f"on the CPU, same best token {found.same_top:.1f} %"
    )
    yield Row("quality", case.model.name, case.place.name, step.note, bad, detail, time.monotonic() - started)


SUITES: dict[str, Callable[[Case], Iterator[Row]]] = {"identity": _identity, "quality": _quality, "speed": _speed}
