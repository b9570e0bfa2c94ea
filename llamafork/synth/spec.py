"""What a synthetic model is to be, and whether that can be made."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from llamafork.errors import UsageError
from llamafork.synth.archs import LAYOUTS
from llamafork.synth.layouts import rows, tensors
from llamafork.synth.quants import QUANTS, fitting
from llamafork.synth.table import FLOAT_ONLY, GGML, Role
from llamafork.synth.tokenizer import MIN_VOCAB


@dataclass(frozen=True)
class ModelSpec:
    """The defaults make a model of about 8 MB."""

    arch: str = "qwen3moe"
    n_layer: int = 4
    n_embd: int = 256
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_ff_exp: int = 128
    n_expert: int = 16
    n_expert_used: int = 4
    n_ctx_train: int = 4096
    vocab: int = 512
    quant: str = "Q8_0"
    seed: int = 0
    name: str = ""
    n_dense: int = 0
    n_shared: int = 0
    merged: bool = False  # gate and up of the experts in one tensor
    layer_types: tuple[str, ...] = ()  # of the experts, for one layer with experts after the other
    mtp: bool = False
    mtp_only: bool = False  # the MTP block alone, for a file of its own
    bench: bool = False  # made quickly, and routed with this much reuse and skew: llamafork.synth.bench
    reuse: float = 0.5
    skew: float = 0.5

    @property
    def n_blocks(self) -> int:
        """Layers as upstream counts them: with the MTP block."""
        return self.n_layer + (1 if self.mtp or self.mtp_only else 0)

    @property
    def layers(self) -> range:
        """Those that the file holds."""
        return range(self.n_layer if self.mtp_only else 0, self.n_blocks)

    @property
    def title(self) -> str:
        """The given name, or one made of what distinguishes the model."""
        if self.name:
            return self.name
        seed = f"-s{self.seed}" if self.seed else ""
        extras = [
            *([f"{self.n_dense}dense"] if self.n_dense else ()),
            *(["merged"] if self.merged else ()),
            *([f"bench-r{self.reuse:g}-k{self.skew:g}"] if self.bench else ()),
            *(["mtp"] if self.mtp or self.mtp_only else ()),
        ]
        types = "-".join(self.layer_types or (self.quant,)).lower()
        return "-".join([self.arch, f"{self.n_layer}l", f"{self.n_expert}x{self.n_expert_used}", types + seed, *extras])

    def type_of(self, role: Role, width: int, turn: int = 0) -> str:
        """The type of a tensor with rows of *width*, in the *turn*-th layer with experts."""
        if role in FLOAT_ONLY:
            return "F32"
        wanted = QUANTS[self.quant].of(role)
        if role is Role.EXPERT and self.layer_types:
            wanted = self.layer_types[turn % len(self.layer_types)]
        return fitting(wanted, width, floats=role is not Role.EXPERT)


# Option, least and most. Layers and experts are bounded by LLAMA_MAX_LAYERS and LLAMA_MAX_EXPERTS of llama-hparams.h.
LIMITS: dict[str, tuple[str, int, int]] = {
    "n_layer": ("--layers", 1, 512),
    "n_embd": ("--embd", 2, 65_536),
    "n_head": ("--heads", 1, 1024),
    "n_head_kv": ("--kv-heads", 1, 1024),
    "head_dim": ("--head-dim", 2, 1024),
    "n_ff_exp": ("--ff", 2, 262_144),
    "n_expert": ("--experts", 1, 1024),
    "n_expert_used": ("--used", 1, 1024),
    "n_ctx_train": ("--ctx", 256, 1 << 24),  # upstream rounds contexts up to 256; its tools abort on a handful
    "vocab": ("--vocab", MIN_VOCAB, 1_000_000),
    "seed": ("--seed", 0, (1 << 63) - 1),
    "n_dense": ("--dense", 0, 511),
    "n_shared": ("--shared", 0, 8),
}
WIDTH_OPTION = {"embd": "--embd", "ff": "--ff", "q": "--heads times --head-dim", "head": "--head-dim"}


def validate(spec: ModelSpec) -> None:
    """Raise :class:`UsageError` for a model that upstream would refuse or could not compute."""
    _names(spec)
    for field, (option, least, most) in LIMITS.items():
        value = getattr(spec, field)
        if not least <= value <= most:
            why = "the tokenizer needs its bytes, control tokens and a merge" if field == "vocab" and value > 0 else ""
            raise UsageError(f"{option} {value} is out of range", why=why, do=f"give {least} to {most}")
    _relations(spec)
    _features(spec)
    for check in LAYOUTS[spec.arch].checks:
        check(spec)
    _widths(spec)


def _names(spec: ModelSpec) -> None:
    asked = [("--arch", spec.arch, list(LAYOUTS)), ("--type", spec.quant, list(QUANTS))]
    asked += [("--layer-types", one, list(QUANTS)) for one in spec.layer_types]
    for option, value, known in asked:
        if value not in known:
            raise UsageError(f"{option} {value} is not supported", do=f"choose from: {', '.join(known)}")
    if spec.name and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", spec.name):
        raise UsageError(
            f"--name {spec.name!r} cannot be a file name",
            do="use up to 100 letters, digits, dots, dashes and underscores, beginning with a letter or digit",
        )


def _relations(spec: ModelSpec) -> None:
    if spec.n_expert_used > spec.n_expert:
        raise UsageError(
            f"--used {spec.n_expert_used} is more than --experts {spec.n_expert}",
            why="each token chooses that many different experts of a layer",
            do=f"--used {spec.n_expert} or less, or more --experts",
        )
    if spec.n_head % spec.n_head_kv:
        fits = [n for n in range(1, spec.n_head + 1) if spec.n_head % n == 0]
        raise UsageError(
            f"--heads {spec.n_head} is not a multiple of --kv-heads {spec.n_head_kv}",
            why="each key/value head serves the same number of query heads",
            do=f"--kv-heads one of {', '.join(map(str, fits))}",
        )
    for option, part, most in (("--reuse", spec.reuse, 1.0), ("--skew", spec.skew, 10.0)):
        if not 0 <= part <= most:
            raise UsageError(f"{option} {part:g} is out of range", do=f"give 0 to {most:g}")
    if spec.n_dense >= spec.n_layer:
        raise UsageError(
            f"--dense {spec.n_dense} leaves no layer with experts", do=f"--layers {spec.n_dense + 1} or more"
        )


def _features(spec: ModelSpec) -> None:
    """What the architecture, or upstream's loader of it, does not have."""
    table = LAYOUTS[spec.arch]
    least, most = table.shared
    lacks = [
        ("--gate-up merged", spec.merged, "merged", "upstream's loader of it takes gate and up only as two tensors"),
        ("--dense", spec.n_dense > 0, "dense", "all of its layers have experts"),
        ("--mtp", spec.mtp, "mtp", "upstream loads no MTP block of it"),
        ("--mtp-file", spec.mtp_only, "mtp_file", "upstream loads no separate file with its MTP block"),
    ]
    for option, asked, has, why in lacks:
        if asked and not getattr(table, has):
            able = [name for name, one in LAYOUTS.items() if getattr(one, has)]
            raise UsageError(f"{spec.arch} has no {option}", why=why, do=f"leave it out, or choose {', '.join(able)}")
    if not least <= spec.n_shared <= most:
        allowed = str(least) if least == most else f"{least} to {most}"
        raise UsageError(f"--shared {spec.n_shared} is not possible with {spec.arch}", do=f"give {allowed}")
    if spec.n_blocks > LIMITS["n_layer"][2]:
        raise UsageError(f"--layers {spec.n_layer} leaves no room for an MTP block", do=f"--layers {spec.n_layer - 1}")
    if spec.n_layer < table.least_layers:
        raise UsageError(
            f"--layers {spec.n_layer} is too few for {spec.arch}",
            why="it has layers of several kinds, and upstream expects each of them",
            do=f"--layers {table.least_layers} or more",
        )


