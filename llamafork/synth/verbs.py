"""`llamafork make-model`."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path

from llamafork import console
from llamafork.errors import Exit, UsageError
from llamafork.paths import Paths, check_result, show
from llamafork.synth import bench, splits
from llamafork.synth.archs import LAYOUTS
from llamafork.synth.quants import QUANTS
from llamafork.synth.spec import LIMITS, ModelSpec, sized, validate
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
    "n_dense": "layers without experts before the first with, where the architecture has such",
    "n_shared": "shared experts, where the architecture has such",
    "n_ctx_train": "context length the model claims",
    "vocab": "tokens",
    "seed": "another seed, other weights",
}
BY_ARCH = {"n_dense": "by architecture, 0 or 1", "n_shared": "by architecture, 0 or 1"}
ALIASES = {"openai-moe": "gpt-oss"}  # upstream's source calls it one, its files the other


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    base = ModelSpec()
    parser.add_argument("out", nargs="?", metavar="OUT", type=Path, help="file to write (default: models/ of our data)")
    parser.add_argument(
        "--arch",
        type=lambda name: ALIASES.get(name, name),
        choices=sorted(LAYOUTS),
        default=base.arch,
        help=f"default: {base.arch}",
    )
    for field, text in HELP.items():
        option, usual = LIMITS[field][0], BY_ARCH.get(field, getattr(base, field))
        parser.add_argument(option, dest=field, type=int, metavar="N", help=f"{text} (default: {usual})")
    parser.add_argument(
        "--type",
        dest="quant",
        type=str.upper,
        choices=list(QUANTS),
        metavar="TYPE",
        default=base.quant,
        help=f"{', '.join(QUANTS)} (default: {base.quant}; norms and router are always F32)",
    )
    parser.add_argument(
        "--layer-types",
        metavar="TYPES",
        default="",
        help="types of the experts, such as Q4_K,Q6_K: one for each layer with experts, and again from the first",
    )
    parser.add_argument(
        "--gate-up",
        choices=["separate", "merged"],
        default="separate",
        help="gate and up of the experts as two tensors or one (default: separate)",
    )
    parser.add_argument("--mtp", action="store_true", help="with a block that predicts a further token")
    parser.add_argument("--mtp-file", metavar="PATH", type=Path, help="that block in a file of its own")
    parser.add_argument("--split", type=_count, metavar="N", default=1, help="write N files, name-00001-of-0000N on")
    parser.add_argument("--bench", action="store_true", help="for measuring: made quickly, routed as the next two say")
    for option, value, text in (
        ("--reuse", base.reuse, "how far a token's experts are those of the tokens before, 0 to 1"),
        ("--skew", base.skew, "how much more popular some experts are, as the exponent of a Zipf law"),
    ):
        parser.add_argument(option, type=float, metavar="X", help=f"{text} (default: {value}; with --bench)")
    parser.add_argument("--name", default="", help="name in the file, and of it (default: from the sizes)")
    parser.add_argument(
        "--force", action="store_true", help="replace an existing file; of a link the link, never a device or pipe"
    )


def make_model(ns: argparse.Namespace, paths: Paths) -> int:
    spec = _spec(ns)
    validate(spec)
    target = ns.out if ns.out is not None else paths.data / "models" / f"{spec.title}.gguf"
    wanted = [(spec, target, ns.split)]
    if ns.mtp_file is not None:
        side = replace(spec, mtp_only=True, name=spec.name or f"{spec.title}-mtp")
        validate(side)
        wanted.insert(0, (side, ns.mtp_file, 1))
    places = [place for _, path, count in wanted for place in splits.paths(path, count)]
    if len({place.absolute() for place in places}) < len(places):
        raise UsageError(f"--mtp-file {show(ns.mtp_file)} is the model's own file", do="give it another name")
    # Without it nothing can be loaded, and it gets its name last: the rest may be what a killed run left.
    first = splits.paths(target, ns.split)[0]
    for place in places:
        _ensure_writable(place, force=ns.force or (place != first and not first.exists()))
    _report([_write(*one, force=ns.force) for one in wanted][::-1])
    return Exit.OK


def _spec(ns: argparse.Namespace) -> ModelSpec:
    given = {one: value for one in (*HELP, "reuse", "skew") if (value := getattr(ns, one)) is not None}
    if ns.mtp and ns.mtp_file is not None:
        raise UsageError("--mtp and --mtp-file cannot both be given", do="put the block in one place")
    if not ns.bench and (ns.reuse, ns.skew) != (None, None):
        raise UsageError("--reuse and --skew are for models made with --bench", do="add --bench")
    types = tuple(one.strip().upper() for one in ns.layer_types.split(",")) if ns.layer_types else ()
    return sized(
        ns.arch,
        quant=ns.quant,
        name=ns.name,
        merged=ns.gate_up == "merged",
        layer_types=types,
        mtp=ns.mtp,
        bench=ns.bench,
        **given,
    )


def _write(spec: ModelSpec, path: Path, split: int, *, force: bool) -> ModelSummary:
    with console.step(f"writing {show(path)}") as step:
        made = write_model(
            spec,
            path,
            lambda done, total: step.update(f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"),
            split=split,
            force=force,
        )
        step.note = f"{made.bytes / 1e6:,.1f} MB"
    return made


def _ensure_writable(target: Path, *, force: bool) -> None:
    if target.is_dir():
        raise UsageError(f"{show(target)} is a folder", do="name a file, such as model.gguf in it")
    check_result(target)
    blocked = next((folder for folder in target.parents if folder.exists() and not folder.is_dir()), None)
    if blocked is not None:
        raise UsageError(f"{show(blocked)} is a file, not a folder", do="choose another OUT")
    if (target.exists() or target.is_symlink()) and not force:
        raise UsageError(f"{show(target)} exists", do="add --force to replace it, or name another OUT")


def _report(all_made: list[ModelSummary]) -> None:
    for made in all_made:
        spec = made.spec
        types = ",".join(spec.layer_types) or spec.quant
        console.result(
            f"{show(made.path)}: {spec.arch}, {types}, {made.bytes / 1e6:,.1f} MB, "
            f"{made.params / 1e6:,.1f} M parameters ({made.active_params / 1e6:,.1f} M active)"
        )
        rows = [(part.role, part.type, part.tensors, f"{part.params:,}", f"{part.bytes:,}") for part in made.parts]
        console.table(("part", "type", "tensors", "parameters", "bytes"), rows)
    data = _as_data(all_made[0])
    if all_made[0].spec.bench:
        rates = bench.hit_rates(all_made[0].spec)
        table = [(f"{share:.1%}", f"{rate:.1%}") for share, rate in rates.items()]
        console.table(("experts cached", "hits (LRU, estimate)"), table)
        data["hit_rates"] = {f"{share:g}": round(rate, 4) for share, rate in rates.items()}
    console.emit("make-model", data | ({"mtp_file": _as_data(all_made[1])} if len(all_made) > 1 else {}))


def _as_data(made: ModelSummary) -> dict[str, object]:
    files = [asdict(one) | {"path": show(one.path.absolute())} for one in made.files]
    return {
        "path": show(made.path.absolute()),
        "name": made.spec.title,
        "bytes": made.bytes,
        "sha256": made.sha256,
        "params": made.params,
        "active_params": made.active_params,
        "spec": asdict(made.spec),
        "parts": [asdict(part) for part in made.parts],
        "files": files,
    }
