"""serve, cli and bench: find the program, check what it is given, run it, return its own exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from llamafork import console, proc
from llamafork.errors import Exit, ModelError, UsageError
from llamafork.facts.gguf_file import GgufFile, check_model
from llamafork.facts.model_files import known_models
from llamafork.paths import Paths, show
from llamafork.run import args, health, launch, vocabulary
from llamafork.run.args import Command, Known, Own, Setting

INFORMATION = frozenset(
    {"-h", "--help", "--usage", "--version", "--list-devices", "-cl", "--cache-list", "--completion-bash"}
)
MODEL_FILES = ("model", "draft", "mmproj")
OWN_HELP = """llamafork's own options:
  --build KEY               run this build instead of the current one
  --dry-run                 print the command and stop
  --json                    serve: one JSON line when ready; bench: its JSON; with --dry-run: the plan
  --ready-timeout SECONDS   serve: give up when not ready by then (default: wait as long as the server lives)
  --grace SECONDS           serve: time between the first signal and a kill (default: 30)
  --                        everything behind it is the program's
all other options are the program's:
"""


@dataclass(frozen=True)
class Plan:
    """What will run, and why: the decision that --dry-run shows and the real run carries out."""

    program: Path
    key: str
    own: Own
    command: Command
    settings: dict[str, Known]
    added: tuple[tuple[str, str, str], ...] = ()
    models: tuple[GgufFile, ...] = ()

    @property
    def words(self) -> list[str]:
        extra = [word for flag, value, _ in self.added for word in (flag, value)]
        return [str(self.program), *self.command.words, *extra]


def serve(argv: list[str], paths: Paths) -> int:
    """Run llama-server until it ends; returns its exit code, or 9 if it ended well without ever being ready."""
    own, rest = args.split(argv, args.SERVE)
    console.output.json |= own.json
    program, key = find_program(paths, own.build, "llama-server")
    if INFORMATION & set(rest):
        return _inform(program, rest)
    plan = _plan(program, key, own, rest)
    if not _names_a_model(plan):
        return _list_models(paths)
    added = tuple(args.defaults(plan.settings, vocabulary.of(program)))
    ours = {flag.lstrip("-"): Known(value, "default") for flag, value, _ in added}
    plan = _with_port(replace(plan, added=added, settings={**plan.settings, **ours}))
    health.endpoint(plan.settings)  # a port that is none is refused also by a dry run
    _say(plan)
    if own.dry_run:
        return _show(plan)
    return _serve(plan, paths)


def cli(argv: list[str], paths: Paths) -> int:
    """Become llama-cli."""
    return _tool("llama-cli", argv, paths)


def bench(argv: list[str], paths: Paths) -> int:
    """Become llama-bench."""
    return _tool("llama-bench", argv, paths)


def find_program(paths: Paths, wanted: str | None, name: str) -> tuple[Path, str]:
    """The program and its build's key; LLAMAFORK_PROGRAM_DIR names a folder of programs to use instead of a build."""
    folder = os.environ.get("LLAMAFORK_PROGRAM_DIR")
    if folder and wanted is None:
        suffix = ".exe" if os.name == "nt" else ""
        return Path(folder).expanduser().absolute() / f"{name}{suffix}", "LLAMAFORK_PROGRAM_DIR"
    from llamafork.build import check, store

    build = store.resolve(paths, wanted)
    program = build.program(name)
    stale = store.stale(paths, build) if wanted is None else None
    if stale:
        console.warn(stale)
    for line in check.without_device(program.parent, build.info.get("backends", [])):
        console.warn(line)
    return program, build.key


def _inform(program: Path, rest: Sequence[str]) -> int:
    if {"-h", "--help", "--usage"} & set(rest):
        console.result(OWN_HELP)
    return launch.replace_process([str(program), *rest])


def _tool(name: str, argv: list[str], paths: Paths) -> int:
    own, rest = args.split(argv, args.TOOL)
    console.output.json |= own.json
    program, key = find_program(paths, own.build, name)
    if INFORMATION & set(rest):
        return _inform(program, rest)
    plan = _plan(program, key, own, rest)
    if console.output.json:
        plan = _as_json(plan)
    _say(plan)
    if own.dry_run:
        return _show(plan)
    return launch.replace_process(plan.words)


def _as_json(plan: Plan) -> Plan:
    """llama-bench prints JSON by itself; llama-cli cannot."""
    if plan.program.stem != "llama-bench":
        if plan.own.dry_run:
            return plan
        raise UsageError(
            f"{plan.program.stem} has no JSON output",
            do="use `llamafork serve` and its API, or --dry-run --json for the command",
        )
    if plan.command.last(("-o", "--output")) is not None:
        return plan
    return replace(plan, added=(*plan.added, ("-o", "json", "--json was asked for")))


def _plan(program: Path, key: str, own: Own, rest: Sequence[str]) -> Plan:
    """Check flags and model files; the values come from the command line, the environment and config.ini."""
    command = args.read(rest, vocabulary.of(program))
    settings = args.known(command, os.environ, args.config_values(_texts(args.config_files(os.environ))))
    models: list[GgufFile] = []
    for name in MODEL_FILES:
        if name not in settings or (name == "model" and _is_elsewhere(command, settings)):
            continue
        setting = command.last(args.TWINS[name].flags)
        found = _check(settings[name].value, is_list=program.stem == "llama-bench")
        models += found
        if setting is not None:
            command = command.with_value(setting, _model_word(setting, found))
    return Plan(program, key, own, command, settings, models=tuple(models))


