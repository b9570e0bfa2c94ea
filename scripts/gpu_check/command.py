"""The command line of scripts/gpu-check."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gpu_check.check import check
from gpu_check.stage import Options
from gpu_check.stages import STAGES
from llamafork.errors import EnvironmentFault, Exit, LlamaforkError, UsageError

ARCHIVE = Path("dist") / "gpu-check.tar.xz"
# What a simulated device, which computes on one core, can do in a rehearsal's time.
SIM = Options("sim", model_gib=0.3, prefill=256, decode=32, threads=1)


def main(words: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if words is None else words)
    asked = _parser().parse_args(words)
    try:
        return int(asked.work_of(asked, words))
    except LlamaforkError as error:
        return _fail(error)
    except ModuleNotFoundError as error:
        return _fail(
            EnvironmentFault(
                f"this Python has no {error.name}",
                why="pack and rehearse need what the package depends on; run needs only numpy",
                do=".venv/bin/python scripts/gpu-check …, after scripts/quickstart or scripts/test",
            )
        )
    except OSError as error:
        where = error.filename or "a file"
        return _fail(EnvironmentFault(f"cannot read or write {where}", why=error.strerror or str(error)))
    except KeyboardInterrupt:
        return int(Exit.INTERRUPTED)


def _fail(error: LlamaforkError) -> int:
    print(f"error: {error.what}", file=sys.stderr)
    for label, text in (("why: ", error.why), ("do:  ", error.do)):
        if text:
            print(f"  {label}{text}", file=sys.stderr)
    return int(error.code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpu-check", description="Check the fork on a machine with a GPU.")
    verbs = parser.add_subparsers(required=True, metavar="pack | run | rehearse")
    pack = verbs.add_parser("pack", help="make the archive that `run` takes (on the developer's machine)")
    pack.add_argument("--out", type=Path, metavar="FILE", default=ARCHIVE, help=f"default: {ARCHIVE}")
    pack.add_argument("--offline", action="store_true", help="open no network connection")
    pack.set_defaults(work_of=_pack)
    run = verbs.add_parser("run", help="build and check (on the machine with the GPU); needs no network")
    run.add_argument("--archive", type=Path, required=True, metavar="FILE")
    run.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the record goes")
    run.add_argument(
        "--work", type=Path, metavar="DIR", help="builds and model (default: gpu-check in the temporary folder)"
    )
    run.add_argument("--backend", choices=["cuda", "sim"], default="cuda")
    run.add_argument("--arch", default="90", help="CUDA architecture (default: 90)")
    run.add_argument("--model-gib", type=_positive, metavar="X", help="size of the model (default: 12; sim: 0.3)")
    _common(run, 10)
    run.set_defaults(work_of=_run)
    rehearse = verbs.add_parser(
        "rehearse", help="pack, unpack and run on simulated devices (on the developer's machine)"
    )
    rehearse.add_argument("--out", type=Path, metavar="DIR", help="keep the record here")
    _common(rehearse, 5)
    rehearse.set_defaults(work_of=_rehearse)
    return parser


def _common(parser: argparse.ArgumentParser, minutes: float) -> None:
    names = ", ".join(stage.name for stage in STAGES)
    parser.add_argument(
        "--minutes", type=_positive, default=minutes, metavar="X", help=f"in all (default: {minutes:g})"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="to compile with (default: all cores)")
    parser.add_argument("--stages", default="", metavar="A,B", help=f"these and what they need (default: all): {names}")
    parser.add_argument("--cmake", action="append", default=[], metavar="=-DX=Y", help="appended for CMake")


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 10_000:
        raise argparse.ArgumentTypeError("must be more than 0")
    return value


def _pack(asked: argparse.Namespace, words: Sequence[str]) -> int:
    from gpu_check import rehearsal
    from llamafork import paths

    paths.check_result(asked.out)
    print(rehearsal.pack(paths.find(), asked.out, offline=asked.offline))
    return Exit.OK


def _run(asked: argparse.Namespace, words: Sequence[str]) -> int:
    if not asked.arch.isalnum():
        raise UsageError(f"--arch {asked.arch!r} is not one architecture", do="such as 90")
    base = SIM if asked.backend == "sim" else Options("cuda", threads=_jobs(asked))
    options = replace(
        base,
        arch=asked.arch,
        model_gib=asked.model_gib or base.model_gib,
        jobs=_jobs(asked),
        minutes=asked.minutes,
        cmake=tuple(asked.cmake),
    )
    return check(options, asked.archive, asked.out, command=words, work=asked.work, names=_names(asked.stages))


def _rehearse(asked: argparse.Namespace, words: Sequence[str]) -> int:
    from gpu_check import rehearsal
    from llamafork import paths

    more = [f"--cmake={word}" for word in asked.cmake]
    names = _names(asked.stages)
    return rehearsal.rehearse(
        paths.find(), minutes=asked.minutes, jobs=_jobs(asked), out=asked.out, names=names, more=more
    )


def _jobs(asked: argparse.Namespace) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if asked.jobs is not None and asked.jobs < 1:
        raise UsageError(f"--jobs {asked.jobs} is not possible", do="1 or more")
    return asked.jobs or cores


def _names(text: str) -> list[str]:
    return [word for word in (part.strip() for part in text.split(",")) if word]
