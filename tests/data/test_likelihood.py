"""Rows to learn by likelihood: what is learnt, and packing without a seam."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpost.data import Task
from rlpost.data.likelihood import Row, answer_row, pack, padded
from rlpost.sampling.tokenizer import characters
from rlpost.types import check_batch
from tests.conformance import case

TOKENIZER = characters("0123456789+=")  # <pad> <bos> <eos> 0 ...: "1" is 4


def row(*tokens):
    return Row(tokens, [True] * len(tokens))


def test_only_the_answer_and_its_end_are_learnt():
    made = answer_row(TOKENIZER, Task("1+1=", "2"))
    assert list(made.tokens) == [1, 4, 13, 4, 14, 5, 2]
    assert list(made.mask) == [False] * 5 + [True, True]
    assert list(answer_row(TOKENIZER, Task("1", "2"), stop=False).tokens) == [1, 4, 5]
    with pytest.raises(ValueError, match="'t' has no answer"):
        answer_row(TOKENIZER, Task("1", id="t"))


def test_padded_rows():
    batch = padded([Row([5, 6, 7], [0, 1, 1]), row(8)], 4, pad_id=9)
    check_batch(batch)
    np.testing.assert_array_equal(batch.tokens, [[5, 6, 7, 9], [8, 9, 9, 9]])
    np.testing.assert_array_equal(batch.mask, [[0, 1, 1, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(batch.length, [3, 1])


def test_packed_next_token_labels():
    known = case("packed_next_token_labels")
    ids, cuts = known["inputs"]["packed_token_ids"], known["inputs"]["cu_seqlens"]
    sequences = [ids[a:b] for a, b in itertools.pairwise(cuts)]
    packed = pack([row(*ids) for ids in sequences], len(ids))
    expected = known["expected"]
    np.testing.assert_array_equal(packed.tokens, [ids])
    np.testing.assert_array_equal(packed.positions, [expected["position_ids"]])
    np.testing.assert_array_equal(packed.segment, [[1, 1, 1, 2, 2]])
    # The case counts a label at the token before it; here it is at its own token.
    label_mask = expected["label_mask"]
    np.testing.assert_array_equal(packed.mask, [[0, *label_mask[:-1]]])
    labels = [label for label in expected["labels"] if label is not None]
    assert list(packed.tokens[packed.mask]) == labels


def test_first_row_with_room():
    packed = pack([row(1, 1, 1), row(2, 2), row(3), row(4, 4)], 4)
    np.testing.assert_array_equal(packed.tokens, [[1, 1, 1, 3], [2, 2, 4, 4]])
    np.testing.assert_array_equal(packed.segment, [[1, 1, 1, 2], [1, 1, 2, 2]])
    batch = packed.batch()
    check_batch(batch)
    np.testing.assert_array_equal(batch.length, [4, 4])


sequences = st.lists(st.integers(1, 50), min_size=1, max_size=8)


@given(st.lists(sequences, min_size=1, max_size=12), st.integers(8, 20))
def test_packing_loses_and_mixes_nothing(all_tokens, length):
    packed = pack([row(*tokens) for tokens in all_tokens], length)
    found = []
    for b in range(len(packed.tokens)):
        for number in range(1, packed.segment[b].max() + 1):
            inside = packed.segment[b] == number
            found.append(packed.tokens[b][inside].tolist())
            size = inside.sum()
            np.testing.assert_array_equal(packed.positions[b][inside], np.arange(size))
            np.testing.assert_array_equal(packed.mask[b][inside], np.arange(size) > 0)
    assert sorted(found) == sorted(all_tokens)
    empty = packed.segment == 0
    assert not packed.mask[empty].any()
    assert (packed.positions[empty] == -1).all()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(1, 2, 3)], "row 0 has 3 tokens, a row holds 1 to 2"),
        ([row(1), row()], "row 1 has 0 tokens"),
        ([Row([1, 2], [True])], "2 tokens but 1 in its mask"),
    ],
)
def test_errors(rows, message):
    for layout in (pack, padded):
        with pytest.raises(ValueError, match=message):
            layout(rows, 2)
    with pytest.raises(ValueError, match="no rows"):
        pack([], 2)
