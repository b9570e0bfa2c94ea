"""`llamafork compare A B --model …`."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from llamafork import console
from llamafork.compare import identity, journal, quality, report, speed, target
from llamafork.compare.cache import servers, suite, work
from llamafork.compare.journal import Journal
from llamafork.compare.report import Report, Row
from llamafork.compare.target import Place, Target
from llamafork.errors import Exit, LlamaforkError, UsageError
from llamafork.facts.gguf_file import check_model
from llamafork.paths import Paths, check_report, show

ROUNDS = 15  # of speed


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
    ours = target.resolve(paths, ns.a)
    theirs = target.resolve(paths, ns.b) if ns.b != "stock" else target.twin_of(paths, ours)
    if ours.folder == theirs.folder and not ns.self_test:
        raise UsageError("both are the same build", do="name two, or give --self-test to see what noise looks like")
    suites = ns.suite or ["identity"]
    models = [Path(name).absolute() for name in ns.model or []]
    if not models and set(suites) != {"cache"}:
        raise UsageError("--model is missing", why="only the suite cache makes models of its own", do="--model FILE")
    for model in models:
        check_model(model)
    check_reports([Path(name) for name in (ns.markdown, ns.junit, ns.plot) if name])
    if ns.text:
        quality.check_text(Path(ns.text))
    if ns.plot:
        report.check_plot(suites)
    if ns.rounds is not None and ns.rounds < speed.LEAST:
        raise UsageError(
            f"--rounds {ns.rounds} is too few", why="their spread says nothing", do=f"at least {speed.LEAST}"
        )
    more = variables(ns.env_a or [])
    if more and "speed" not in suites:
        raise UsageError("--env-a is for speed", why="the other suites give both the same", do="add --suite speed")
    size, cached = _cache_places(ns) if "cache" in suites else (work.FULL, [])
    if cached:
        servers.check_cache(ours)
    places = target.places(ns.on or []) if set(suites) != {"cache"} else []
    for place in [*places, *(one.place for one in cached)]:
        for one in (ours, theirs):
            target.check_devices(place, one)
    files = [*models, *([Path(ns.text).absolute()] if ns.text else [])]
    keys = [suites, ns.rounds, ns.repeat, ns.threads, more, ns.self_test, ns.quick]
    kept = journal.of(paths, [ours, theirs], files, keys)
    if kept.done:
        console.say(f"going on with an interrupted comparison: {len(kept.done)} steps are done")
    pair = (ours, theirs)
    rows: list[Row] = []
    for name in suites:
        tasks = [
            (model.name, place.name, partial(SUITES[name], Case(ours, theirs, model, place, ns, kept)))
            for model in models for place in places
        ] if name != "cache" else [
            (load.name, at.place.name, partial(suite.run, pair, at, load, size, paths.cache / "bench", kept))
            for at in cached for load in work.WORKLOADS if load.name in size.workloads
        ]  # fmt: skip
        for model_name, place_name, task in tasks:
            try:
                rows += task()
            except LlamaforkError as error:  # what is done and what follows is worth knowing all the same
                console.failure(error, last=False)
                rows.append(Row(name, model_name, place_name, "failed", True, f"{error.what}: {error.why}"))
    notes = tuple(dict.fromkeys(f"cache: {one.note}" for one in cached))
    code = _tell(Report(ours.name, theirs.name, tuple(rows), notes), ns)
    kept.close()
    return code


def check_reports(files: list[Path]) -> None:
    """Raises :class:`UsageError` if one of *files* cannot take a report, or two are the same file."""
    for file in files:
        check_report(file)
        stream = file.exists() and not file.is_file()  # takes one after the other
        if files.count(file) > 1 and not stream:
            raise UsageError(f"two reports have the name {show(file)}", why="one would be lost", do="name two files")


def _cache_places(ns: argparse.Namespace) -> tuple[work.Size, list[work.CachePlace]]:
    size = work.QUICK if ns.quick else work.FULL
    if ns.rounds is not None and not ns.quick:
        size = replace(size, rounds=ns.rounds)
    return size, work.places(ns.on or [], size)


def variables(words: Sequence[str]) -> dict[str, str]:
    """``NAME=VALUE`` as a dictionary."""
    wrong = next((word for word in words if not word.partition("=")[0] or "=" not in word), None)
    if wrong is not None:
        raise UsageError(f"--env-a {wrong!r} sets nothing", do="write NAME=VALUE")
    return dict(word.partition("=")[::2] for word in words)


def _tell(made: Report, ns: argparse.Namespace) -> int:
    columns = ("suite", "model", "place", "number", "verdict", "")
    console.table(columns, [(r.suite, r.model, r.place, r.number, r.verdict, r.detail) for r in made.rows])
    for note in made.notes:
        console.say(note)
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
        f"{what} at width {width}: {text}" if width > 0 else f"{what}: {text}" for width, what, text in found
    )
    yield Row("identity", case.model.name, case.place.name, step.note, bool(found), detail, time.monotonic() - started)


def _speed(case: Case) -> Iterator[Row]:
    started = time.monotonic()
    work = speed.Work(threads=case.options.threads, repeat=case.options.repeat)
    more = variables(case.options.env_a or [])
    sides: tuple[list[speed.Times], list[speed.Times]] = ([], [])

    def round_of(number: int) -> tuple[speed.Times, speed.Times]:
        pair = (case.ours, case.theirs)
        with tempfile.TemporaryDirectory(prefix="llamafork-compare-") as scratch:
            return speed.round_of(pair, case.place, case.model, work, Path(scratch), more, number=number)

    with console.step(f"speed: {case.model.name} at {case.place.name}") as step:
        rounds = case.options.rounds or ROUNDS
        for number in range(rounds):
            step.update(f"round {number + 1} of {rounds}")
            took = case.step(f"speed {number}", partial(round_of, number))
            assert isinstance(took, list)
            for side, times in zip(sides, took, strict=True):
                side.append(times)
    took_seconds = time.monotonic() - started
    measured = speed.ratios(*sides)
    for name, values in measured.items():
        found = speed.judge(values, threshold=case.options.threshold)
        detail = f"{found.ratio:.3f} ({found.low:.3f} to {found.high:.3f})"
        if name != speed.ALL:
            ours, theirs = (statistics.median(x for one in side for x in one[name]) for side in sides)
            detail += f"; {ours:.1f} and {theirs:.1f} {'starts' if name == speed.START else 'tokens'}/s"
        bad = speed.decides(name) and found.word == speed.SLOWER
        row = Row("speed", case.model.name, case.place.name, found.word, bad, detail, took_seconds / len(measured))
        yield replace(row, number=name, ratio=found.ratio, low=found.low, high=found.high)
    if speed.START not in measured:
        why = speed.no_start((case.ours, case.theirs))
        yield Row("speed", case.model.name, case.place.name, report.LEFT_OUT, False, why, number=speed.START)


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
