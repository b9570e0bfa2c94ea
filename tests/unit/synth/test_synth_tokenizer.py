"""The vocabulary holds what upstream's BPE loader asks for."""

from __future__ import annotations

import pytest

from llamafork.synth import tokenizer
from llamafork.synth.tokenizer import CONTROL, MIN_VOCAB, STOP, UNUSED_TYPE, build, byte_letters


@pytest.mark.parametrize("size", [MIN_VOCAB, 512, 66_000])
def test_exact_size_and_distinct(size: int) -> None:
    made = build(size)
    assert len(made.tokens) == len(set(made.tokens)) == len(made.types) == len(made.scale) == size
    assert all(made.tokens)


@pytest.mark.parametrize("size", [MIN_VOCAB, 512, 66_000])
def test_every_merge_makes_a_token(size: int) -> None:
    made = build(size)
    known = set(made.tokens)
    assert made.merges
    for merge in made.merges:
        left, right = merge.split(" ")
        assert left in known
        assert right in known
        assert left + right in known


def test_letters_are_gpt2s() -> None:
    letters = byte_letters()
    assert len(set(letters.values())) == 256
    assert (letters[0x20], letters[0x0A], letters[0x00], letters[0x41], letters[0xAD]) == ("Ġ", "Ċ", "Ā", "A", "Ń")


def test_common_pairs_come_first() -> None:
    made = build(MIN_VOCAB + 99)
    assert {"Ġt", "th", "he", "Ġa", "in", "er"} <= set(made.tokens)
    assert not any(merge.endswith("Ġ") for merge in made.merges)


def test_control_tokens_are_last_and_typed() -> None:
    made = build(512)
    assert tuple(made.tokens[-3:]) == CONTROL
    assert made.types[-3:] == [tokenizer.CONTROL_TYPE] * 3
    assert [made.id_of(token) for token in CONTROL] == [509, 510, 511]


def test_only_readable_tokens_and_the_stop_are_loud() -> None:
    made = build(512)
    letters = {letter: byte for byte, letter in byte_letters().items()}
    for token, scale in zip(made.tokens[:-3], made.scale[:-3], strict=True):
        text = bytes(letters[letter] for letter in token)
        assert (scale == 1.0) == all(0x20 <= byte < 0x7F for byte in text)
    assert made.scale[made.id_of(STOP)] == 1.0
    assert made.scale[made.id_of(CONTROL[0])] < 0.1


def test_more_tokens_than_pairs_are_unused() -> None:
    made = build(66_000)
    assert made.types.count(UNUSED_TYPE) == 66_000 - 256 - 256 * 255 - 3


def test_template_is_chatml() -> None:
    for part in ("<|im_start|>", "<|im_end|>", "add_generation_prompt", "assistant"):
        assert part in tokenizer.CHAT_TEMPLATE
