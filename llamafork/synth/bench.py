"""Weights for measuring: any size quickly, and a router whose choices recur as ``--reuse`` and ``--skew`` say.

An embedding is one direction common to all tokens, plus that of the token's topic, plus the token's own; ``reuse``
sets how much of it is the topic. A router's row sees topic and token through random weights, and the common direction
through what makes expert number r of a random order weigh r to the power of minus ``skew``. The output matrix prefers
the topic of the last token, so that text sampled at temperature 1 stays with a topic. Everything else is one stretch
of random rows, repeated; what is added to the residual is small, so that routers see mostly the embedding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from llamafork.synth import layouts, weights
from llamafork.synth.table import Role, Tensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamafork.synth.spec import ModelSpec

    Floats = NDArray[np.float32]

TOPICS = 16
OWN = 257  # different rows for tokens of a topic; a prime, so that topics and rows meet in every combination
COMMON = 1.0  # of the direction all tokens have, where topic and token together have 1
QUIET = 0.05  # of what layers add to the residual
STAY = 0.95  # chance that the next token is of the same topic, at full reuse
SHARES = (0.125, 0.25, 0.5, 0.75)
TOKENS, LAYERS, WARM = 1024, 8, 128  # of the estimate: tokens and at most as many layers, the first tokens not counted
_ADDS = ("attn_output.weight", "ffn_down.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight", "ssm_out.weight")
_BIASES = ("attn_output.bias", "ffn_down_exps.bias")  # what else is added to the residual


def stream(spec: ModelSpec, tensor: Tensor, scale: Sequence[float]) -> Iterator[bytes]:
    """The tensor's bytes, piece by piece."""
    made = _special(spec, tensor, scale)
    if made is not None:
        yield from _tiled(_encode(tensor, made), tensor.bytes)
    elif tensor.role in (Role.NORM, Role.ROUTER) or tensor.name.endswith(_BIASES):  # norms of exactly 1, biases of 0
        yield from weights.stream(replace(tensor, std=0.0), spec.seed, scale)
    else:
        quiet = tensor.name.endswith(_ADDS)
        yield from _repeated(spec, replace(tensor, std=tensor.std * (QUIET if quiet else 1)))


def _special(spec: ModelSpec, tensor: Tensor, scale: Sequence[float]) -> Floats | None:
    if tensor.name == "token_embd.weight":
        return embeddings(spec)
    if tensor.name == "output.weight":
        return _outputs(spec, tensor, scale)
    if tensor.name.endswith("ffn_gate_inp.weight"):
        return router(spec, int(tensor.name.split(".")[1]))
    if tensor.role is Role.MTP:
        return _pass_on(spec)
    return None


def _encode(tensor: Tensor, values: Floats) -> bytes:
    from gguf import quants

    return weights.little_endian(quants.quantize(values, weights.ggml_type(tensor.type)))