def _widths(spec: ModelSpec) -> None:
    """Widths that the user chose must be whole blocks; for the others, :func:`fitting` finds a type."""
    few = replace(spec, n_layer=min(spec.n_layer, spec.n_dense + 4), layer_types=spec.layer_types[:4])
    of = {name: row for name, row, _ in rows(few)}
    for tensor in tensors(few):
        block, width = GGML[tensor.type].block, tensor.shape[0]
        dim = of[tensor.name].dims[0]
        asked = QUANTS[spec.quant].of(tensor.role)
        if tensor.type == "F16" != asked and dim in WIDTH_OPTION:  # a substitute, though the option can be changed
            block = 32
        step = max(block, 2)
        if width % step == 0 or (tensor.role in FLOAT_ONLY and dim not in WIDTH_OPTION):
            continue
        kind = asked if block > 1 and tensor.type == "F16" else tensor.type
        stored = f"{kind} comes in blocks of {block}" if block > 1 else "CUDA's kernels load pairs (mmvf.cu)"
        near = " or ".join(str(n) for n in (width // step * step, width // step * step + step) if n)
        raise UsageError(
            f"{WIDTH_OPTION.get(str(dim), dim)} is {width}, not a multiple of {step}",
            why=f"it is the row width of {tensor.name}, and {stored}",
            do=f"make it {near}" + (", or choose --type F16" if block > 1 else ""),
        )


def sized(arch: str, **given: Any) -> ModelSpec:
    """A spec of *arch* with its own defaults for what is not given."""
    table, usual = LAYOUTS[arch], ModelSpec()
    layers, heads = given.get("n_layer", usual.n_layer), given.get("n_head", usual.n_head)
    sizes: dict[str, Any] = {
        "n_dense": min(1, layers - 1) if table.dense else 0,
        "n_shared": min(1, table.shared[1]),
        "n_head_kv": heads if table.all_heads else usual.n_head_kv,
    }
    return ModelSpec(arch=arch, **(sizes | given))
