"""`llamafork trace record|info|simulate`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import numpy as np

from llamafork import console, proc
from llamafork.build import store
from llamafork.errors import Exit, Interrupted, LlamaforkError, Terminated, UnhealthyError, UsageError
from llamafork.facts.gguf_file import check_model
from llamafork.paths import Paths, check_result, show
from llamafork.trace import program, simulate
from llamafork.trace.format import Trace, load

LOGGED = re.compile(r"\d+\.\d\d\.\d{3}\.\d{3} [A-Z] ")
SHARES = (0.125, 0.25, 0.5, 0.75)


def record(ns: argparse.Namespace, paths: Paths) -> int:
    """Run llama-expert-trace of the chosen build, then read what it wrote."""
    check_model(Path(ns.model))
    out = Path(ns.out)
    if not out.parent.is_dir():
        raise UsageError(f"there is no folder {show(out.parent)}", do="make it, or name another OUT")
    for file in (out, part_of(out)):
        check_result(file)
    if out.exists() and out.samefile(ns.model):
        raise UsageError(f"{show(out)} is the model", do="name another OUT")
    if (out.exists() or out.is_symlink()) and not ns.force:
        raise UsageError(f"{show(out)} exists", do="add --force to replace it, or name another OUT")
    if ns.file and not Path(ns.file).is_file():
        raise UsageError(f"there is no file {show(ns.file)}", why="-f names the prompt", do="check the name")
    build = store.resolve(paths, ns.build)
    text = ["-f", ns.file] if ns.file else ["-p", ns.prompt]
    command = [build.program("llama-expert-trace"), "-m", ns.model, *text, "-n", str(ns.tokens), "-o", out, *ns.more]
    log = paths.state / "logs" / "trace.log"
    before = _identity(out)
    with console.step(f"record {show(out.name)}"):
        try:
            code = proc.stream(command, log=log)
        except (KeyboardInterrupt, Terminated) as stop:
            raise _stopped(out, before, Exit.TERMINATED if isinstance(stop, Terminated) else Exit.INTERRUPTED) from stop
        if code != 0:
            why = own_words(log.read_text(encoding="utf-8", errors="replace"))
            raise UnhealthyError(f"llama-expert-trace ended with {code}", why=why, do=f"see {log}")
    return _tell(out, load(out))


def _stopped(out: Path, before: tuple[int, ...] | None, code: Exit) -> Interrupted:
    """The program ends at a token and gives *out* its name if it had begun; nothing goes on with that."""
    part_of(out).unlink(missing_ok=True)  # of one that did not end in time
    if _identity(out) in (None, before):
        return Interrupted("the recording was stopped", why="nothing is written", do="run it again", code=code)
    return Interrupted(
        "the recording was stopped",
        why=f"{show(out)} has the {len(load(out))} tokens until then",
        do="use them, or run it again with --force: it begins anew",
        code=code,
    )


def _identity(file: Path) -> tuple[int, ...] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def part_of(out: Path) -> Path:
    """What llama-expert-trace calls *out* until it is whole."""
    return out.with_name(f"{out.name}.part")


def own_words(log: str) -> str:
    """The last line of the last run that the program wrote itself: llama.cpp's log comes from a thread, often later."""
    lines = log.rpartition("\n$ ")[2].strip().splitlines()[1:]
    return next((line for line in reversed(lines) if not LOGGED.match(line)), "".join(lines[-1:]))


def info(ns: argparse.Namespace, paths: Paths) -> int:
    return _tell(Path(ns.trace), load(Path(ns.trace)))


