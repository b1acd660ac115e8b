"""Splitting on the host: nothing lost, nothing twice, units whole, few shapes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.training.microbatches import length_buckets, split, stack
from rlpost.types import Batch


def make(lengths, longest, unit=None):
    slots = np.arange(longest)
    rows = len(lengths)
    return Batch(
        mask=(slots >= 1) & (slots < np.array(lengths)[:, None]),
        tokens=np.arange(rows * longest, dtype=np.int32).reshape(rows, longest),
        reward=np.arange(rows, dtype=np.float32),
        unit=None if unit is None else np.array(unit, np.int32),
        extras={"per_slot": np.ones((rows, longest)), "per_row": np.arange(rows)},
    )


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    rows=st.integers(4, 9),
    units=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_learned_row_appears_once_in_a_shape_of_few(lengths, rows, units, seed):
    rng = np.random.default_rng(seed)
    unit = rng.permutation(np.arange(len(lengths)) // 3) if units else None
    data = make(lengths, 40, unit)
    parts = split(data, rows=rows, buckets=[8, 16])
    seen, shapes = [], set()
    for part in parts:
        assert part.mask.shape[0] == rows
        shapes.add(part.mask.shape)
        assert part.extras["per_slot"].shape == part.mask.shape
        real = part.mask.any(axis=1)
        for row in np.flatnonzero(real):
            original = int(part.reward[row])
            seen.append(original)
            size = part.mask.shape[1]
            np.testing.assert_array_equal(part.mask[row], data.mask[original][:size])
            assert not data.mask[original][size:].any()
            np.testing.assert_array_equal(
                part.tokens[row], data.tokens[original][:size]
            )
    assert sorted(seen) == [i for i, n in enumerate(lengths) if n > 1]
    assert len(shapes) <= 3
    if units:  # no unit in two microbatches
        homes = [set(p.unit[p.mask.any(axis=1)].tolist()) for p in parts]
        assert sum(map(len, homes)) == len(set().union(*homes))


def test_long_rows_share_a_microbatch():
    # Lengths 3, 30, 4, 31 in twos: the short ones at 8 slots, the long ones at 40.
    parts = split(make([3, 30, 4, 31], 40), rows=2, buckets=[8])
    assert [p.mask.shape for p in parts] == [(2, 8), (2, 40)]
    assert [p.reward.tolist() for p in parts] == [[0.0, 2.0], [1.0, 3.0]]


def test_fillers_learn_nothing_and_belong_to_no_unit():
    (part,) = split(make([3, 3, 3], 8, unit=[7, 7, 9]), rows=4)
    assert part.mask[3].sum() == 0
    assert part.unit.tolist() == [7, 7, 9, -1]


def test_a_batch_with_nothing_to_learn_is_one_empty_microbatch():
    (part,) = split(make([0, 1, 0], 8), rows=2)
    assert part.mask.shape[0] == 2
    assert not part.mask.any()


def test_a_unit_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match="unit of 3 rows .* at least 3"):
        split(make([5, 5, 5], 8, unit=[0, 0, 0]), rows=2)
    with pytest.raises(ValueError, match="at least one row"):
        split(make([5], 8), rows=0)


def test_stack_leads_with_the_microbatch():
    parts = split(make([5, 5, 5, 5], 8), rows=2)
    assert stack(parts).mask.shape == (2, 2, 8)


def test_buckets_by_hand():
    assert length_buckets(200) == (32, 48, 64, 96, 128, 192, 200)
    assert length_buckets(20) == (20,)


def test_few_prompts_share_the_shape_of_more():
    # 64 rows of 1 or 3 prompts: both computed as 4, a 16th of the rows.
    for count in (1, 3):
        tokens = np.zeros((64, 40), np.int32)
        tokens[:, 0] = np.arange(64) % count
        mask = np.broadcast_to(np.arange(40) >= 32, (64, 40))
        (part,) = split(Batch(mask=mask, tokens=tokens), rows=64, share=True)
        assert part.shared.prompts == 4
