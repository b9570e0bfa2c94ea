"""Running the table of stages: one that fails costs only those that need it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence

from gpu_check.record import DONE, FAILED, LEFT_OUT, RUNNING, STOPPED, Record
from gpu_check.stage import Context, Outcome, Stage, affordable, reserve
from llamafork.errors import LlamaforkError

STOPS = (KeyboardInterrupt, SystemExit)


def run(stages: Sequence[Stage], ctx: Context, record: Record) -> None:
    """Run *stages* in order. Raises only what stops us (Ctrl-C, TERM), after it is in the record."""
    for number, stage in enumerate(stages):
        later = stages[number + 1 :]
        why = _blocked(stage, record) or _too_long(stage, later, ctx, record)
        if why:
            _leave_out(stage, why, ctx, record)
            continue
        try:
            _one(stage, ctx, record)
        except STOPS:
            for rest in later:
                _leave_out(rest, "the check was stopped before", ctx, record)
            raise


def _blocked(stage: Stage, record: Record) -> str:
    missing = next((name for name in stage.needs if record.entries[name].state != DONE), None)
    if missing is None:
        return ""
    return f"it needs {missing}, which {'failed' if record.entries[missing].state == FAILED else 'was left out'}"


def _too_long(stage: Stage, later: Sequence[Stage], ctx: Context, record: Record) -> str:
    """Why there is no time for *stage*, or "" with the context's reserve set for those after it."""
    left = ctx.ends - time.monotonic()
    able = [one for one in (stage, *later) if not _hopeless(one, stage, later, record)]
    costs = {one.name: one.cost(ctx) for one in able}
    kept = affordable(able, costs, left)
    if stage.name in kept:
        ctx.reserve = reserve(stage, [one for one in able[1:] if one.name in kept], costs)
        return ""
    others = [name for name in kept if name in {one.name for one in later}]
    need = f"; before it come {', '.join(others)}" if others else ""
    return f"it takes about {costs[stage.name]:.0f} s, and {max(0.0, left):.0f} s of the budget are left{need}"


def _hopeless(one: Stage, stage: Stage, later: Sequence[Stage], record: Record) -> bool:
    ahead = {other.name for other in (stage, *later)}
    return any(name not in ahead and record.entries[name].state != DONE for name in one.needs)


def _leave_out(stage: Stage, why: str, ctx: Context, record: Record) -> None:
    entry = record.entries[stage.name]
    entry.state, entry.why = LEFT_OUT, why
    record.write()
    ctx.log.say(f"{stage.name}: left out: {why}")


def _one(stage: Stage, ctx: Context, record: Record) -> None:
    entry = record.entries[stage.name]

    def keep(outcome: Outcome) -> None:
        entry.outcome, entry.seconds = outcome, time.monotonic() - started
        record.write()

    ctx.keep = keep
    started = time.monotonic()
    entry.state = RUNNING
    record.write()
    ctx.log.say(f"{stage.name}: begins")
    try:
        entry.outcome = stage.work(ctx)
        entry.state = DONE
        ctx.found[stage.name] = entry.outcome.numbers
    except STOPS:
        entry.state, entry.why = STOPPED, "the check was stopped"
        raise
    except LlamaforkError as error:
        entry.state, entry.why = FAILED, "; ".join(filter(None, (error.what, error.why, error.do)))
    except Exception as error:  # a mistake in one stage must not take the others' results along
        entry.state, entry.why = FAILED, f"{type(error).__name__}: {error}; see log.txt"
        ctx.log.add(traceback.format_exc())
    finally:
        entry.seconds = time.monotonic() - started
        record.write()
        note = entry.why or entry.outcome.summary
        ctx.log.say(f"{stage.name}: {entry.state} in {entry.seconds:.1f} s{f': {note}' if note else ''}")
