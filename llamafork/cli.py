"""The command tree and its dispatch, nothing else. Modules are imported when their verb is called."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

from llamafork import __version__
from llamafork.errors import Exit, LlamaforkError, Terminated

PASS_THROUGH = {
    "serve": "run the built llama-server with our defaults; everything else is passed on",
    "cli": "run the built llama-cli with our defaults; everything else is passed on",
    "bench": "run the built llama-bench; everything else is passed on",
}
BACKENDS = ("cpu", "rpc", "cuda", "vulkan", "hip", "metal", "sim")
SUITES = ("identity", "quality", "speed", "cache")
TRACE_POLICIES = ("score", "lru", "lfu", "belady")
PROFILES = ("release", "test", "asan", "tsan")


class Parser(argparse.ArgumentParser):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        if "--json" in sys.argv[1:]:
            import json

            said = {"error": message, "why": "", "do": f"{self.prog} --help", "exit": int(Exit.USAGE)}
            print(json.dumps({"schema": "llamafork.error/1", **said}, indent=2))
        super().error(message)


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="llamafork", description="Build, run and prove a patched llama.cpp for MoE models.")
    top.add_argument("--version", action="version", version=f"llamafork {__version__}")
    common = _common(default=False)
    for action in _common(default=True)._actions:
        top._add_action(action)
    verbs = top.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)
    _source(verbs.add_parser("source", help="fetch and look after the pinned upstream"), common)
    _patch(verbs.add_parser("patch", help="the patch series: list, apply, edit, export"), common)
    _build(
        verbs.add_parser(
            "build",
            help="build the fork (or its stock twin)",
            parents=[common],
            description="build the fork (or its stock twin)",
        )
    )
    _builds(verbs.add_parser("builds", help="list, choose and remove finished builds"), common)
    for name, text in PASS_THROUGH.items():
        verbs.add_parser(name, help=text, add_help=False)
    model = verbs.add_parser(
        "make-model",
        help="write a small MoE model from nothing",
        parents=[common],
        description="write a small MoE model from nothing",
    )
    model.set_defaults(call="llamafork.synth.verbs:make_model")
    _lazy_model_arguments(model)
    _compare(
        verbs.add_parser(
            "compare",
            help="two builds on the same work: what differs",
            parents=[common],
            description="two builds on the same work: what differs",
        )
    )
    _trace(verbs.add_parser("trace", help="which experts a model uses: record, look, simulate caches"), common)
    doctor = verbs.add_parser(
        "doctor",
        help="check this machine: tools, builds, environment",
        parents=[common],
        description="check this machine: tools, builds, environment",
    )
    doctor.set_defaults(call="llamafork.doctor:run")
    return top


def _common(*, default: bool) -> Parser:
    """Options valid before and after the verb; after it they only override what was given before."""
    absent: dict[str, Any] = {} if default else {"default": argparse.SUPPRESS}
    common = Parser(add_help=False)
    group = common.add_argument_group("common options")
    group.add_argument("--json", action="store_true", help="one JSON object on stdout", **absent)
    group.add_argument("-v", "--verbose", action="count", help="say more (twice: debug)", **(absent or {"default": 0}))
    group.add_argument("-q", "--quiet", action="store_true", help="errors and results only", **absent)
    group.add_argument("--offline", action="store_true", help="open no network connection", **absent)
    return common


def _source(at: argparse.ArgumentParser, common: Parser) -> None:
    verbs = at.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)
    fetch = _action(verbs, common, "source", "fetch", "bring the pinned tree, verified")
    fetch.add_argument("--from", dest="origin", metavar="PATH", help="a local archive or folder of the same tree")
    _action(verbs, common, "source", "status", "what is fetched, and the work tree's state")
    clean = _action(verbs, common, "source", "clean", "remove downloads and the object store; builds stay")
    clean.add_argument("--work-tree", action="store_true", help="remove the work tree too")
    clean.add_argument("--force", action="store_true", help="even with edits in it")


def _patch(at: argparse.ArgumentParser, common: Parser) -> None:
    verbs = at.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)
    _action(verbs, common, "patch", "list", "the changes in order")
    show = _action(verbs, common, "patch", "show", "one change: message, files, and the diff with --diff")
    show.add_argument("name")
    show.add_argument("--diff", action="store_true")
    apply = _action(verbs, common, "patch", "apply", "put the series into the work tree; again: nothing to do")
    apply.add_argument("--until", metavar="NAME", help="stop after this change")
    apply.add_argument("--force", action="store_true", help="drop edits in the work tree (a copy is kept)")
    edit = _action(verbs, common, "patch", "edit", "open the work tree at a change")
    edit.add_argument("name", nargs="?")
    edit.add_argument("--new", action="store_true", help="start a new change at the end of the series")
    edit.add_argument("--abort", action="store_true", help="close the open edit without keeping it")
    edit.add_argument("--force", action="store_true", help="drop edits in the work tree (a copy is kept)")
    _action(verbs, common, "patch", "refresh", "write the edit back to patches/ and replay the rest")
    export = _action(verbs, common, "patch", "export", "write the series out")
    export.add_argument("--check", action="store_true", help="only prove that it round-trips byte for byte")
    export.add_argument("--mbox", metavar="DIR", help="mails for `git am`")
    export.add_argument("--folder", metavar="DIR", help="the format of patches/")
    _action(verbs, common, "patch", "lint", "check every rule of the series")


def _build(at: argparse.ArgumentParser) -> None:
    at.set_defaults(call="llamafork.build.verbs:build")
    at.add_argument("--stock", action="store_true", help="the pin without patches, same options: the twin")
    at.add_argument(
        "--backend",
        action="append",
        choices=BACKENDS,
        metavar="NAME",
        help=f"may be repeated: {', '.join(BACKENDS)} (default: cpu, rpc and what this machine has)",
    )
    at.add_argument("--profile", choices=PROFILES, default="release", help="default: release")
    at.add_argument("--cuda-arch", metavar="LIST", help="such as 86 or 86;89 (default: the visible GPUs)")
    at.add_argument(
        "--target", action="append", type=_name, metavar="NAME", help="build only this target (may be repeated)"
    )
    at.add_argument(
        "--ui",
        choices=("auto", "build", "none"),
        default="auto",
        help="web UI: prebuilt assets if the network allows, made with npm, or none (default: auto)",
    )
    at.add_argument("--no-ccache", action="store_true", help="compile without the compiler cache")
    at.add_argument("--portable", action="store_true", help="not only for this CPU (GGML_NATIVE=OFF)")
    at.add_argument("--rebuild", action="store_true", help="make it again even if it is there")
    at.add_argument(
        "-j", "--jobs", type=_positive, metavar="N", help="compile jobs (default: bounded by cores and RAM)"
    )
    at.add_argument("-C", "--cmake-arg", action="append", default=[], metavar="-DX=Y", help="appended last")
    at.add_argument("--work-tree", action="store_true", help="build the work tree as it is, edits included")
    at.add_argument("--upstream", metavar="WHERE", help="another upstream: folder, archive, URL@REF or sdist:BUILD")
    at.add_argument("--upstream-build", type=int, metavar="N", help="its build number, if its name has none")
    at.add_argument("--dry-run", action="store_true", help="print the key and the configure command only")


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return int(text)


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not from 0 to less than 1")
    return value


def _name(text: str) -> str:
    if not text or text.startswith("-"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a name")
    return text


def _builds(at: argparse.ArgumentParser, common: Parser) -> None:
    verbs = at.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)
    for name, text in (
        ("list", "finished builds"),
        ("use", "make a build the current one"),
        ("prune", "remove builds"),
    ):
        verb = verbs.add_parser(name, help=text, parents=[common], description=text)
        verb.set_defaults(call=f"llamafork.build.verbs:builds_{name}")
        if name == "use":
            verb.add_argument("key", help="a key, or its first letters, or `stock`")
        if name == "prune":
            verb.add_argument("--keep", type=int, default=2, metavar="N", help="newest builds to keep (default 2)")
            verb.add_argument("--dry-run", action="store_true")


def _compare(at: argparse.ArgumentParser) -> None:
    at.set_defaults(call="llamafork.compare.verbs:compare")
    what = "a build's key or its first letters, `stock`, or a folder of programs of any llama.cpp"
    at.add_argument("a", metavar="A", help=what)
    at.add_argument("b", metavar="B", nargs="?", default="stock", help="the same (default: stock)")
    at.add_argument("--model", action="append", metavar="FILE", help="may be repeated; cache makes its own")
    at.add_argument("--suite", action="append", choices=SUITES, help="default: identity")
    at.add_argument("--on", action="append", metavar="PLACE", help="cpu, sim, sim2, rpc2 … (default: all)")
    at.add_argument("--text", metavar="FILE", help="quality: the text (default: Python's manual)")
    at.add_argument("--max-kl", type=_share, default=1e-4, metavar="X", help="quality: mean divergence allowed (1e-4)")
    at.add_argument("--rounds", type=_positive, metavar="N", help="speed, cache: fresh servers of A and B (15, 6)")
    at.add_argument("--quick", action="store_true", help="cache: a rehearsal of a minute, without verdicts")
    at.add_argument("--repeat", type=_positive, default=6, metavar="N", help="speed: A B B A of a pair (default 6)")
    at.add_argument("--threshold", type=_share, default=0.02, metavar="X", help="speed: what does not count (0.02)")
    at.add_argument("--threads", type=_positive, default=1, metavar="N", help="speed: of the host (default 1)")
    at.add_argument("--env-a", action="append", metavar="NAME=VALUE", help="speed: a variable for A alone")
    at.add_argument("--markdown", metavar="FILE", help="the rows as Markdown; /dev/stdout and pipes will do too")
    at.add_argument("--junit", metavar="FILE", help="the rows as JUnit's XML; likewise")
    at.add_argument("--plot", metavar="FILE", help="speed: a PNG of the ratios (needs matplotlib)")
    at.add_argument("--self-test", action="store_true", help="allow A and B to be the same build")


def _trace(at: argparse.ArgumentParser, common: Parser) -> None:
    verbs = at.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)
    call = "llamafork.trace.verbs"
    record = _action(
        verbs, common, "", "record", "run a model and write down the experts it uses", call=f"{call}:record"
    )
    record.add_argument("model", metavar="MODEL")
    record.add_argument("out", metavar="OUT")
    text = record.add_mutually_exclusive_group(required=True)
    text.add_argument("-p", "--prompt", metavar="TEXT")
    text.add_argument("-f", "--file", metavar="FILE", help="the prompt is in this file")
    record.add_argument("-n", "--tokens", type=_positive, default=256, metavar="N", help="to generate (default 256)")
    record.add_argument("--build", metavar="KEY", help="this build instead of the current one")
    record.add_argument(
        "--force", action="store_true", help="replace an existing OUT; of a link the link, never a device or pipe"
    )
    record.set_defaults(more=[])
    record.epilog = "Behind --: options of llama-completion, such as -- -c 4096 --temp 0.7"
    info = _action(verbs, common, "", "info", "what a trace holds", call=f"{call}:info")
    info.add_argument("trace", metavar="TRACE")
    simulate = _action(
        verbs, common, "", "simulate", "hit rates of cache policies on a trace", call=f"{call}:simulated"
    )
    simulate.add_argument("trace", metavar="TRACE")
    simulate.add_argument("--slots", type=_positive, action="append", metavar="N", help="a layer (default: 1/8 to 3/4)")
    simulate.add_argument("--policy", action="append", choices=TRACE_POLICIES, help="default: all")
    simulate.add_argument("--skip", type=_natural, default=64, metavar="N", help="tokens that fill the cache (64)")
    simulate.add_argument("--all", action="store_true", help="the prompt's tokens too, not only what was generated")
    simulate.add_argument("--build", metavar="KEY", help="whose policy score (default: the current build's)")
    simulate.set_defaults(more=[])
    simulate.epilog = "Behind --: options of llama-expert-policy-sim, such as -- --delay 2 --earn 3"


def _action(verbs: Any, common: Parser, group: str, name: str, text: str, *, call: str = "") -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = verbs.add_parser(name, help=text, parents=[common], description=text)
    made.set_defaults(call=call or f"llamafork.source.verbs:{group}_{name}")
    return made


def _lazy_model_arguments(at: argparse.ArgumentParser) -> None:
    from llamafork.synth.verbs import add_arguments

    add_arguments(at)


def _load(call: str) -> Callable[..., int]:
    module, _, name = call.partition(":")
    found: Callable[..., int] = getattr(importlib.import_module(module), name)
    return found


def _split(argv: Sequence[str]) -> tuple[list[str], str | None, list[str]]:
    """Own options before a pass-through verb, the verb, and the untouched rest."""
    for at, word in enumerate(argv):
        if word in PASS_THROUGH:
            return [*argv[:at], word], word, list(argv[at + 1 :])
        if not word.startswith("-"):
            break
    return list(argv), None, []


def _joined(words: Sequence[str]) -> list[str]:
    """``-C -DX=Y`` and a plain ``-DX=Y`` as one word each: argparse takes a value with a dash only that way."""
    made: list[str] = []
    for word in words:
        if made and made[-1] in ("-C", "--cmake-arg"):
            made[-1] = f"--cmake-arg={word}"
        else:
            made.append(f"--cmake-arg={word}" if word.startswith("-D") and "=" in word else word)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, dispatch, and turn every expected failure into its message and exit code."""
    if sys.stdout is None or sys.stderr is None:  # closed by the caller
        sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115, PTH123
        sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115, PTH123
    own, passed, rest = _split(sys.argv[1:] if argv is None else argv)
    try:
        return _run(own, passed, rest)
    except KeyboardInterrupt:
        _stopped("interrupted; run the same command again to go on", Exit.INTERRUPTED)
        return int(Exit.INTERRUPTED)
    except Terminated:
        _stopped("terminated; run the same command again to go on", Exit.TERMINATED)
        return int(Exit.TERMINATED)


