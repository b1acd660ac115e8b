"""Rewards made of rewards, and rewards for form."""

import numpy as np
import pytest

from rlpost.data import Task
from rlpost.rewards import (
    Sample,
    finished,
    format_match,
    gate,
    overlong,
    reward_of,
    weighted,
)
from tests.conformance import case

NAN = np.nan


def samples(count):
    return [Sample(task=Task("?", id=str(i)), text=str(i)) for i in range(count)]


def fixed(*values, name="x"):
    """A reward that gives sample i the i-th value."""

    def reward(samples):
        chosen = [values[int(sample.text)] for sample in samples]
        return {name: np.array(chosen, np.float32)}

    return reward


def test_weighted_sum():
    reward = weighted({"a": (2.0, fixed(1, 0)), "b": (-0.5, fixed(1, 1))})
    parts = reward(samples(2))
    np.testing.assert_allclose(parts["reward"], [1.5, -0.5])
    np.testing.assert_allclose(parts["a"], [1, 0])
    np.testing.assert_allclose(parts["b"], [1, 1])
    assert parts["reward"].dtype == np.float32


def test_nan_in_a_part_of_weight_0_does_not_poison_the_sum():
    known = case("unscorable_reward_excluded_from_baseline")["inputs"]

    def floats(values):
        return [NAN if value is None else value for value in values]

    reward = weighted(
        {
            "main": (1.0, fixed(*floats(known["rewards"]))),
            "metric": (0.0, fixed(*floats(known["extra_metric_with_weight_0"]))),
        }
    )
    parts = reward(samples(4))
    np.testing.assert_array_equal(parts["reward"], [1, NAN, 0, 1])
    np.testing.assert_allclose(parts["metric"], [NAN, NAN, 0.2, 0.1])


def test_weighted_names_the_parts_of_parts():
    inner = weighted({"p": (1.0, fixed(1)), "q": (1.0, fixed(2))})
    parts = weighted({"inner": (10.0, inner)})(samples(1))
    assert {name: float(value[0]) for name, value in parts.items()} == {
        "reward": 30,
        "inner": 3,
        "inner/reward": 3,
        "inner/p": 1,
        "inner/q": 2,
    }


def test_weighted_errors():
    with pytest.raises(ValueError, match="at least one"):
        weighted({})
    with pytest.raises(ValueError, match="may not be called 'reward'"):
        weighted({"reward": (1.0, fixed(1))})
    with pytest.raises(ValueError, match="'a' must be finite, got nan"):
        weighted({"a": (NAN, fixed(1))})


def test_gate_asks_only_those_that_pass():
    asked = []

    def judge(samples):
        asked.extend(sample.text for sample in samples)
        return {"judge": np.full(len(samples), 0.7, np.float32)}

    parts = gate(fixed(1, 0, NAN, 0.2), judge, closed=-1.0)(samples(4))
    np.testing.assert_allclose(parts["reward"], [0.7, -1, NAN, 0.7])
    np.testing.assert_allclose(parts["gate"], [1, 0, NAN, 1])
    np.testing.assert_allclose(parts["judge"], [0.7, NAN, NAN, 0.7])
    assert asked == ["0", "3"]
    closed = gate(fixed(0), judge)(samples(1))
    assert set(closed) == {"reward", "gate"}
    assert reward_of(closed) == [0]


def test_format_match():
    reward = format_match(r"<think>.*</think>\s*<answer>[^<]*</answer>")
    texts = [
        " <think>a\nb</think>\n<answer>4</answer>\n",
        "<think>a</think><answer>4</answer> and so",
        "4",
    ]
    batch = [Sample(task=Task("?"), text=text) for text in texts]
    np.testing.assert_array_equal(reward_of(reward(batch)), [1, 0, 0])
    with pytest.raises(ValueError, match="not a regular expression"):
        format_match("(")


def test_overlong_falls_linearly_to_the_limit():
    # limit 10, margin 4: free up to 6 tokens, -1/4 a token from there, -1 from 10 on.
    sizes = [0, 6, 7, 9, 10, 15]
    batch = [Sample(task=Task("?"), text="", response_ids=[1] * n) for n in sizes]
    penalty = reward_of(overlong(10, 4)(batch))
    np.testing.assert_allclose(penalty, [0, 0, -0.25, -0.75, -1, -1])
    step = reward_of(overlong(10, 0)(batch))
    np.testing.assert_allclose(step, [0, 0, 0, 0, 0, -1])
    with pytest.raises(ValueError, match="0 <= margin <= limit"):
        overlong(4, 5)


def test_finished_opens_a_gate():
    cut = Sample(task=Task("?"), text="0", finished=False, truncated=True)
    whole = Sample(task=Task("?"), text="0")
    np.testing.assert_array_equal(
        reward_of(gate(finished, fixed(0.5))([cut, whole])), [0, 0.5]
    )
