"""Run by path, with llamafork and gguf on PYTHONPATH: makes the model for measuring and prints what it is as JSON.

usage: model_maker.py OUT BYTES
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

from llamafork.errors import LlamaforkError
from llamafork.synth import bench, layouts
from llamafork.synth.spec import ModelSpec, sized
from llamafork.synth.table import Role
from llamafork.synth.writer import write_model

# In the shape of Qwen3-30B-A3B, and one with small experts, so that a rehearsal computes little.
BIG = sized("qwen3moe", n_embd=2048, n_head=32, n_head_kv=4, head_dim=128, n_ff_exp=768, n_expert=128, n_expert_used=8,
            n_ctx_train=8192, vocab=16384, quant="Q4_K", bench=True, seed=1)  # fmt: skip
SMALL = replace(
    BIG, n_embd=256, n_head=4, n_head_kv=2, head_dim=64, n_ff_exp=256, n_expert=256, n_expert_used=4, vocab=512
)
FROM = 2 << 30  # bytes: smaller models have the small shape


def spec_for(size: int) -> ModelSpec:
    """A model of about *size* bytes, with layers in fours: a quarter of the experts is then whole layers."""
    base = BIG if size >= FROM else SMALL
    four, eight = (_bytes(replace(base, n_layer=count)) for count in (4, 8))
    fours = max(1, round((size - four) / (eight - four)) + 1)
    return replace(base, n_layer=4 * fours)


def _bytes(spec: ModelSpec) -> int:
    return sum(tensor.bytes for tensor in layouts.tensors(spec))


def main(out: str, size: str) -> int:
    spec = spec_for(int(size))
    try:
        made = write_model(spec, Path(out))
    except LlamaforkError as error:
        print("; ".join(filter(None, (error.what, error.why, error.do))), file=sys.stderr)
        return int(error.code)
    experts = sum(part.bytes for part in made.parts if part.role is Role.EXPERT)
    facts = {
        "name": spec.title,
        "bytes": made.bytes,
        "sha256": made.sha256,
        "expert_bytes": experts,
        "layers": spec.n_layer,
        "params": made.params,
        "active_params": made.active_params,
        "spec": asdict(spec),
        "lru_hit_rates": {f"{share:g}": round(rate, 4) for share, rate in bench.hit_rates(spec).items()},
    }
    print(json.dumps(facts))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