def _repeated(spec: ModelSpec, tensor: Tensor) -> Iterator[bytes]:
    """Rows of one piece again and again, in a number that is prime: each expert begins at another of them."""
    width = tensor.shape[0]
    rows = tensor.params // width
    some = min(rows, prime(max(3, weights.CHUNK // 4 // width)))
    data = b"".join(weights.stream(replace(tensor, shape=(width, some), role=Role.ATTN), spec.seed, ()))
    yield from _tiled(data, tensor.bytes)


def _tiled(data: bytes, size: int) -> Iterator[bytes]:
    """*data* repeated up to *size* bytes, in pieces of some megabytes."""
    piece = data * max(1, (1 << 22) // len(data))
    whole, rest = divmod(size, len(piece))
    for _ in range(whole):
        yield piece
    yield (data * (rest // len(data) + 1))[:rest]


def prime(most: int) -> int:
    """The greatest prime up to *most* (at least 3)."""
    return next(n for n in range(most, 1, -1) if all(n % k for k in range(2, math.isqrt(n) + 1)))


def _draw(spec: ModelSpec, what: str, rows: int) -> Floats:
    found = weights.normal(weights.source(f"bench {what}", spec.seed), rows * spec.n_embd, 0.0, 1.0)
    return found.reshape(rows, spec.n_embd)


def _common(spec: ModelSpec) -> Floats:
    """Of unit root mean square, as are all directions here."""
    import numpy as np

    found = _draw(spec, "common", 1)
    return np.asarray(found / np.sqrt((found**2).mean()), dtype=np.float32)


def embeddings(spec: ModelSpec) -> Floats:
    """One row a token, or one period of them."""
    import numpy as np

    count = min(spec.vocab, TOPICS * OWN)
    tokens = np.arange(count)
    topic, own = _draw(spec, "topics", TOPICS), _draw(spec, "tokens", OWN)
    rows = math.sqrt(spec.reuse) * topic[tokens % TOPICS] + math.sqrt(1 - spec.reuse) * own[tokens % OWN]
    return np.asarray(rows + COMMON * _common(spec), dtype=np.float32)


def _pass_on(spec: ModelSpec) -> Floats:
    """An MTP block sees the token's embedding, not the hidden state: it mostly drafts what the model chooses."""
    import numpy as np

    found = np.zeros((spec.n_embd, 2 * spec.n_embd), dtype=np.float32)
    found[:, : spec.n_embd] = np.eye(spec.n_embd, dtype=np.float32)
    return found


def stay(spec: ModelSpec) -> float:
    """The chance that the next token is of the same topic."""
    return spec.reuse * STAY + (1 - spec.reuse) / TOPICS


def _outputs(spec: ModelSpec, tensor: Tensor, scale: Sequence[float]) -> Floats:
    import numpy as np

    count = min(spec.vocab, TOPICS * OWN)
    odds = math.log((TOPICS - 1) * stay(spec) / (1 - stay(spec)))
    ahead = odds * math.sqrt(1 + COMMON**2) / math.sqrt(spec.reuse) if spec.reuse else 0.0
    tokens = np.arange(count)
    rows = _draw(spec, "topics", TOPICS)[tokens % TOPICS] * (ahead / spec.n_embd)
    rows += _draw(spec, "outputs", OWN)[tokens % OWN] * np.float32(tensor.std)
    if count == spec.vocab:
        rows *= np.asarray(scale, dtype=np.float32)[:, None]
    return np.asarray(rows, dtype=np.float32)


def router(spec: ModelSpec, layer: int) -> Floats:
    """One row an expert: logits of deviation 1, plus the logarithm of the expert's weight."""
    import numpy as np

    common = _common(spec)[0]
    rows = _draw(spec, f"router {layer}", spec.n_expert) / math.sqrt(spec.n_embd)
    rows -= (rows @ common)[:, None] * common / spec.n_embd
    order = np.argsort(weights.source(f"bench order {layer}", spec.seed).random_raw(spec.n_expert))
    weight = -spec.skew * np.log1p(order.astype(np.float32))
    rows += (weight - weight.mean())[:, None] * common / (spec.n_embd * COMMON)
    return np.asarray(rows * math.sqrt(1 + COMMON**2), dtype=np.float32)


def choices(spec: ModelSpec) -> NDArray[np.int64]:
    """Experts of sampled tokens in layers with experts (at most LAYERS of them): layer, token, choice."""
    import numpy as np

    routed = [name for name in layouts.shapes(spec) if name.endswith("ffn_gate_inp.weight")]
    layers = [int(name.split(".")[1]) for name in routed]
    few = layers[:: -(-len(layers) // LAYERS)]
    seen = embeddings(spec)[_tokens(spec)]
    seen = seen / np.sqrt((seen**2).mean(axis=1, keepdims=True))
    logits = [seen @ router(spec, layer).T for layer in few]
    return np.stack([np.argsort(-one, axis=1)[:, : spec.n_expert_used] for one in logits])


def _tokens(spec: ModelSpec) -> NDArray[np.int64]:
    """A sampled text: topics are kept with the chance that the output matrix gives them, tokens of one are alike."""
    import numpy as np

    raw = weights.source("bench text", spec.seed).random_raw(3 * TOKENS).reshape(3, TOKENS)
    chance, change, which = raw / float(1 << 64)
    topic = 0
    found = np.empty(TOKENS, dtype=np.int64)
    count = min(spec.vocab, TOPICS * OWN)
    for i in range(TOKENS):
        if chance[i] >= stay(spec):
            topic = (topic + 1 + int(change[i] * (TOPICS - 1))) % TOPICS
        members = (count - topic + TOPICS - 1) // TOPICS
        found[i] = topic + TOPICS * int(which[i] * members)
    return found


def hit_rates(spec: ModelSpec) -> dict[float, float]:
    """For LRU caches of these parts of each layer's experts: the part of the choices that are hits."""
    from llamafork.trace import simulate

    found = {}
    layers = choices(spec).astype("uint16")
    for share in SHARES:
        slots = max(1, round(share * spec.n_expert))
        hits = sum(simulate.play(simulate.Lru(slots, spec.n_expert, uses), uses, WARM)[0] for uses in layers)
        found[share] = hits / layers[:, WARM:].size
    return found