def _tell(path: Path, trace: Trace) -> int:
    decode = int((trace.phases == 1).sum())
    facts = {
        "trace": str(path),
        "model": trace.model,
        "tokens": len(trace),
        "decode": decode,
        "layers": len(trace.layers),
        "n_expert": trace.n_expert,
        "n_used": trace.n_used,
        "effective_experts": [round(x, 1) for x in effective(trace)],
        "repeat": round(repeat(trace), 4),
        "cut": trace.cut,
    }
    if trace.cut:
        console.warn(f"{show(path)} ends in the middle of a token: the recording was stopped; the rest is whole")
    mean = sum(effective(trace)) / len(trace.layers)
    console.table(("", ""), [
        ("tokens", f"{len(trace)} ({decode} decoded)"),
        ("MoE layers", str(len(trace.layers))),
        ("experts", f"{trace.n_expert}, {trace.n_used} used"),
        ("experts in effect", f"{mean:.1f} of {trace.n_expert} (mean over layers of the perplexity of their use)"),
        ("used again by the next token", f"{repeat(trace):.0%} (chance: {trace.n_used / trace.n_expert:.0%})"),
    ])  # fmt: skip
    console.emit("trace", facts)
    return Exit.OK


def effective(trace: Trace) -> list[float]:
    """For each layer exp(entropy) of how often its experts are used: n_expert when all are used alike."""
    out = []
    for layer in range(len(trace.layers)):
        counts = np.bincount(trace.experts[:, layer, :].ravel(), minlength=trace.n_expert)
        share = counts[counts > 0] / max(1, counts.sum())
        out.append(float(np.exp(-(share * np.log(share)).sum())) if len(share) else 0.0)
    return out


def repeat(trace: Trace) -> float:
    """The share of a token's experts that the token before it used in the same layer."""
    if len(trace) < 2:
        return 0.0
    before, after = trace.experts[:-1], trace.experts[1:]
    same = (after[:, :, :, None] == before[:, :, None, :]).any(axis=3)
    return float(same.mean())


def simulated(ns: argparse.Namespace, paths: Paths) -> int:
    """Hit rates of the policies at several numbers of slots."""
    trace = load(Path(ns.trace))
    played = trace if ns.all else trace.decode_only()
    if len(played) <= ns.skip:
        kind = "tokens" if ns.all else "decoded tokens"
        raise UsageError(f"the trace has {len(played)} {kind}, and --skip is {ns.skip}", do="record more, or skip less")
    names, shipped = _policies(ns, paths)
    rows, data = [], []
    for slots in ns.slots or sorted({max(1, round(share * trace.n_expert)) for share in SHARES}):
        if not 0 < slots <= trace.n_expert:
            raise UsageError(f"{slots} slots for {trace.n_expert} experts", do="give 1 to the number of experts")
        for name in names:
            if shipped and name in program.POLICIES:
                score = program.run(shipped, Path(ns.trace), name, slots, skip=ns.skip, everything=ns.all, more=ns.more)
            else:
                score = simulate.run(played, name, slots, skip=ns.skip)
            per = f"{score.hits_per_upload:.1f}" if score.uploads else "no uploads"
            rows.append((name, f"{slots} ({slots / trace.n_expert:.0%})", f"{score.rate:.1%}", per, str(score.uploads)))
            data.append({"policy": name, "slots": slots, "rate": round(score.rate, 6), "hits": score.hits,
                         "uploads": score.uploads, "layers": [round(x, 4) for x in score.layers]})  # fmt: skip
    console.table(("policy", "slots", "hit rate", "hits an upload", "uploads"), rows)
    console.emit("trace-simulation", {"tokens": len(played), "skip": ns.skip, "scores": data})
    return Exit.OK


def _policies(ns: argparse.Namespace, paths: Paths) -> tuple[list[str], Path | None]:
    """The policies to play, and the program for those that a build has; not asked for, they may be missing."""
    names = ns.policy or [*program.POLICIES, *simulate.POLICIES]
    if not set(names) & set(program.POLICIES):
        if ns.more:
            raise UsageError("options behind -- are for the policy score", do="add --policy score, or leave them out")
        return names, None
    try:
        return names, program.find(store.resolve(paths, ns.build))
    except LlamaforkError as error:
        if ns.policy or ns.build:
            raise
        console.warn(f"without the policy {', '.join(program.POLICIES)}: {error}")
        return list(simulate.POLICIES), None
