import io
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlpost.training.checkpoints import CheckpointError, Checkpoints
from rlpost.training.loop import Every, Interrupted, Report, run
from rlpost.training.metrics import read, without_clock
from rlpost.training.progress import Progress
from rlpost.training.workdir import Workdir
from tests.conformance import case
from tests.training import tiny
from tests.training.test_checkpoints import assert_same_bits, fill, small_disk  # noqa: F401

STEPS = 20


def lines(folder):
    return [without_clock(line) for line in read(folder / "metrics.jsonl")]


def samples(folder):
    return [without_clock(line) for line in read(folder / "samples.jsonl")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing interrupted: its folder, state and the batches it saw."""
    folder, seen = tmp_path_factory.mktemp("whole"), []
    with Workdir(folder) as workdir:
        state = tiny.train(workdir, STEPS, seen=seen)
    return folder, state, seen


def test_the_lines_of_a_run(whole):
    folder, _, seen = whole
    assert seen == [[2 * i, 2 * i + 1] for i in range(STEPS)]
    evals = [x["step"] for x in lines(folder) if x["kind"] == "eval"]
    assert evals == [0, 4, 8, 12, 16, 20]  # before the first, every fourth, the last
    trained = [x for x in read(folder / "metrics.jsonl") if x["kind"] == "train"]
    assert [x["step"] for x in trained] == list(range(1, STEPS + 1))
    assert all(x["time/train"] <= x["time/step"] for x in trained)
    assert ["time/save" in x for x in trained[:5]] == [False, False, False, True, False]
    assert Checkpoints(folder / "checkpoints").steps() == [18, 20]
    assert len(samples(folder)) == STEPS
    assert read(folder / "errors.jsonl") == []


@pytest.mark.parametrize("after", [1, 3, 4, 17])
def test_a_run_that_stopped_anywhere_ends_as_if_it_had_not(whole, tmp_path, after):
    folder, state, seen = whole
    with Workdir(tmp_path) as workdir, pytest.raises(tiny.Stop):
        tiny.train(workdir, STEPS, stop=after)
    saved = after - after % 3
    again = []
    with Workdir(tmp_path) as workdir:
        resumed = tiny.train(workdir, STEPS, seen=again)
    assert (
        again == seen[saved:]
    )  # from the first batch that the checkpoint had not seen
    assert_same_bits(resumed, state)
    assert lines(tmp_path) == lines(folder)
    assert samples(tmp_path) == samples(folder)


def test_resume_goes_on_at_the_first_unconsumed_batch(tmp_path):
    # Twelve rows in batches of two; every batch gives two updates, so the step counts
    # updates and must not be taken for the position of the data.
    given = case("resume_continues_at_first_unconsumed_batch")
    inputs, expected = given["inputs"], given["expected"]
    rows = inputs["rows_per_input_micro_batch"]
    consumed = inputs["input_micro_batches_consumed_before_checkpoint"]
    epoch = inputs["epoch_length_in_batches"]
    assert inputs["dataset_size"] == rows * epoch

    def train(folder, batches):
        data, seen = tiny.Rows(rows), []

        def iterate(state, step):
            batch = next(data) % inputs["dataset_size"]
            seen.append(batch.tolist())
            for _ in range(inputs["updates_per_input_micro_batch_num_iterations"]):
                state, _ = tiny.update(state, batch)
            return state, Report({})

        with Workdir(folder) as workdir:
            state = run(
                iterate,
                tiny.initial(),
                steps=batches,
                workdir=workdir,
                host={"data": data},
                progress=Progress(batches, live=False),
            )
        return state, seen

    def saved_index(folder):
        host = Checkpoints(folder / "checkpoints").restore(tiny.initial()).host
        return host["structures"]["data"]["position"] // rows

    straight, _ = train(tmp_path / "straight", consumed + 4)
    train(tmp_path / "resumed", consumed)
    index = saved_index(tmp_path / "resumed")
    assert index == expected["next_input_micro_batch_index_after_resume"]
    resumed, seen = train(tmp_path / "resumed", consumed + 4)
    assert seen[0] == expected["next_rows_unshuffled"]
    assert_same_bits(resumed, straight)  # the key is part of the state
    # A checkpoint at the end of the first epoch does not read as the end of the run.
    train(tmp_path / "boundary", epoch)
    _, seen = train(tmp_path / "boundary", 2 * epoch)
    assert len(seen) == expected["remaining_batches_after_boundary_resume"]


def start(folder, pause):
    command = [sys.executable, "-m", "tests.training.tiny", str(folder), str(STEPS)]
    process = subprocess.Popen(
        [*command, str(pause)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout.readline() == "started\n"
    return process


@pytest.mark.slow
def test_killed_at_five_random_moments_it_ends_as_if_it_had_not_been(whole, tmp_path):
    folder, state, _ = whole
    moments = np.random.default_rng(int(time.time()))
    for _ in range(5):
        process = start(tmp_path, 0.05)
        wait = moments.uniform(0.1, 2.0)
        time.sleep(wait)
        process.kill()
        process.wait()
        print(f"killed after {wait:.3f} s")
    process = start(tmp_path, 0.0)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert lines(tmp_path) == lines(folder)
    assert samples(tmp_path) == samples(folder)
    restored = Checkpoints(tmp_path / "checkpoints").restore(tiny.initial())
    assert restored.step == STEPS
    assert_same_bits(restored.state, state)


@pytest.mark.slow
def test_sigterm_saves_says_how_to_go_on_and_exits_by_its_own_code(whole, tmp_path):
    folder, state, _ = whole
    process = start(tmp_path, 0.2)
    while "update 1/" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    saved = Checkpoints(tmp_path / "checkpoints").steps()[-1]
    assert f"SIGTERM after update {saved} of {STEPS}: saved" in output
    assert saved % 3 != 0 or saved < STEPS
    with Workdir(tmp_path) as workdir:
        assert_same_bits(tiny.train(workdir, STEPS), state)
    assert lines(tmp_path) == lines(folder)


def test_a_signal_during_the_run_is_answered_between_two_iterations(tmp_path):
    def iterate(state, step):
        if step == 2:
            signal.raise_signal(signal.SIGINT)
        return {"n": state["n"] + 1}, Report({})

    before = signal.getsignal(signal.SIGINT)
    with Workdir(tmp_path) as workdir:
        with pytest.raises(Interrupted, match="SIGINT after update 3 of 9: saved"):
            run(
                iterate,
                {"n": jnp.array(0)},
                steps=9,
                workdir=workdir,
                progress=Progress(9, live=False),
            )
        restored = Checkpoints(workdir.checkpoints).restore({"n": jnp.array(0)})
        assert (restored.step, int(restored.state["n"])) == (3, 3)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_iteration_that_raises_is_written_down_and_costs_no_checkpoint(tmp_path):
    def iterate(state, step):
        if step == 4:
            raise ZeroDivisionError("by nought")
        return {"n": state["n"] + 1}, Report({"n": state["n"]})

    with Workdir(tmp_path) as workdir:
        with pytest.raises(ZeroDivisionError) as raised:
            run(
                iterate,
                {"n": jnp.array(0)},
                steps=9,
                workdir=workdir,
                every=Every(save=2),
                progress=Progress(9, live=False),
            )
        assert "at update 5; the last checkpoint stands" in raised.value.__notes__[0]
        (error,) = read(workdir.errors)
        assert (error["step"], error["kind"]) == (5, "exception")
        assert error["message"] == "ZeroDivisionError: by nought"
        assert Checkpoints(workdir.checkpoints).steps() == [2, 4]


def test_weak_types_do_not_outlive_an_iteration(tmp_path):
    # A weak float32 times bfloat16 is bfloat16, a strong one float32: were they kept,
    # a resumed run, whose arrays are all strong, would go on with other dtypes.
    def iterate(state, step):
        return {"x": jnp.where(step >= 0, 1.5, 0.0)}, Report({})

    with Workdir(tmp_path) as workdir:
        state = run(
            iterate,
            {"x": jnp.asarray(0.5)},
            steps=2,
            workdir=workdir,
            progress=Progress(2, live=False),
        )
    assert not jax.typeof(state["x"]).weak_type
    assert (state["x"] * jnp.bfloat16(1)).dtype == jnp.float32


def test_lost_checkpoints_are_an_error_and_never_a_fresh_start(whole, tmp_path):
    with Workdir(tmp_path) as workdir:
        tiny.train(workdir, 6)
        for step in (3, 6):
            (workdir.checkpoints / f"{step:08d}").rename(tmp_path / f"aside{step}")
        with pytest.raises(CheckpointError, match="are gone, the last was of step 6"):
            tiny.train(workdir, STEPS)
        assert len(read(workdir.metrics)) == 9  # nothing was cut
        # With only the newest lost the run goes back, says so, and ends the same.
        (tmp_path / "aside3").rename(workdir.checkpoints / "00000003")
        state = tiny.train(workdir, STEPS)
        message = read(workdir.errors)[0]["message"]
        assert message == "the checkpoint of step 6 is gone: went back to 3"
    assert_same_bits(state, whole[1])


def test_what_cannot_be_saved_is_refused_before_the_first_iteration(tmp_path):
    def iterate(state, step):
        raise AssertionError("must not be reached")

    wrong = pytest.raises(ValueError, match="state/n is a int")
    with Workdir(tmp_path) as workdir, wrong:
        run(iterate, {"n": 0}, steps=1, workdir=workdir)


def test_other_host_structures_are_refused(tmp_path):
    with Workdir(tmp_path) as workdir:
        tiny.train(workdir, 3)
        with pytest.raises(CheckpointError, match=r"keeps host structures \['data'\]"):
            run(lambda s, _: (s, Report({})), tiny.initial(), steps=4, workdir=workdir)


def test_a_disk_that_fills_up_and_empties_again(small_disk):  # noqa: F811
    def iterate(state, step):
        if step == 3:
            fill(small_disk, leave=100_000)
        if step == 6:
            (small_disk / "filler").unlink()
        return {"x": state["x"] + 1}, Report({})

    # Noise that does not compress: each checkpoint takes some 250 kB of the 1 MiB.
    state = {"x": jax.random.normal(jax.random.key(0), (70000,))}
    with Workdir(small_disk / "run") as workdir:
        final = run(
            iterate,
            state,
            steps=8,
            workdir=workdir,
            every=Every(save=2),
            keep=1,
            progress=Progress(8, live=False),
            tensorboard=False,
        )
        errors = read(workdir.errors)
        assert [(e["step"], e["kind"]) for e in errors] == [(4, "save"), (6, "save")]
        assert "No space left" in errors[0]["message"]
        assert Checkpoints(workdir.checkpoints).steps() == [8]
    np.testing.assert_allclose(final["x"], state["x"] + 8, rtol=1e-6)


def test_a_disk_that_stays_full_ends_the_run_with_the_older_checkpoint(small_disk):  # noqa: F811
    def iterate(state, step):
        if step == 3:
            fill(small_disk, leave=100_000)
        return {"x": state["x"] + 1}, Report({})

    state = {"x": jax.random.normal(jax.random.key(0), (70000,))}
    with Workdir(small_disk / "run") as workdir:
        with pytest.raises(CheckpointError, match="step 8 could not be saved"):
            run(
                iterate,
                state,
                steps=99,
                workdir=workdir,
                every=Every(save=2),
                keep=1,
                progress=Progress(99, live=False),
                tensorboard=False,
            )
        assert Checkpoints(workdir.checkpoints).restore(state).step == 2


def test_a_profile_of_the_steps_asked_for(tmp_path):
    with Workdir(tmp_path) as workdir:
        tiny.train(workdir, 4, profile=(1, 2))
        assert list(workdir.profile.rglob("*.xplane.pb"))


def test_many_errors_are_all_written_and_few_shown(tmp_path):
    def iterate(state, step):
        errors = [{"kind": "reward", "message": f"no. {i}", "row": i} for i in range(9)]
        return state, Report({}, errors=errors)

    shown = io.StringIO()
    with Workdir(tmp_path) as workdir:
        progress = Progress(1, stream=shown)
        run(iterate, {"n": jnp.array(0)}, steps=1, workdir=workdir, progress=progress)
        assert [e["row"] for e in read(workdir.errors)] == list(range(9))
    lines = [x for x in shown.getvalue().splitlines() if "reward" in x or "more" in x]
    assert lines == [*(f"reward: no. {i}" for i in range(3)), "and 6 more errors"]