def _is_elsewhere(command: Command, settings: Mapping[str, Known]) -> bool:
    """Whether -m is not a file to load but where a download goes, or a name on another server."""
    return bool({"hf_repo", "model_url"} & set(settings)) or command.last(("--server-base",)) is not None


def _texts(files: Sequence[Path]) -> list[str]:
    texts = []
    for file in files:
        try:
            texts.append(file.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
    return texts


def _check(value: str, *, is_list: bool) -> tuple[GgufFile, ...]:
    """The model's parts; llama-bench takes several models with commas between."""
    if not value:
        raise ModelError("the name of the model is empty", do="give it with -m FILE")
    names = value.split(",") if is_list else [value]
    return tuple(part for name in names for part in check_model(_plain(name)))


def _plain(name: str) -> Path:
    return Path(f"./{name}" if name.startswith("-") else name)


def _model_word(setting: Setting, found: Sequence[GgufFile]) -> str:
    """The value to pass on: the first part of a split model, and no name that looks like a flag."""
    value = setting.values[0]
    first = found[0]
    if first.split_count > 1 and len(found) == first.split_count and _plain(value) != first.path:
        value = str(first.path)
    return f"./{value}" if value.startswith("-") else value


def _names_a_model(plan: Plan) -> bool:
    presets = any(found.flag.endswith(("-default", "-spec")) for found in plan.command.settings)
    return presets or any(name in plan.settings for name in args.SOURCES_OF_MODELS)


def _list_models(paths: Paths) -> int:
    """No model was named: in a terminal, those found are listed with the command for each."""
    models = known_models(paths)
    if not models or not sys.stdin.isatty():
        raise UsageError("no model is given", do="use -m FILE.gguf, -hf USER/MODEL, or --models-dir FOLDER")
    rows = [
        (number, f"{model.size / 1e9:.1f} GB", proc.command_line(["llamafork", "serve", "-m", show(model.path)]))
        for number, model in enumerate(models, 1)
    ]
    console.table(("", "size", "command"), rows, title="models found")
    raise UsageError("no model is given", do="run one of the commands above, or use -hf USER/MODEL")


def _with_port(plan: Plan) -> Plan:
    """Port 0 lets the system choose; the probe must know the port, so we choose."""
    if "port" not in plan.settings or plan.settings["port"].value != "0":
        return plan
    port = str(health.free_port("127.0.0.1", 0))
    setting = plan.command.last(("--port",))
    settings = {**plan.settings, "port": replace(plan.settings["port"], value=port)}
    if setting is not None:
        return replace(plan, command=plan.command.with_value(setting, port), settings=settings)
    return replace(plan, added=(*plan.added, ("--port", port, "port 0: a free one chosen")), settings=settings)


def _say(plan: Plan) -> None:
    for note in plan.command.notes:
        console.say(f"note: {note}")
    for warning in (*(text for model in plan.models for text in model.warnings), *args.warnings(plan.settings)):
        console.warn(warning)


def _shown(plan: Plan) -> list[str]:
    """The words with secrets hidden and undecodable bytes escaped."""
    return [show(word) for word in console.redact_args([args.normal(word) for word in plan.words])]


def _show(plan: Plan) -> int:
    words = _shown(plan)
    console.result(proc.command_line(words))
    models = [
        {"path": show(m.path), "size": m.size, "architecture": m.architecture, "experts": m.expert_count}
        for m in plan.models
    ]
    secret = ("api_key",)
    given = [
        {"name": name, "value": "***" if name in secret else show(known.value), "source": known.source, "reason": ""}
        for name, known in plan.settings.items()
        if known.source != "default"
    ]
    added = [
        {"name": flag.lstrip("-"), "value": value, "source": "default", "reason": reason}
        for flag, value, reason in plan.added
    ]
    console.emit(
        "serve-plan",
        {"build": plan.key, "args": words, "env": {}, "models": models, "settings": given + added},
    )
    return int(Exit.OK)


def _serve(plan: Plan, paths: Paths) -> int:
    at = health.endpoint(plan.settings)
    health.check_free(at, reuse_port="reuse_port" in plan.settings)
    with launch.running(plan.words, logs=paths.state / "logs", grace=plan.own.grace) as server:
        seconds = health.wait_ready(at, server, timeout=plan.own.ready_timeout)
        if seconds is not None:
            _ready(plan, at, seconds, server.child.pid)
        code = server.wait()
        if server.stopping or (code == 0 and seconds is not None):
            return code
        failed = _ended(server, code, ready=seconds is not None)
    console.failure(failed)
    return failed.child_code


def _ready(plan: Plan, at: health.Endpoint, seconds: float, pid: int) -> None:
    page = health.has_page(at)
    launch.tell(f"ready: {at.url} (build {plan.key}, process {pid}, {seconds:.1f} s)")
    launch.tell(f"OpenAI API: {at.url}/v1")
    launch.tell(f"web UI: {at.url}/" if page else "web UI: none in this build (llamafork build --ui build makes it)")
    console.emit("ready", {"url": at.url, "pid": pid, "build": plan.key, "seconds": round(seconds, 2), "web_ui": page})


def _ended(server: launch.Server, code: int, *, ready: bool) -> launch.ChildFailed:
    last = "\n       ".join(server.output.last_lines(12))
    when = "" if ready else " before it was ready"
    log = f"the whole log: {show(server.log)}" if server.log else ""
    what = f"llama-server ended with exit code {code}{when}"
    return launch.ChildFailed(what, code or int(Exit.UNHEALTHY), why=last or "it said nothing", do=log)
