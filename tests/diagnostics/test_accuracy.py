"""pass@k against enumeration, and the constant answer by hand."""

import itertools

import numpy as np
import pytest

from rlpost.diagnostics import constant_answer, pass_at_k


@pytest.mark.parametrize("k", [1, 2, 4])
def test_pass_at_k_equals_enumerating_all_choices(k):
    correct = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]])
    expected = np.mean(
        [
            np.mean(
                [max(row[list(pick)]) for pick in itertools.combinations(range(4), k)]
            )
            for row in correct
        ]
    )
    assert pass_at_k(correct, k) == pytest.approx(expected)


def test_answers_that_could_not_be_scored_count_nowhere():
    # Prompt 0 has 1 of 2 scored answers right; prompt 1 has none scored.
    correct = [[1, np.nan, 0], [np.nan] * 3]
    assert pass_at_k(correct, 1) == pytest.approx(0.5)
    assert pass_at_k(correct, 2) == pytest.approx(1.0)
    assert np.isnan(pass_at_k(correct, 3))
    with pytest.raises(ValueError, match="prompts, answers"):
        pass_at_k([1, 0], 1)


def test_the_constant_is_chosen_on_what_is_known():
    assert constant_answer(["7", "9", "7"], ["9", "9", "7", "1"]) == ("7", 0.25)
    with pytest.raises(ValueError, match="held-out"):
        constant_answer(["7"], [])
