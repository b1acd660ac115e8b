"""Exact and numeric matches against the reference answer."""

from decimal import Decimal
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpost.data import Task
from rlpost.rewards import (
    Sample,
    exact_match,
    final_number,
    last_number,
    number_match,
    reward_of,
)


def samples(answer, *texts):
    return [Sample(task=Task("?", answer), text=text) for text in texts]


def test_exact_match():
    parts = exact_match(samples("7", "7", " 7\n", "7.", "", "17"))
    np.testing.assert_array_equal(reward_of(parts), [1, 1, 0, 0, 0])
    assert parts["exact"].dtype == np.float32


def test_exact_match_of_what_is_extracted():
    def tagged(text):
        return text.partition("<a>")[2] or None

    reward = partial(exact_match, extract=tagged)
    np.testing.assert_array_equal(
        reward_of(reward(samples("7", "so <a>7", "7"))), [1, 0]
    )


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3+4=7", "7"),
        ("3-4", "4"),
        ("it is -4.", "-4"),
        ("= 1,234.50 dollars", "1234.5"),
        ("1,2", "2"),
        ("1,2345", "2345"),
        ("#### 42", "42"),
        ("x4 is no number, .5 is", "0.5"),
        ("2e3", "2000"),
        ("1e99999", "1"),
        ("**12**", "12"),
        ("\\boxed{-3}", "-3"),
        ("none", None),
        ("a. b.", None),
    ],
)
def test_last_number(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3))
def test_any_plain_number_is_read_whole(number):
    assert last_number(f"so it is {number:,f} then") == number
    assert last_number(f"{number:f}") == number


def test_number_match():
    batch = samples("#### 1,000", "1000.0", "about 1000.5", "1 000", "nothing")
    np.testing.assert_array_equal(reward_of(number_match(batch)), [1, 0, 0, 0])
    loose = number_match(batch, tolerance=0.5)
    np.testing.assert_array_equal(reward_of(loose), [1, 1, 0, 0])


def test_a_task_without_its_answer_is_an_error_and_not_a_zero():
    with pytest.raises(ValueError, match="no answer"):
        exact_match(samples(None, "7"))
    with pytest.raises(ValueError, match="holds no number: 'seven'"):
        number_match(samples("seven", "7"))


def test_several_parts_need_one_called_reward():
    with pytest.raises(ValueError, match="called 'reward'"):
        reward_of({"a": np.zeros(1), "b": np.zeros(1)})


def test_a_sample_survives_json():
    import json

    sample = Sample(
        task=Task(({"role": "user", "content": "?"},), "7", {"n": [1]}, "t1"),
        text="é",
        response_ids=np.array([1, 2], np.int32),
        truncated=np.bool_(True),
    )
    back = Sample.from_json(json.loads(json.dumps(sample.to_json())))
    assert back.task.data == {"n": [1]}
    assert back.text == "é"
    assert list(back.response_ids) == [1, 2]
    assert back.truncated is True


def test_final_number_asks_for_an_end_too():
    task = Task("2+2=", "4")
    samples = [
        Sample(task=task, text="it is 4"),
        Sample(task=task, text="it is 4", finished=False),
        Sample(task=task, text="4 or 5"),
    ]
    parts = final_number(samples)
    np.testing.assert_array_equal(parts["reward"], [1, 0, 0])
    np.testing.assert_array_equal(parts["gate"], [1, 0, 1])
