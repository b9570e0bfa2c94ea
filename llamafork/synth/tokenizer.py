"""A byte-level BPE tokenizer that upstream loads as ``gpt2``/``qwen2``, and a ChatML template.

Token ids: 256 bytes, then two-byte tokens (each with its merge) as far as the vocabulary goes, then unused ones if
it goes further than all pairs, and the control tokens last.
"""

from __future__ import annotations

from dataclasses import dataclass

MODEL, PRE = "gpt2", "qwen2"
END, START, STOP = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL = (END, START, STOP)
MIN_VOCAB = 256 + 1 + len(CONTROL)  # upstream wants a merge list, and gguf-py leaves empty arrays out

NORMAL_TYPE, CONTROL_TYPE, UNUSED_TYPE = 1, 3, 5  # llama_token_type of llama.h

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Bytes in the order in which their pairs become tokens: a space, then letters by how often English uses them.
_COMMON = b" etaoinshrdlucmfwypvbgkjqxz"
_ORDER = _COMMON + bytes(b for b in range(256) if b not in _COMMON)
SILENT = 0.05  # output scale of tokens that would not be readable text


@dataclass(frozen=True)
class Vocabulary:
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scale: list[float]  # per token, for the rows of the output matrix

    def id_of(self, control: str) -> int:
        return len(self.tokens) - len(CONTROL) + CONTROL.index(control)


def byte_letters() -> dict[int, str]:
    """GPT-2's printable letter for every byte: itself where printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {b: chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)}


def build(size: int) -> Vocabulary:
    """A vocabulary of exactly *size* tokens (at least :data:`MIN_VOCAB`)."""
    letter = byte_letters()
    pairs = _pairs(size - 256 - len(CONTROL))
    plain = [letter[b] for b in range(256)] + [letter[a] + letter[b] for a, b in pairs]
    unused = [f"[UNUSED_{i}]" for i in range(size - len(plain) - len(CONTROL))]
    readable = [_readable(b) for b in range(256)] + [_readable(a) and _readable(b) for a, b in pairs]
    return Vocabulary(
        [*plain, *unused, *CONTROL],
        [NORMAL_TYPE] * len(plain) + [UNUSED_TYPE] * len(unused) + [CONTROL_TYPE] * len(CONTROL),
        [f"{letter[a]} {letter[b]}" for a, b in pairs],
        [1.0 if yes else SILENT for yes in readable]
        + [SILENT] * len(unused)
        + [1.0 if token == STOP else SILENT for token in CONTROL],
    )


def _pairs(count: int) -> list[tuple[int, int]]:
    """The first *count* byte pairs, common ones first. The pre-tokenizer splits before a space, so none ends in one."""
    found: list[tuple[int, int]] = []
    for total in range(2 * len(_ORDER) - 1):
        for i in range(max(0, total - 255), min(total, 255) + 1):
            if len(found) >= count:
                return found
            if _ORDER[total - i] != 0x20:
                found.append((_ORDER[i], _ORDER[total - i]))
    return found


def _readable(byte: int) -> bool:
    return 0x20 <= byte < 0x7F
