"""What the cache suite runs: models it makes itself, and places whose device memory is the same for every mode.

Models are make-model's bench variant: experts are more than 80 % of the bytes a token reads, and reuse and skew are set
so that an LRU cache of the slots that fit, an eighth of the experts, has the hit rate in the name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from llamafork import console
from llamafork.compare.speed import LEAST
from llamafork.compare.target import Place
from llamafork.errors import UsageError
from llamafork.synth.spec import ModelSpec, sized
from llamafork.synth.writer import write_model

USED = 8


@dataclass(frozen=True)
class Workload:
    """``goal``: least speed over stock's best mode; None: routing is uniform, only being no slower is asked for."""

    name: str
    reuse: float
    skew: float
    goal: float | None = None


WORKLOADS = (
    Workload("hits-50", 0.6, 0.5, 1.7),
    Workload("hits-75", 0.7, 0.9, 2.5),
    Workload("hits-95", 0.9, 1.3, 4.0),
    Workload("uniform", 0.0, 0.0),
)


@dataclass(frozen=True)
class CachePlace:
    """Where a server runs, and how much memory of each device stays free in every mode (MiB).

    ``split``: how layers are dealt out where ``--fit``, which does so itself, is off.
    """

    place: Place
    margin: int
    env: Mapping[str, str]
    split: tuple[str, ...]
    note: str  # what must be said beside each number


@dataclass(frozen=True)
class Size:
    """How much is done. ``memory``: MiB of the devices, by place; ``warm``: tokens until it is steady, least and most.

    ``repeat``: how often A B B A in a round.
    """

    name: str
    workloads: tuple[str, ...]
    layers: int
    width: int  # of an expert
    memory: Mapping[str, Sequence[int]]
    rounds: int
    repeat: int = 1  # A B B A
    decode: int = 24
    warm: tuple[int, int] = (256, 512)

    @property
    def judged(self) -> bool:
        """Whether the rounds are enough for verdicts."""
        return self.rounds >= LEAST

    def spec(self, work: Workload) -> ModelSpec:
        return sized("qwen3moe", n_layer=self.layers, n_embd=512, n_head=4, n_head_kv=2, head_dim=64, n_expert=128,
                     n_expert_used=USED, n_ff_exp=self.width, quant="Q4_0", bench=True, reuse=work.reuse,
                     skew=work.skew)  # fmt: skip


FULL = Size("full", ("hits-50", "hits-75", "hits-95", "uniform"), 8, 320, {"sim": (65,), "sim2": (51, 16)}, 6)
QUICK = Size("quick", ("hits-75", "uniform"), 4, 256, {"sim": (33,), "sim2": (29, 10)}, 1, 1, 16, (64, 64))
PLACES = ("sim", "sim2")
# Links of 12 GB/s each way, 10 us a copy; a host eight times as slow as a device
LINK, SLOW = "h2d=12G,d2h=12G,lat=10us", "8"
MARGIN, SPLIT = 4, "3,2"
SIMULATED = "simulated; not measured on a GPU"


def places(words: Sequence[str], size: Size) -> list[CachePlace]:
    """The places named, none named means all. Raises :class:`UsageError` for one that has no device to cache on."""
    unknown = [word for word in words if word not in PLACES]
    if unknown:
        raise UsageError(f"the cache is not measured at {unknown[0]}", do=f"one of: {', '.join(PLACES)}")
    return [_simulated(name, size) for name in dict.fromkeys(words or PLACES)]


def _simulated(name: str, size: Size) -> CachePlace:
    devices = ";".join(f"mem={mib}M,{LINK}" for mib in size.memory[name])
    env = {"GGML_SIM_CHECK": "0", "GGML_SIM_HOST_SLOW": SLOW}
    split = ("-ts", SPLIT) if len(size.memory[name]) > 1 else ()
    return CachePlace(Place(name, (), devices), MARGIN, env, split, SIMULATED)


def model(folder: Path, work: Workload, size: Size) -> Path:
    """The workload's file in *folder*, made if it is not there: the same options give the same bytes."""
    spec = size.spec(work)
    path = folder / f"{spec.title}-{spec.n_embd}x{spec.n_ff_exp}.gguf"
    if not path.is_file():
        with console.step(f"making {path.name}") as step:
            step.note = f"{write_model(spec, path).bytes / 1e6:.0f} MB"
    return path
