"""The order of prompts: epochs, shares of processes, and exact resumption."""

import functools
import json
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.data import Prompts, Task
from tests.conformance import case


def tasks(count):
    return [Task(str(i), id=str(i)) for i in range(count)]


def ids(batches):
    return [[int(task.id) for task in batch] for batch in batches]


def test_every_epoch_is_the_whole_source_in_another_order():
    batches = ids(Prompts(tasks(12), batch_size=4, epochs=3, seed=5))
    assert [len(batch) for batch in batches] == [4] * 9
    epochs = np.reshape(batches, (3, 12))
    for epoch in epochs:
        assert sorted(epoch) == list(range(12))
        assert list(epoch) != list(range(12))
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert ids(Prompts(tasks(12), batch_size=4, epochs=3, seed=5)) == batches
    assert ids(Prompts(tasks(12), batch_size=4, epochs=3, seed=6)) != batches


def test_epochs_follow_without_a_seam():
    batches = ids(Prompts(tasks(5), batch_size=3, epochs=2, seed=None))
    assert batches == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4]]
    forever = Prompts(tasks(2), batch_size=5, seed=None)
    assert ids([next(forever), next(forever)]) == [[0, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
    assert forever.remaining is None


@settings(max_examples=10, deadline=None)
@given(
    rows=st.integers(1, 9),
    share=st.integers(1, 3),
    processes=st.integers(1, 3),
    seed=st.integers(0, 3),
)
def test_processes_share_the_batches_of_one(rows, share, processes, seed):
    options = {"batch_size": share * processes, "seed": seed}
    whole = Prompts(tasks(rows), **options)
    shares = [
        Prompts(tasks(rows), process_index=p, process_count=processes, **options)
        for p in range(processes)
    ]
    for _ in range(4):
        parts = [next(one) for one in shares]
        assert functools.reduce(operator.iadd, parts, []) == next(whole)


def test_resume_continues_at_first_unconsumed_batch():
    known = case("resume_continues_at_first_unconsumed_batch")
    inputs, expected = known["inputs"], known["expected"]
    options = {"batch_size": inputs["rows_per_input_micro_batch"]}
    source = tasks(inputs["dataset_size"])
    consumed = inputs["input_micro_batches_consumed_before_checkpoint"]

    plain = Prompts(source, seed=None, **options)
    for _ in range(consumed):
        next(plain)  # each is trained on several times: that is not counted
    state = json.loads(json.dumps(plain.get_state()))
    resumed = Prompts(source, seed=None, **options)
    resumed.set_state(state)
    assert resumed.consumed == expected["next_input_micro_batch_index_after_resume"]
    assert ids([next(resumed)]) == [expected["next_rows_unshuffled"]]

    # At the boundary of two epochs: not finished, and the second one's own order.
    whole = ids(Prompts(source, epochs=2, **options))
    first = Prompts(source, epochs=2, **options)
    for _ in range(inputs["epoch_length_in_batches"]):
        next(first)
    boundary = Prompts(source, epochs=2, **options)
    boundary.set_state(first.get_state())
    assert boundary.remaining == expected["remaining_batches_after_boundary_resume"]
    assert ids(boundary) == whole[inputs["epoch_length_in_batches"] :]
    assert boundary.remaining == 0


@pytest.mark.parametrize("epochs", [None, 3])
def test_resume_at_any_batch_and_on_other_processes(epochs):
    source, options = tasks(7), {"batch_size": 4, "epochs": epochs, "seed": 2}
    run = Prompts(source, **options)
    wanted, states = [], [run.get_state()]
    for _ in range(5):
        wanted.append(next(run))
        states.append(run.get_state())
    for k, state in enumerate(states):
        halves = [
            Prompts(source, process_index=p, process_count=2, **options)
            for p in range(2)
        ]
        for half in halves:
            next(half)  # wherever it stood before
            half.set_state(state)
        rest = [next(halves[0]) + next(halves[1]) for _ in range(5 - k)]
        assert rest == wanted[k:]


def test_a_position_of_another_order_is_refused():
    state = Prompts(tasks(4), batch_size=2).get_state()
    for name, other in (
        ("rows=4", Prompts(tasks(5), batch_size=2)),
        ("batch_size=2", Prompts(tasks(4), batch_size=4)),
        ("seed=0", Prompts(tasks(4), batch_size=2, seed=1)),
    ):
        with pytest.raises(ValueError, match=f"an order with {name}"):
            other.set_state(state)


@pytest.mark.parametrize(
    ("count", "options", "message"),
    [
        (0, {"batch_size": 1}, "prompt set is empty"),
        (4, {"batch_size": 0}, "batch_size and epochs"),
        (4, {"batch_size": 1, "epochs": 0}, "batch_size and epochs"),
        (4, {"batch_size": 3, "process_count": 2}, "does not split over 2"),
        (4, {"batch_size": 2, "process_index": 2, "process_count": 2}, "no process 2"),
        (4, {"batch_size": 2, "seed": -1}, "seed must be"),
    ],
)
def test_errors(count, options, message):
    with pytest.raises(ValueError, match=message):
        Prompts(tasks(count), **options)
