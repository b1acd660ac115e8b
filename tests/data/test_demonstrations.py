"""Demonstrations: a prompt pipeline whose tasks come with their answers."""

import numpy as np

from rlpost.data import Prompts, sums
from rlpost.data.demonstrations import Demonstrations
from rlpost.data.sums import ALPHABET
from rlpost.sampling.tokenizer import characters

TOKENIZER = characters(ALPHABET)


def made():
    return Demonstrations(Prompts(sums(), batch_size=4), TOKENIZER, length=9)


def test_the_answers_are_on_the_mask():
    batch = next(made())
    assert batch.tokens.shape == (4, 9)
    for tokens, mask in zip(batch.tokens, np.asarray(batch.mask), strict=True):
        question, answer = TOKENIZER.decode(tokens).split("=")
        assert int(answer) == eval(question)
        assert TOKENIZER.decode(tokens[mask], special=True) == f"{answer}<eos>"


def test_a_resumed_stream_goes_on():
    whole, other = made(), made()
    next(whole)
    other.set_state(whole.get_state())
    np.testing.assert_array_equal(next(whole).tokens, next(other).tokens)
