"""The pool: order, time limits, and failures that cost only their own sample."""

import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from rlpost.data import Task
from rlpost.rewards import RewardError, RewardPool, Sample, exact_match, score_here
from tests.rewards import faulty

PATH = "tests.rewards.faulty:reward"


def samples(*texts):
    return [
        Sample(task=Task("?", answer="1", id=f"t{i}"), text=text)
        for i, text in enumerate(texts)
    ]


@pytest.fixture(params=["processes", "threads"])
def make(request):
    pools = []

    def pool(reward=PATH, **options):
        options = {"workers": 2, "threads": request.param == "threads"} | options
        pools.append(RewardPool(reward, **options))
        return pools[-1]

    yield pool
    for each in pools:
        each.close()


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().split()[2] not in "ZX"
    except FileNotFoundError:
        return False


def wait_until_dead(pid, seconds=10.0):
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def test_results_come_in_the_order_asked_for(make):
    # The first takes longest: the others overtake it.
    scored = make().score(samples("sleep 0.3", "2", "3", "4", "5"))
    np.testing.assert_array_equal(scored.reward, [1, 2, 3, 4, 5])
    assert scored.reward.dtype == np.float32
    assert scored.failures == ()
    assert scored.report() == ""


def test_each_failure_costs_its_own_sample_and_is_told(make):
    scored = make(limit=0.5).score(samples("1", "raise it", "hang", "nan", "5"))
    np.testing.assert_array_equal(scored.reward, [1, np.nan, np.nan, np.nan, 5])
    assert scored.counts == {"raised": 1, "timeout": 1, "unscorable": 1}
    raised, hung, _ = scored.failures
    assert (raised.index, raised.task) == (1, "t1")
    assert "KeyError" in raised.detail
    assert "no such key it" in raised.detail
    assert "faulty.py" in hung.detail  # where it hangs
    report = scored.report(shown=1)
    assert "3 samples not scored (1 raised, 1 timeout, 1 unscorable)" in report
    assert "no such key it" in report
    assert "faulty.py" in report


def test_a_pool_that_lost_a_worker_goes_on(make):
    pool = make(limit=0.5, workers=1)
    pool.score(samples("hang", "1"))
    np.testing.assert_array_equal(pool.score(samples("2", "3")).reward, [2, 3])


@pytest.mark.parametrize("text", ["none", "list", "long", "scalar", "text", "inf"])
def test_what_is_not_one_number_a_sample_is_refused(make, text):
    scored = make("tests.rewards.faulty:shapes").score(samples("fine", text))
    np.testing.assert_array_equal(scored.reward, [2, np.nan])
    assert scored.counts == {"invalid": 1}


@pytest.mark.parametrize("text", ["nan", "missing"])
def test_nan_and_none_are_unscorable(make, text):
    scored = make("tests.rewards.faulty:shapes").score(samples("fine", text))
    np.testing.assert_array_equal(scored.reward, [2, np.nan])
    assert scored.counts == {"unscorable": 1}


def test_parts_without_a_reward_among_them_are_told(make):
    scored = make("tests.rewards.faulty:shapes").score(samples("fine", "two", "empty"))
    assert "called 'reward'" in scored.failures[0].detail
    assert "no parts" in scored.failures[1].detail


def test_a_reward_that_always_raises_is_an_error_with_its_cause(make):
    pool = make("tests.rewards.faulty:never")
    with pytest.raises(RewardError, match=r"2 of 2(.|\n)*the judge is not there"):
        pool.score(samples("1", "2"))
    patient = make("tests.rewards.faulty:never", max_failures=None)
    assert patient.score(samples("1", "2")).counts == {"raised": 2}
    strict = make(max_failures=0.5)
    strict.score(samples("1", "2", "raise"))
    with pytest.raises(RewardError, match="1 of 2"):
        strict.score(samples("1", "raise"))


def test_a_factory_gets_its_arguments(make):
    pool = make("tests.rewards.faulty:scaled", arguments={"scale": 2.5})
    np.testing.assert_array_equal(pool(samples("abcd"))["value"], [10])


def test_a_whole_batch_in_one_call(make):
    pool = make("tests.rewards.faulty:rank", whole=True)
    np.testing.assert_array_equal(pool(samples("aa", "a", "aaa"))["rank"], [1, 0, 2])
    failing = make(whole=True)
    with pytest.raises(RewardError):
        failing.score(samples("1", "raise"))


def test_scoring_in_the_calling_thread():
    scored = score_here(faulty.reward, samples("1", "raise", "nan", "4"))
    np.testing.assert_array_equal(scored.reward, [1, np.nan, np.nan, 4])
    assert scored.counts == {"raised": 1, "unscorable": 1}
    with pytest.raises(RewardError, match="the judge is not there"):
        score_here(faulty.never, samples("1"))


def test_a_reward_that_calls_exit_costs_its_own_sample():
    def reward(some):
        if some[0].text == "exit":
            raise SystemExit(3)
        return {"reward": [1.0]}

    asked = samples("1", "exit")
    threads = RewardPool(reward, threads=True, workers=1, limit=60)
    for scored in (score_here(reward, asked), threads.score(asked)):
        np.testing.assert_array_equal(scored.reward, [1, np.nan])
        assert scored.counts == {"raised": 1}


def test_no_samples(make):
    assert make().score([]).reward.shape == (0,)


def test_a_library_function_is_found_by_its_path():
    with RewardPool(exact_match, workers=1) as pool:
        np.testing.assert_array_equal(pool(samples("1", "2"))["exact"], [1, 0])


