"""A tensorflow-datasets builder, prepared and read offline and without TensorFlow."""

import subprocess
import sys

import pytest

from rlpost.data import Prompts
from rlpost.data.builders import from_builder, question_and_answer
from rlpost.data.word_sums import WordSums, word_sums


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    return word_sums(tmp_path_factory.mktemp("tfds"), size=20, seed=1)


def test_records_become_tasks(builder):
    train, test = from_builder(builder, "train"), from_builder(builder, "test")
    assert (len(train), len(test)) == (20, 4)
    task = train[3]
    assert task == train[3]
    assert task.id == "word_sums/train/3"
    words = task.prompt.split()
    assert int(task.answer) == int(words[2]) + int(words[6])
    assert task.data["solution"].endswith(f"#### {task.answer}")
    prompts = [
        {source[i].prompt for i in range(len(source))} for source in (train, test)
    ]
    assert not prompts[0] & prompts[1]


def test_a_prepared_folder_is_read_back(builder):
    again = from_builder(str(builder.data_path), "train[:5]")
    assert len(again) == 5
    assert again[4].prompt == from_builder(builder, "train")[4].prompt


def test_batches_of_a_builder(builder):
    source = from_builder(builder, "train")
    batches = list(Prompts(source, batch_size=5, epochs=1))
    names = sorted(task.id for batch in batches for task in batch)
    assert names == sorted(f"word_sums/train/{i}" for i in range(20))


def test_tensorflow_is_not_needed(builder):
    code = (
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "def hidden(name, *rest): return None if name == 'tensorflow' else "
        "find(name, *rest)\n"
        "PathFinder.find_spec = hidden\n"  # as if it were not installed
        "from rlpost.data.builders import from_builder\n"
        f"print(from_builder({str(builder.data_path)!r}, 'test')[0].prompt)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == from_builder(builder, "test")[0].prompt, run.stderr


def test_answers_as_bytes_with_commas():
    record = {"question": "é?".encode(), "answer": b"so\n#### 1,200"}
    task = question_and_answer(record)
    assert (task.prompt, task.answer) == ("é?", "1200")
    with pytest.raises(ValueError, match="no '####'"):
        question_and_answer({"question": "q", "answer": "12"})


def test_errors(builder, tmp_path):
    with pytest.raises(ValueError, match=r"no split 'dev', only \['test', 'train'\]"):
        from_builder(builder, "dev[:3]")
    with pytest.raises(ValueError, match="is it prepared"):
        from_builder(WordSums(data_dir=str(tmp_path)), "train")
    with pytest.raises(ValueError, match="at least 5"):
        word_sums(tmp_path, size=4)
