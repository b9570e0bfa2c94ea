"""The card of the trained model: what counts as reproduced."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from train_model import card, text

CARD = {"bits at 128": 1.7, "lru hits at 25% of slots": 0.5, "experts in effect": 20.0, "MTP accepted at depth 1": 0.7}


def test_the_same_numbers_are_fine() -> None:
    assert all(fine for *_, fine in card.against(CARD, CARD))


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("bits at 128", 1.73),
        ("lru hits at 25% of slots", 0.48),
        ("experts in effect", 21),
        ("MTP accepted at depth 1", 0.6),
    ],
)
def test_a_number_further_off_than_its_tolerance_is_not(what: str, value: float) -> None:
    assert [name for name, *_, fine in card.against({**CARD, what: value}, CARD) if not fine] == [what]


def test_a_number_that_one_side_lacks_is_off() -> None:
    missing = {name: value for name, value in CARD.items() if name != "bits at 128"}
    assert [name for name, *_, fine in card.against(missing, CARD) if not fine] == ["bits at 128"]
    assert [name for name, *_, fine in card.against(CARD, missing) if not fine] == ["bits at 128"]


def test_tokens_and_bytes_turn_into_each_other() -> None:
    data = "the ends e e  e é\n".encode()
    assert text.decode(np.array(text.encode(data))) == data
    assert text.SPACE_E in text.encode(data)


GOOD = {f"bits at {n}": 1.7 for n in card.LENGTHS} | {f"bits of a trigram model at {n}": 2.7 for n in card.LENGTHS}
GOOD |= {"lru hits at 25% of slots": 0.5, "lru hits at 50% of slots": 0.75}


def test_a_model_that_is_good_enough_falls_short_of_nothing() -> None:
    assert card.falls_short(GOOD, 8_000_000) == []


@pytest.mark.parametrize(
    ("what", "value"), [("bits at 2048", 1.81), ("lru hits at 25% of slots", 0.3), ("lru hits at 50% of slots", 0.6)]
)
def test_each_thing_it_must_be_is_asked_for(what: str, value: float) -> None:
    assert len(card.falls_short({**GOOD, what: value}, 8_000_000)) == 1
    assert len(card.falls_short(GOOD, 8_000_001)) == 1


def test_the_trigram_model_is_asked_about_the_same_tokens() -> None:
    """Second halves of whole windows of 8: tokens 5, 6, 7 and 13, 14, 15; those from 16 on are no whole window."""
    bits = np.arange(2, 20, dtype=float)  # each token's number, from token 2 on
    assert text.second_halves(bits, 8, first=2) == np.mean([5, 6, 7, 13, 14, 15])


def test_a_trigram_model_knows_what_it_has_seen() -> None:
    seen = text.encode(b"abcabcabcabc" * 50)
    assert text.trigram_bits(seen, seen).mean() < 0.1
    assert text.trigram_bits(seen, text.encode(b"zyxwvu")).mean() > 8