def test_what_a_process_cannot_import_is_refused():
    closure = faulty.scaled(1.0)
    with pytest.raises(ValueError, match="threads=True"):
        RewardPool(closure, workers=1)
    with pytest.raises(ValueError, match="threads=True"):
        RewardPool(lambda samples: {}, workers=1)
    with RewardPool(closure, workers=1, threads=True) as pool:
        np.testing.assert_array_equal(pool(samples("abc"))["value"], [3])


def test_a_reward_of_a_program_run_as_a_module(tmp_path):
    # There it belongs to `__main__`, which a worker cannot import by that name.
    (tmp_path / "program.py").write_text(
        "from rlpost.data import Task\n"
        "from rlpost.rewards import RewardPool, Sample\n"
        "def seven(samples): return {'x': [7.0] * len(samples)}\n"
        "if __name__ == '__main__':\n"
        "    with RewardPool(seven, workers=1) as pool:\n"
        "        print(pool([Sample(task=Task('?'), text='')])['x'])\n"
    )
    paths = os.pathsep.join([str(tmp_path), os.getcwd()])
    command = [sys.executable, "-m", "program"]
    run = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert run.stdout.strip() == "[7.]", run.stderr


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("no_such_module:x", "No module named 'no_such_module'"),
        ("tests.rewards.faulty:nothing", "has no reward 'nothing'"),
        ("tests.rewards.faulty", "reads 'module:name'"),
    ],
)
def test_a_path_that_leads_nowhere_is_an_error(path, cause):
    with RewardPool(path, workers=1) as pool, pytest.raises(RewardError, match=cause):
        pool.score(samples("1"))


@pytest.mark.parametrize(
    "options",
    [{"workers": 0}, {"limit": 0}, {"limit": math.inf}, {"max_failures": 0}],
)
def test_options_out_of_range(options):
    with pytest.raises(ValueError):
        RewardPool(PATH, **options)


def test_a_process_that_ends_is_replaced():
    with RewardPool(PATH, workers=1) as pool:
        first = pool(samples("pid"))["value"][0]
        scored = pool.score(samples("die", "pid"))
        assert scored.counts == {"died": 1}
        assert "code 7" in scored.failures[0].detail
        assert scored.reward[1] != first


def test_a_hang_that_holds_the_interpreters_lock_is_ended():
    with RewardPool(PATH, workers=1, limit=0.5) as pool:
        begun = time.monotonic()
        scored = pool.score(samples("hang-in-c", "1"))
        assert time.monotonic() - begun < 20
    assert scored.counts == {"timeout": 1}
    assert "faulty.py" in scored.failures[0].detail


def test_a_worker_is_a_clean_process():
    with RewardPool(PATH, workers=1) as pool:
        # Prints do not mix with the replies, input is empty, and there is no JAX.
        np.testing.assert_array_equal(
            pool(samples("print", "jax", "3"))["value"], [0, 0, 3]
        )


def test_what_cannot_be_sent_is_told():
    sample = Sample(task=Task("?", data={"x": object()}, id="odd"), text="1")
    with RewardPool(PATH, workers=1) as pool:
        scored = pool.score([*samples("1"), sample])
    assert "not made of JSON values" in scored.failures[0].detail


def test_what_a_hanging_reward_started_ends_with_it(tmp_path):
    file = tmp_path / "pid"
    with RewardPool(PATH, workers=1, limit=1.0) as pool:
        pool.score(samples(f"children {file}", "1"))
        assert wait_until_dead(int(file.read_text()))


def test_closing_ends_the_workers():
    pool = RewardPool(PATH, workers=2)
    pids = {int(pid) for pid in pool(samples("pid", "pid", "pid", "pid"))["value"]}
    pool.close()
    pool.close()
    assert not any(alive(pid) for pid in pids)
    with pytest.raises(RewardError, match="closed"):
        pool.score(samples("1"))


CHILD = """
import sys
from rlpost.data import Task
from rlpost.rewards import RewardPool, Sample
pool = RewardPool("tests.rewards.faulty:reward", workers=2, limit=LIMIT)
ask = lambda *texts: [Sample(task=Task("?"), text=text) for text in texts]
print(*map(int, pool(ask("pid", "sleep 0.2", "pid", "pid"))["value"]), flush=True)
END
"""


def child(end, limit=30.0):
    """A process with a pool: (it, the pids of its workers)."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD.replace("END", end).replace("LIMIT", str(limit))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pids = {int(word) for word in process.stdout.readline().split()} - {1}
    assert pids
    return process, pids


def test_ctrl_c_ends_a_call_and_leaves_no_process():
    process, pids = child("pool(ask('hang', 'hang'))")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert "KeyboardInterrupt" in errors
    assert all(wait_until_dead(pid) for pid in pids)


def test_a_pool_serves_on_after_ctrl_c():
    process, _ = child(
        "try: pool(ask('hang', 'hang'))\n"
        "except KeyboardInterrupt: print(pool(ask('4'))['value'][0])"
    )
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=30)
    assert out.strip() == "4.0", errors


def test_a_forgotten_pool_ends_with_python():
    process, pids = child("")
    process.communicate(timeout=20)
    assert process.returncode == 0
    assert all(wait_until_dead(pid) for pid in pids)


@pytest.mark.parametrize("busy", ["pool(ask('hang', 'hang'))", "sys.stdin.read()"])
def test_workers_do_not_outlive_a_parent_that_is_killed(busy):
    process, pids = child(busy, limit=1.0)
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=20)
    assert all(wait_until_dead(pid) for pid in pids)
