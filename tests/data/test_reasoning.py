"""Tasks of reasoning-gym: repeatable, JSON-able, and errors that help."""

import json
import warnings

import pytest

from rlpost.data import reasoning, without


def test_tasks_depend_on_family_seed_and_index_alone():
    first = reasoning("chain_sum", size=10, seed=3, min_terms=2, max_terms=2)
    second = reasoning("chain_sum", size=10, seed=3, max_terms=2, min_terms=2)
    assert [first[i] for i in (7, 0)] == [second[i] for i in (7, 0)]
    assert first[0].prompt != reasoning("chain_sum", size=10, seed=4)[0].prompt
    assert first[7].id == "chain_sum/7"
    json.dumps(first[0].data)
    with pytest.raises(IndexError, match="has 10 tasks, asked for 10"):
        first[10]


def test_terms_are_what_was_asked_for():
    source = reasoning("chain_sum", size=5, min_terms=2, max_terms=2, max_digits=1)
    for i in range(5):
        task = source[i]
        question = task.prompt.partition(":")[2].replace("=", "").strip(" ?")
        assert eval(question) == int(task.answer)


@pytest.mark.parametrize(
    ("family", "parameters", "message"),
    [
        ("chain_sums", {}, "no family 'chain_sums'; did you mean chain_sum"),
        ("chain_sum", {"min_term": 2}, "'min_term'; did you mean min_terms"),
        ("chain_sum", {"min_terms": 0}, "refuses"),
        ("chain_sum", {"min_terms": {1}}, "must be JSON"),
    ],
)
def test_errors(family, parameters, message):
    with pytest.raises(ValueError, match=message):
        reasoning(family, **parameters)


def test_families_that_do_not_repeat_are_told(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.warns(UserWarning, match="PYTHONHASHSEED=0"):
        reasoning("ransom_note")
    with pytest.warns(UserWarning, match="take another"):
        reasoning("list_functions")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        reasoning("ransom_note")
        reasoning("chain_sum")


def test_without_keeps_a_test_set_apart():
    # Sums of two digits 1..9: so few that two seeds share many.
    options = {"min_terms": 2, "max_terms": 2, "max_digits": 1, "size": 40}
    train = reasoning("chain_sum", seed=0, **options)
    other = reasoning("chain_sum", seed=1, **options)
    trained = [train[i] for i in range(40)]
    prompts = {task.prompt for task in trained}
    assert any(other[i].prompt in prompts for i in range(40))
    test = without(other, trained)
    assert test
    assert not prompts & {task.prompt for task in test}
    assert len({task.prompt for task in test}) == len(test)
    assert without(other, trained, size=3) == test[:3]
