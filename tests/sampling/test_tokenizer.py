"""Tokenizers: round trips, control tokens, characters split over tokens."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpost.sampling.tokenizer import characters


def test_characters_numbers_the_alphabet_after_three_control_tokens():
    tokenizer = characters("01+=")
    assert tokenizer.encode("1+0=") == [4, 5, 3, 6]
    assert tokenizer.vocab_size == 7
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.stop_ids) == (0, 1, (2,))
    assert tokenizer.decode([1, 4, 2, 0]) == "1"
    assert tokenizer.decode([1, 4, 2], special=True) == "<bos>1<eos>"
    assert tokenizer.encode("<bos>1", special=True) == [1, 4]


@given(st.text("ab<eos>é中🙂"))
def test_characters_round_trip(text):
    tokenizer = characters("ab<eos>é中🙂")
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert min(ids, default=3) >= 3
    assert tokenizer.decode(ids) == text


def test_characters_errors_name_the_cause():
    with pytest.raises(ValueError, match="'x' of '1x' is not in the alphabet"):
        characters("01").encode("1x")
    with pytest.raises(ValueError, match=r"\['1'\] more than once"):
        characters("011")
    with pytest.raises(ValueError, match="-1 is negative"):
        characters("01").decode([-1])


def test_an_id_beyond_the_vocabulary_is_shown_as_unreadable():
    assert characters("01").decode([3, 99]) == "0\ufffd"


@pytest.mark.parametrize("array", [np.array, jnp.array])
def test_ids_may_be_an_array(array):
    tokenizer = characters("01")
    assert tokenizer.decode(array([1, 3, 4, 2])) == "01"
    assert list(tokenizer.stream(array([3, 4]))) == ["0", "1", ""]
