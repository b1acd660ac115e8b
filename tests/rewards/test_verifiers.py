"""Other people's verifiers, called from threads and processes."""

import json
import threading
import warnings
from functools import partial

import numpy as np
import pytest

from rlpost.data import Task, reasoning
from rlpost.rewards import (
    RewardPool,
    Sample,
    last_number,
    math_equal,
    reasoning_score,
    reward_of,
)


def math_samples(*pairs):
    return [Sample(task=Task("?", answer, id="m"), text=text) for answer, text in pairs]


PAIRS = [
    ("1/2", "so it is $0.5$"),
    ("\\frac{1}{2}", "\\boxed{\\frac{2}{4}}"),
    ("12", "The answer is 12."),
    ("12", "The answer is 13."),
    ("x^2+2x+1", "$(x+1)^2$"),
    ("12", "I do not know"),
]
EQUAL = [1, 1, 1, 0, 1, 0]


def test_math_equal():
    np.testing.assert_array_equal(reward_of(math_equal(math_samples(*PAIRS))), EQUAL)


def test_math_equal_in_a_thread():
    # With its own time limits on, signals make it fail anywhere but in a main thread.
    found = []
    thread = threading.Thread(
        target=lambda: found.append(math_equal(math_samples(*PAIRS)))
    )
    thread.start()
    thread.join()
    np.testing.assert_array_equal(reward_of(found[0]), EQUAL)


@pytest.mark.parametrize("threads", [False, True])
def test_math_equal_in_a_pool(threads):
    with RewardPool(math_equal, workers=1, threads=threads) as pool:
        np.testing.assert_array_equal(pool(math_samples(*PAIRS))["math"], EQUAL)


def test_math_equal_needs_an_expression():
    with pytest.raises(ValueError, match="is no expression: ''"):
        math_equal(math_samples(("", "1")))


def over_json(task):
    values = {"prompt": task.prompt, "answer": task.answer, "data": task.data}
    return Task(**json.loads(json.dumps(values)))


@pytest.mark.parametrize(
    "family", ["chain_sum", "countdown", "arc_1d", "rearc", "number_sorting", "maze"]
)
def test_a_familys_own_answer_scores_one(family):
    source = reasoning(family, size=3, seed=1)
    tasks = [over_json(source[i]) for i in range(3)]
    batch = [Sample(task=task, text=f" {task.answer}\n") for task in tasks]
    wrong = [Sample(task=task, text="none of these") for task in tasks]
    assert (reward_of(reasoning_score(batch)) == 1).all()
    assert (reward_of(reasoning_score(wrong)) < 0.2).all()


@pytest.mark.slow
def test_every_family_scores_alike_after_its_task_crossed_a_pipe():
    from reasoning_gym import factory

    for family in sorted(factory.DATASETS):
        parameters = {}
        if family == "composite":
            parts = [{"name": "gcd", "weight": 1.0, "config": {}}]
            parameters = {"datasets": parts}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            source = reasoning(family, size=2, **parameters)
            task = source[0]
            if family == "list_functions":  # makes another entry at every call
                continue
            entry = source.dataset[0]
            for answer in (entry["answer"], "7"):
                try:
                    wanted = source.dataset.score_answer(answer, entry)
                except Exception:  # some scorers cannot take every answer
                    continue
                sample = Sample(task=over_json(task), text=answer or "")
                same = partial(reasoning_score, extract=lambda _, a=answer: a)
                assert reward_of(same([sample])) == np.float32(wanted), family


def test_the_answer_is_extracted_first():
    source = reasoning("chain_sum", size=1, seed=0)
    task = source[0]
    sample = Sample(task=task, text=f"It is {task.answer}, I think.")
    assert reward_of(reasoning_score([sample])) < 1
    number = partial(reasoning_score, extract=lambda text: str(last_number(text)))
    assert reward_of(number([sample])) == 1


def test_a_task_of_another_source_is_refused():
    with pytest.raises(ValueError, match="does not come from reasoning-gym"):
        reasoning_score([Sample(task=Task("?", id="t"), text="1")])
