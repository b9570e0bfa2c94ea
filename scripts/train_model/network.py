"""The network, operation for operation what llama.cpp's glm4moe graph computes, with one MTP block."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Config:
    vocab: int = 260
    embd: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    layers: int = 6  # of the trunk
    dense: int = 1  # leading layers without experts
    ff: int = 384
    experts: int = 32
    used: int = 4
    ff_exp: int = 64
    eps: float = 1e-5
    rope_base: float = 10000.0
    context: int = 2048


class Norm(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(c.embd))
        self.eps = c.eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rope(c: Config, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin [length, head_dim/2] of the NEOX kind over the whole head."""
    half = c.head_dim // 2
    angles = torch.arange(length)[:, None] * c.rope_base ** (-torch.arange(half) / half)[None, :]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    cos, sin = table
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.q = nn.Linear(c.embd, c.heads * c.head_dim, bias=False)
        self.k = nn.Linear(c.embd, c.kv_heads * c.head_dim, bias=False)
        self.v = nn.Linear(c.embd, c.kv_heads * c.head_dim, bias=False)
        self.o = nn.Linear(c.heads * c.head_dim, c.embd, bias=False)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        n, t, _ = x.shape
        c = self.c
        q = rotate(self.q(x).view(n, t, c.heads, c.head_dim).transpose(1, 2), table)
        k = rotate(self.k(x).view(n, t, c.kv_heads, c.head_dim).transpose(1, 2), table)
        v = self.v(x).view(n, t, c.kv_heads, c.head_dim).transpose(1, 2)
        share = c.heads // c.kv_heads
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(n, t, -1))


class Dense(nn.Module):
    def __init__(self, c: Config, ff: int) -> None:
        super().__init__()
        self.gate = nn.Linear(c.embd, ff, bias=False)
        self.up = nn.Linear(c.embd, ff, bias=False)
        self.down = nn.Linear(ff, c.embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Sigmoid router with a selection bias, weights of the chosen normalised; plus one shared expert."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.router = nn.Linear(c.embd, c.experts, bias=False)
        self.register_buffer("bias", torch.zeros(c.experts))  # moved by balance(), not by the optimiser
        std = c.embd**-0.5
        self.gate = nn.Parameter(torch.randn(c.experts, c.ff_exp, c.embd) * std)
        self.up = nn.Parameter(torch.randn(c.experts, c.ff_exp, c.embd) * std)
        self.down = nn.Parameter(torch.randn(c.experts, c.embd, c.ff_exp) * c.ff_exp**-0.5 * 0.5)
        self.shared = Dense(c, c.ff_exp)
        self.load = torch.zeros(c.experts)
        self.chosen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        c = self.c
        flat = x.reshape(-1, c.embd)
        probs = torch.sigmoid(self.router(flat))
        ids = torch.topk(probs + self.bias, c.used, dim=-1).indices
        weights = probs.gather(-1, ids)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=6.103515625e-5)
        self.chosen = ids.view(*x.shape[:-1], c.used)
        order = ids.reshape(-1).argsort(stable=True)
        counts = torch.bincount(ids.reshape(-1), minlength=c.experts)
        self.load = counts.float() / counts.sum()
        rows = order // c.used
        parts = flat[rows].split(counts.tolist())
        out = [F.linear(F.silu(F.linear(p, g)) * F.linear(p, u), d)
               for p, g, u, d in zip(parts, self.gate, self.up, self.down, strict=True)]  # fmt: skip
        mixed = torch.zeros_like(flat)
        mixed.index_add_(0, rows, torch.cat(out) * weights.reshape(-1)[order, None])
        return mixed.view_as(x) + self.shared(x)

    @torch.no_grad()
    def balance(self, step: float) -> None:
        """No expert starves: the bias of those used less than their share goes up, that of the others down."""
        self.bias += step * torch.sign(1 / self.c.experts - self.load)


class Block(nn.Module):
    def __init__(self, c: Config, *, dense: bool) -> None:
        super().__init__()
        self.attn_norm, self.post_norm = Norm(c), Norm(c)
        self.attn = Attention(c)
        self.ffn: Dense | Experts = Dense(c, c.ff) if dense else Experts(c)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attn(self.attn_norm(x), table)
        return x + self.ffn(self.post_norm(x))


class Model(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.c = c
        self.embed = nn.Embedding(c.vocab, c.embd)
        nn.init.normal_(self.embed.weight, std=0.05)
        self.blocks = nn.ModuleList(Block(c, dense=i < c.dense) for i in range(c.layers))
        self.norm = Norm(c)
        self.enorm, self.hnorm, self.head_norm = Norm(c), Norm(c), Norm(c)
        self.eh_proj = nn.Linear(2 * c.embd, c.embd, bias=False)
        self.mtp_block = Block(c, dense=False)

    def trunk(self, tokens: Tensor) -> Tensor:
        """[n, t] to the hidden state after the output norm, [n, t, embd]."""
        x = self.embed(tokens)
        table = rope(self.c, tokens.shape[1])
        for block in self.blocks:
            x = block(x, table)
        return self.norm(x)

    def logits(self, h: Tensor) -> Tensor:
        return F.linear(h, self.embed.weight)

    def mtp(self, h: Tensor, following: Tensor) -> Tensor:
        """Hidden state that predicts the token after *following*, from *h* and the embedding of *following*."""
        both = torch.cat((self.enorm(self.embed(following)), self.hnorm(h)), dim=-1)
        x = self.eh_proj(both)
        return self.head_norm(self.mtp_block(x, rope(self.c, following.shape[1])))

    def experts(self) -> list[Experts]:
        blocks = [*self.blocks, self.mtp_block]
        return [block.ffn for block in blocks if isinstance(block.ffn, Experts)]
