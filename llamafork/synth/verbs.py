"""`llamafork make-model`."""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields
from pathlib import Path

from llamafork import console
from llamafork.errors import Exit, UsageError
from llamafork.paths import Paths, show
from llamafork.synth.layouts import LAYOUTS
from llamafork.synth.spec import LIMITS, QUANTS, ModelSpec, validate
from llamafork.synth.writer import ModelSummary, write_model

HELP = {
    "n_layer": "layers",
    "n_embd": "embedding width",
    "n_head": "attention heads",
    "n_head_kv": "key/value heads",
    "head_dim": "width of a head",
    "n_expert": "experts per layer",
    "n_expert_used": "experts used per token",
    "n_ff_exp": "width of an expert",
    "n_ctx_train": "context length the model claims",
    "vocab": "tokens",
    "seed": "another seed, other weights",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    base = ModelSpec()
    parser.add_argument("out", nargs="?", metavar="OUT", type=Path, help="file to write (default: models/ of our data)")
    parser.add_argument("--arch", choices=sorted(LAYOUTS), default=base.arch, help=f"default: {base.arch}")
    for field, text in HELP.items():
        option, value = LIMITS[field][0], getattr(base, field)
        parser.add_argument(option, dest=field, type=int, metavar="N", default=value, help=f"{text} (default: {value})")
    parser.add_argument(
        "--type",
        dest="quant",
        type=str.upper,
        choices=list(QUANTS),
        metavar="TYPE",
        default=base.quant,
        help=f"{', '.join(QUANTS)} (default: {base.quant}; norms and router are always F32)",
    )
    parser.add_argument("--name", default="", help="name in the file, and of it (default: from the sizes)")
    parser.add_argument("--force", action="store_true", help="replace an existing file")


def make_model(ns: argparse.Namespace, paths: Paths) -> int:
    spec = ModelSpec(**{field.name: getattr(ns, field.name) for field in fields(ModelSpec)})
    validate(spec)
    target = ns.out if ns.out is not None else paths.data / "models" / f"{spec.title}.gguf"
    _ensure_writable(target, force=ns.force)
    with console.step(f"writing {show(target)}") as step:
        made = write_model(spec, target, lambda done, total: step.update(f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"))
        step.note = f"{made.bytes / 1e6:,.1f} MB"
    _report(made)
    return Exit.OK


def _ensure_writable(target: Path, *, force: bool) -> None:
    if target.is_dir():
        raise UsageError(f"{show(target)} is a folder", do="name a file, such as model.gguf in it")
    blocked = next((folder for folder in target.parents if folder.exists() and not folder.is_dir()), None)
    if blocked is not None:
        raise UsageError(f"{show(blocked)} is a file, not a folder", do="choose another OUT")
    if (target.exists() or target.is_symlink()) and not force:
        raise UsageError(f"{show(target)} exists", do="add --force to replace it, or name another OUT")


def _report(made: ModelSummary) -> None:
    spec = made.spec
    console.result(
        f"{show(made.path)}: {spec.arch}, {spec.quant}, {made.bytes / 1e6:,.1f} MB, "
        f"{made.params / 1e6:,.1f} M parameters ({made.active_params / 1e6:,.1f} M active)"
    )
    rows = [(part.role, part.type, part.tensors, f"{part.params:,}", f"{part.bytes:,}") for part in made.parts]
    console.table(("part", "type", "tensors", "parameters", "bytes"), rows)
    data = {
        "path": show(made.path.absolute()),
        "name": spec.title,
        "bytes": made.bytes,
        "sha256": made.sha256,
        "params": made.params,
        "active_params": made.active_params,
        "spec": asdict(spec),
        "parts": [asdict(part) for part in made.parts],
    }
    console.emit("make-model", data)
