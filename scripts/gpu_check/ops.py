"""Stages backend-ops, skip-ids and backend-ops-all: upstream's comparison of operations on the device with the CPU."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from gpu_check import devices
from gpu_check.programs import Done, TimeUp
from gpu_check.stage import Context, Outcome
from llamafork.errors import LlamaforkError

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
CASE = re.compile(r"^\s*(\w+\(.*\)): .*?\b(OK|FAIL)$", re.MULTILINE)
PASSED = re.compile(r"^\s*(\d+)/(\d+) tests passed$", re.MULTILINE)
# A simulated device has one thread, so a rehearsal runs quick cases, and of all operations what ends in some seconds.
FEW = "n_mats=4,n_used=2,b=0,m=512,n=(1|5|32),k=256"
FEW_SKIPPED = "n_mats=16,n_used=4,b=0,m=128,n=(1|9|33),k=256"
SOME = 20.0


def experts(ctx: Context) -> Outcome:
    few = ["-p", FEW] if ctx.options.backend == "sim" else []
    done = _test(ctx, ["-o", "MUL_MAT_ID", *few])
    if done.late:
        raise TimeUp("test-backend-ops did not end in the time left", why=_verdict(done, devices.first(ctx)).summary)
    return _verdict(done, devices.first(ctx))


def skipped(ctx: Context) -> Outcome:
    """The same with ids of -1 and ids that come twice. CUDA takes such a node only when it is told to."""
    few = ["-p", FEW_SKIPPED] if ctx.options.backend == "sim" else []
    done = _test(ctx, ["-o", "MUL_MAT_ID_SKIP", *few], env=ctx.environment(GGML_CUDA_SKIP_IDS="1"))
    if done.late:
        raise TimeUp("test-backend-ops did not end in the time left", why=_verdict(done, devices.first(ctx)).summary)
    return _verdict(done, devices.first(ctx))


def everything(ctx: Context) -> Outcome:
    """In the time that is left: not to reach the end is no failure, and is said."""
    most = SOME if ctx.options.backend == "sim" else 3600.0
    return _verdict(_test(ctx, [], most), devices.first(ctx))


def experts_cost(ctx: Context) -> float:
    return 15.0 if ctx.options.backend == "sim" else 60.0


def skipped_cost(ctx: Context) -> float:
    return 20.0 if ctx.options.backend == "sim" else 30.0


def everything_cost(ctx: Context) -> float:
    """The least that is worth beginning."""
    return SOME if ctx.options.backend == "sim" else 60.0


def _test(ctx: Context, words: Sequence[str], most: float = 3600.0, env: Mapping[str, str] | None = None) -> Done:
    jobs = ["-j", str(ctx.options.jobs // 2)] if ctx.options.jobs > 3 else []
    program = ctx.programs("fork") / "test-backend-ops"
    return ctx.run([program, "test", "-b", devices.first(ctx), *jobs, *words], most=most, env=env)


def _verdict(done: Done, device: str) -> Outcome:
    text = COLOUR.sub("", done.out)
    cases = [(m[1], m[2]) for m in CASE.finditer(text)]
    bad = [case for case, verdict in cases if verdict == "FAIL"]
    ended = PASSED.search(text)
    passed, total = (int(ended[1]), int(ended[2])) if ended else (len(cases) - len(bad), len(cases))
    numbers = {"device": device, "passed": passed, "run": total, "complete": ended is not None, "failed": bad[:50]}
    if bad or (not done.ok and not done.late):
        raise LlamaforkError(
            f"test-backend-ops on {device}: {total - passed} of {total} failed (exit {done.code})",
            why=", ".join(bad[:3]) or done.last,
            do="the whole list is in log.txt",
        )
    if total == 0:
        raise LlamaforkError(f"test-backend-ops ran no case on {device}", why=done.last, do="see log.txt")
    end = "" if ended else "; ended by the time limit, the rest was not run"
    return Outcome(f"{passed} of {total} cases pass on {device}{end}", numbers)
