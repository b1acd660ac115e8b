"""Tasks from JSON lines: errors name file and line."""

import pytest

from rlpost.data import Task, jsonl


def write(tmp_path, content):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_tasks(tmp_path):
    path = write(
        tmp_path,
        '\ufeff{"prompt": "1+1=", "answer": 2, "level": 1, "id": "a"}\n\n'
        '{"prompt": [{"role": "user", "content": "é"}]}',
    )
    tasks = jsonl(path)
    assert tasks[0] == Task("1+1=", "2", {"level": 1}, "a")
    assert tasks[1] == Task([{"role": "user", "content": "é"}], None, {}, f"{path}:3")


def test_other_keys(tmp_path):
    path = write(tmp_path, '{"question": "q", "solution": "s", "id": 5}\n')
    assert jsonl(path, prompt="question", answer="solution") == [
        Task("q", "s", {}, "5")
    ]
    kept = jsonl(path, prompt="question", answer=None)
    assert kept[0].data == {"solution": "s"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "a list, expected an object"),
        ('{"question": "q"}', r"no key 'prompt' for the prompt, only \['question'\]"),
        ('{"prompt": ""}', "must be text that is not empty"),
        ('{"prompt": [{"content": "x"}]}', "must be text"),
        ('{"prompt": "q", "answer": [1]}', "the answer must be"),
        ('{"prompt": "q", "answer": true}', "the answer must be"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    line = line if isinstance(line, bytes) else line.encode()
    path = write(tmp_path, b'{"prompt": "fine"}\n' + line + b"\n")
    where = "after line" if b"\xff" in line else r"tasks\.jsonl:2"
    with pytest.raises(ValueError, match=f"{where}.*{message}"):
        jsonl(path)


def test_a_file_without_tasks_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="holds no tasks"):
        jsonl(write(tmp_path, "\n\n"))
    with pytest.raises(FileNotFoundError):
        jsonl(tmp_path / "none")
