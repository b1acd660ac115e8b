"""The procedural sums: right answers, disjoint splits, the same in every process."""

import subprocess
import sys

import pytest

from rlpost.data import ALPHABET, sums


def texts(**options):
    source = sums(**options)
    return [source[i].prompt for i in range(len(source))]


@pytest.mark.parametrize("operator", "+-*")
def test_answers(operator):
    source = sums(digits=1, operands=3, operator=operator)
    for i in range(0, len(source), 37):
        task = source[i]
        assert int(task.answer) == eval(task.prompt[:-1])
        assert set(task.prompt + task.answer) <= set(ALPHABET)


def test_splits_are_disjoint_and_complete():
    train, test = texts(), texts(split="test")
    assert len(train) + len(test) == 100
    assert 10 <= len(test) <= 30
    # 3+4 and 4+3 are one fact: both in train, or both in test.
    mirrored = {"+".join(reversed(text[:-1].split("+"))) + "=" for text in train}
    assert mirrored == set(train)
    assert not set(train) & set(test)


def test_drawn_tasks_keep_to_their_split():
    for digits in (2, 4):  # listed, and too many to list
        drawn = [
            set(texts(digits=digits, size=300, split=split, seed=1))
            for split in ("train", "test")
        ]
        assert not drawn[0] & drawn[1]
    assert texts(digits=2, size=5, seed=1) != texts(digits=2, size=5, seed=2)


def test_the_same_in_every_process():
    # Strings hash differently from process to process; the split must not.
    code = "from rlpost.data import sums; s = sums(split='test'); "
    code += "print([s[i].id for i in range(len(s))])"
    outs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outs) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"operator": "/"}, "operator must be"),
        ({"split": "dev"}, "split must be"),
        ({"held_out": 1.5}, "held_out must be"),
        ({"digits": 0}, "digits >= 1"),
        ({"digits": 4}, "give a size"),
        ({"held_out": 0.0, "split": "test"}, "all but empty"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        sums(**options)