def _run(own: Sequence[str], passed: str | None, rest: list[str]) -> int:
    words, more = list(own), []
    if "--" in words and words[0] == "trace":  # argparse cannot keep what is behind it apart
        words, more = words[: words.index("--")], words[words.index("--") + 1 :]
    ns = parser().parse_args(_joined(words))
    if more:
        ns.more = more
    from llamafork import console, paths

    console.configure(level=console.QUIET if ns.quiet else ns.verbose, as_json=ns.json)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        where = paths.find()
        if passed:
            if ns.offline and passed != "bench":
                rest = ["--offline", *rest]
            return int(_load(f"llamafork.run.verbs:{passed}")(rest, where))
        return int(_load(ns.call)(ns, where))
    except LlamaforkError as error:
        console.failure(error)
        return int(error.code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(Exit.FAILED)
    except OSError as error:
        return _os_error(error)


def _terminated(_: int, __: FrameType | None) -> None:
    raise Terminated(int(Exit.TERMINATED))


def _stopped(text: str, code: Exit) -> None:
    from llamafork import console

    console.emit("error", {"error": text, "why": "a signal", "do": "run the same command again", "exit": int(code)})
    console.say(text, style="yellow")


def _os_error(error: OSError) -> int:
    """Whatever the operating system refuses: said with the file it is about, never as a traceback."""
    import errno

    from llamafork import console
    from llamafork.errors import EnvironmentFault, disk_full

    where = error.filename or "a file"
    if error.errno == errno.ENOSPC:
        fault = disk_full(where, error)
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        fault = EnvironmentFault(
            f"no permission for {where}",
            why=str(error),
            do="check who owns it, or set LLAMAFORK_HOME to a folder of your own",
        )
    else:
        do = "check the name; LLAMAFORK_HOME decides where llamafork keeps its files"
        fault = EnvironmentFault(f"{error.strerror or 'input/output error'}: {where}", why=str(error), do=do)
    try:
        console.failure(fault)
    except OSError:  # standard output itself is the one that fails
        console.output.json = False
        console.failure(fault)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(fault.code)
