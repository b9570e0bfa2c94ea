"""What a synthetic model is to be, and whether that can be made."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from llamafork.errors import UsageError
from llamafork.synth.layouts import GGML, LAYOUTS, Role, tensors
from llamafork.synth.tokenizer import MIN_VOCAB

FLOAT_ONLY = frozenset({Role.NORM, Role.ROUTER})


@dataclass(frozen=True)
class Quant:
    """The types a ``--type`` stands for; ``file_type`` is llama_ftype of llama.h."""

    matrix: str
    experts: str
    file_type: int


# Every type that gguf-py can quantise and upstream can multiply everywhere. gguf-py cannot make K or IQ quants;
# TQ1_0 and TQ2_0 it can make, but no CUDA kernel multiplies them. MXFP4 is for experts only, as in MXFP4_MOE files.
QUANTS: dict[str, Quant] = {
    "F32": Quant("F32", "F32", 0),
    "F16": Quant("F16", "F16", 1),
    "BF16": Quant("BF16", "BF16", 32),
    "Q8_0": Quant("Q8_0", "Q8_0", 7),
    "Q4_0": Quant("Q4_0", "Q4_0", 2),
    "Q4_1": Quant("Q4_1", "Q4_1", 3),
    "Q5_0": Quant("Q5_0", "Q5_0", 8),
    "Q5_1": Quant("Q5_1", "Q5_1", 9),
    "MXFP4": Quant("Q8_0", "MXFP4", 38),
}


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

    @property
    def title(self) -> str:
        """The given name, or one made of what distinguishes the model."""
        if self.name:
            return self.name
        seed = f"-s{self.seed}" if self.seed else ""
        return f"{self.arch}-{self.n_layer}l-{self.n_expert}x{self.n_expert_used}-{self.quant.lower()}{seed}"

    def type_of(self, role: Role) -> str:
        if role in FLOAT_ONLY:
            return "F32"
        quant = QUANTS[self.quant]
        return quant.experts if role is Role.EXPERT else quant.matrix


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
    LAYOUTS[spec.arch].check(spec)
    _widths(spec)


def _names(spec: ModelSpec) -> None:
    for option, value, known in (("--arch", spec.arch, list(LAYOUTS)), ("--type", spec.quant, list(QUANTS))):
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


def _widths(spec: ModelSpec) -> None:
    rows = dict(LAYOUTS[spec.arch].rows(1))
    for tensor in tensors(replace(spec, n_layer=1)):
        block, width = GGML[tensor.type].block, tensor.shape[0]
        step = max(block, 2)
        if width % step == 0:
            continue
        dim = rows[tensor.name].dims[0]
        stored = f"{tensor.type} comes in blocks of {block}" if block > 1 else "CUDA's kernels load pairs (mmvf.cu)"
        near = " or ".join(str(n) for n in (width // step * step, width // step * step + step) if n)
        raise UsageError(
            f"{WIDTH_OPTION.get(dim, dim)} is {width}, not a multiple of {step}",
            why=f"it is the row width of {tensor.name}, and {stored}",
            do=f"make it {near}" + (", or choose --type F16" if block > 1 else ""),
        )
