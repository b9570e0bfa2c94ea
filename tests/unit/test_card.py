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
