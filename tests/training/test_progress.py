import io
import re

import pytest

from rlpost.training.progress import Progress, duration, summary

LINE = {
    "step": 3,
    "time": 1.0,
    "kind": "train",
    "loss": 0.12345,
    "time/step": 2.0,
    "reward/mean": 0.5,
    "guard/failed": 0,
    "speed/tokens_per_s": 12345.6,
}
EVAL = {"step": 4, "time": 1.0, "kind": "eval", "eval/pass@1": 0.25, "eval/kl": None}
SAMPLE = {
    "prompt": "What is\n 3 + 4?",
    "response": "7 [bold]",
    "reward": 1.0,
    "parts": {},
}


def test_a_log_gets_plain_lines_and_few_of_them():
    stream = io.StringIO()
    progress = Progress(100, stream=stream, seconds=60.0)
    progress.start(0)
    for step in range(1, 101):
        progress.train(LINE | {"step": step})
        if step == 4:
            progress.evaluation(EVAL)
    progress.note("saved")
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) == 4  # the first, the evaluation, the last, the note
    assert lines[0].startswith("update 1/100  reward 0.5  loss 0.123  tok/s 12346")
    assert "left" not in lines[0]  # the first update compiles and tells no speed
    assert lines[1] == "eval after update 4:  pass@1 0.25  kl nan"
    assert lines[2].startswith("update 100/100")
    assert "\x1b" not in stream.getvalue()


def test_time_left_is_that_of_the_updates_after_the_first(monkeypatch):
    # The first update takes 100 s, the others 2 s: after 3 of 10, 7 * 2 s are left.
    clock = iter([0.0, 100.0, 102.0, 102.0, 104.0, 104.0])
    stream = io.StringIO()
    progress = Progress(10, stream=stream, seconds=0.0)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    progress.start(0)
    next(clock)
    for step in (1, 2, 3):
        progress.train(LINE | {"step": step})
    assert stream.getvalue().splitlines()[-1].endswith("14 s left")


def test_a_question_is_told_in_place_of_its_whole_prompt():
    stream = io.StringIO()
    Progress(9, stream=stream).sample(SAMPLE | {"question": "3 + 4?"})
    assert stream.getvalue() == (
        "  question: 3 + 4? | response: 7 [bold] | reward: 1\n"
    )


def test_samples_come_at_once_and_then_seldom():
    stream = io.StringIO()
    progress = Progress(9, stream=stream)
    progress.start(0)
    for _ in range(50):
        progress.sample(SAMPLE)
    lines = stream.getvalue().splitlines()
    assert lines == ["  prompt: What is 3 + 4? | response: 7 [bold] | reward: 1"] * 3


def test_a_terminal_gets_a_bar_and_keeps_what_was_said():
    stream = io.StringIO()
    progress = Progress(10, stream=stream, live=True)
    progress.start(2)
    progress.train(LINE)
    progress.evaluation(EVAL)
    progress.sample(SAMPLE)
    progress.close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert "3/10" in text
    assert "reward 0.5" in text
    assert "eval after update 4:  pass@1 0.25" in text
    assert "7 [bold]" in text  # what a model says is no markup


@pytest.mark.parametrize("live", [False, True])
def test_it_never_raises(live):
    class Broken(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

        def flush(self):
            raise BrokenPipeError

    progress = Progress(10, stream=Broken(), live=live)
    progress.start(0)
    progress.train(LINE)
    progress.evaluation({})
    progress.sample(None)
    progress.note("x")
    progress.close()


def test_summary_shows_the_known_and_fills_up_with_others():
    many = {f"m{i}": i for i in range(20)} | {"loss": 1e-9, "reward/mean": 1500.0}
    assert summary(many) == "reward 1500  loss 1e-09  m0 0"


@pytest.mark.parametrize(
    "seconds, text",
    [(41.6, "42 s"), (200, "3 min 20 s"), (7500, "2 h 05 min"), (59.7, "1 min 00 s")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
