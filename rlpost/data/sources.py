"""Collections of tasks made from others, and from files."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable
from typing import Any

from rlpost.data.task import Source, Task


def jsonl(
    path: str | pathlib.Path,
    *,
    prompt: str = "prompt",
    answer: str | None = "answer",
) -> list[Task]:
    """Tasks from a file with one JSON object a line.

    The other keys of an object go to `task.data`; its "id", if there is one, names the
    task, else the file and the line do. Blank lines are passed over.

    Args:
        path: the file, UTF-8.
        prompt: the key of the prompt, text or a list of messages.
        answer: the key of the answer, text or a number; None where there is none. A
            line without it has the answer None.

    Returns:
        A `Source`: the tasks in the file's order.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: naming file and line, if a line is not such an object; if the file
            has no tasks.
    """
    path = pathlib.Path(path)
    tasks = []
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(_decoded(lines, path), 1):
            if line.strip():
                tasks.append(_task(line, f"{path}:{number}", prompt, answer))
    if not tasks:
        raise ValueError(f"{path} holds no tasks")
    return tasks


def without(
    source: Source, others: Iterable[Task], *, size: int | None = None
) -> list[Task]:
    """The tasks of `source` whose prompts are not among those of `others`.

    Args:
        source: a `Source`; it is gone through once.
        others: tasks to be kept apart from, the training tasks say.
        size: at most so many, and the rest is not generated.

    Returns:
        A `Source`: a list of tasks, each prompt once.
    """
    seen = {json.dumps(task.prompt) for task in others}
    kept: list[Task] = []
    for index in range(len(source)):
        if size is not None and len(kept) >= size:
            break
        task = source[index]
        key = json.dumps(task.prompt)
        if key not in seen:
            seen.add(key)
            kept.append(task)
    return kept


def _decoded(lines: Iterable[str], path: pathlib.Path) -> Iterable[str]:
    number = 0
    try:
        for number, line in enumerate(lines, 1):  # noqa: B007 (told by the error)
            yield line
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, after line {number}: not UTF-8: {error}") from error


def _task(line: str, where: str, prompt_key: str, answer_key: str | None) -> Task:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{where}: a {type(values).__name__}, expected an object")
    if prompt_key not in values:
        raise ValueError(
            f"{where}: no key {prompt_key!r} for the prompt, only {sorted(values)}"
        )
    prompt = values.pop(prompt_key)
    if not _is_prompt(prompt):
        raise ValueError(
            f"{where}: the prompt must be text that is not empty, or a list of "
            f'{{"role": ..., "content": ...}}, got {prompt!r:.80}'
        )
    answer = None if answer_key is None else values.pop(answer_key, None)
    if not isinstance(answer, str | int | float | None) or isinstance(answer, bool):
        raise ValueError(f"{where}: the answer must be text or a number")
    return Task(
        prompt=prompt,
        answer=None if answer is None else str(answer),
        id=str(values.pop("id", where)),
        data=values,
    )


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value)
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and "role" in turn for turn in value)
    )
