"""The trained weights as a GGUF file that llama.cpp loads as glm4moe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from llamafork.synth import tokenizer
from train_model.network import Block, Config, Dense, Experts, Model

F32, Q8 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q8_0


def write(model: Model, path: Path, *, name: str, exact: bool = False) -> None:
    """*exact*: all in F32, to compare with the network; else matrices in Q8_0."""
    c = model.c
    out = gguf.GGUFWriter(str(path), "glm4moe")
    _metadata(out, c, name)
    put = _Putter(out, exact)
    put("token_embd.weight", model.embed.weight)
    put("output_norm.weight", model.norm.weight)
    for number, block in enumerate([*model.blocks, model.mtp_block]):
        assert isinstance(block, Block)
        _block(put, f"blk.{number}", block)
    last = f"blk.{c.layers}.nextn"
    put(f"{last}.eh_proj.weight", model.eh_proj.weight)
    put(f"{last}.enorm.weight", model.enorm.weight)
    put(f"{last}.hnorm.weight", model.hnorm.weight)
    put(f"{last}.shared_head_norm.weight", model.head_norm.weight)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


class _Putter:
    def __init__(self, out: Any, exact: bool) -> None:
        self.out, self.exact = out, exact

    def __call__(self, name: str, tensor: torch.Tensor) -> None:
        data: NDArray[np.float32] = tensor.detach().float().numpy()
        plain = self.exact or data.ndim == 1 or "ffn_gate_inp" in name
        if plain:
            self.out.add_tensor(name, np.ascontiguousarray(data))
        else:
            self.out.add_tensor(name, gguf.quants.quantize(data, Q8), raw_dtype=Q8)


def _block(put: _Putter, at: str, block: Block) -> None:
    put(f"{at}.attn_norm.weight", block.attn_norm.weight)
    put(f"{at}.post_attention_norm.weight", block.post_norm.weight)
    for letter in "qkv":
        put(f"{at}.attn_{letter}.weight", getattr(block.attn, letter).weight)
    put(f"{at}.attn_output.weight", block.attn.o.weight)
    if isinstance(block.ffn, Dense):
        for part in ("gate", "up", "down"):
            put(f"{at}.ffn_{part}.weight", getattr(block.ffn, part).weight)
        return
    moe: Experts = block.ffn
    put(f"{at}.ffn_gate_inp.weight", moe.router.weight)
    put(f"{at}.exp_probs_b.bias", moe.bias)
    for part in ("gate", "up", "down"):
        put(f"{at}.ffn_{part}_exps.weight", getattr(moe, part))
        put(f"{at}.ffn_{part}_shexp.weight", getattr(moe.shared, part).weight)


def _metadata(out: Any, c: Config, name: str) -> None:
    out.add_name(name)
    out.add_license("PSF-2.0 (trained on text that ships with Python)")
    out.add_block_count(c.layers + 1)
    out.add_nextn_predict_layers(1)
    out.add_context_length(c.context)
    out.add_embedding_length(c.embd)
    out.add_feed_forward_length(c.ff)
    out.add_head_count(c.heads)
    out.add_head_count_kv(c.kv_heads)
    out.add_key_length(c.head_dim)
    out.add_value_length(c.head_dim)
    out.add_layer_norm_rms_eps(c.eps)
    out.add_rope_dimension_count(c.head_dim)
    out.add_rope_freq_base(c.rope_base)
    out.add_expert_count(c.experts)
    out.add_expert_used_count(c.used)
    out.add_expert_feed_forward_length(c.ff_exp)
    out.add_expert_shared_count(1)
    out.add_leading_dense_block_count(c.dense)
    out.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    out.add_expert_weights_norm(True)
    out.add_expert_weights_scale(1.0)
    words = tokenizer.build(c.vocab)
    out.add_tokenizer_model(tokenizer.MODEL)
    out.add_tokenizer_pre(tokenizer.PRE)
    out.add_token_list(words.tokens)
    out.add_token_types(words.types)
    out.add_token_merges(words.merges)
    out.add_bos_token_id(words.id_of(tokenizer.END))
    out.add_eos_token_id(words.id_of(tokenizer.STOP))
    out.add_add_bos_token(False)
    out.add_chat_template(tokenizer.CHAT_TEMPLATE)
