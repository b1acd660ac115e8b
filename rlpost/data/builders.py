"""Tasks of tensorflow-datasets builders, read without TensorFlow."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlpost.data.task import Task


@dataclasses.dataclass(frozen=True)
class _Records:
    """A split as a `Source`."""

    records: Sequence[Mapping[str, Any]]
    read: Callable[[Mapping[str, Any]], Task]
    name: str

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Task:
        task = self.read(self.records[index])
        return dataclasses.replace(task, id=task.id or f"{self.name}/{index}")


def question_and_answer(record: Mapping[str, Any]) -> Task:
    """A task from a record of GSM8K's shape.

    `question` is the prompt. `answer` is a worked solution that ends in "#### n"; n is
    the task's answer, and the whole stays in `data["solution"]`.

    Raises:
        ValueError: if there is no "####" in the answer.
    """
    solution = _text(record["answer"])
    _, mark, answer = solution.rpartition("####")
    if not mark:
        raise ValueError(f"the answer has no '####' before its number: {solution!r}")
    return Task(
        prompt=_text(record["question"]),
        answer=answer.strip().replace(",", ""),
        data={"solution": solution},
    )


def from_builder(
    builder: Any,
    split: str,
    *,
    read: Callable[[Mapping[str, Any]], Task] = question_and_answer,
) -> _Records:
    """A `Source` of the records of a prepared builder.

    Records are read one by one through `as_data_source`, so the builder must have been
    prepared in a random-access format (file_format="array_record").

    Args:
        builder: a tensorflow-datasets builder, or the folder of a prepared data set.
        split: such as "train" or "test[:100]".
        read: makes a task of a record.

    Raises:
        ValueError: if there is no such split, or the format allows no random access.
    """
    if isinstance(builder, str | pathlib.Path):
        import tensorflow_datasets as tfds

        builder = tfds.builder_from_directory(str(builder))
    base = split.partition("[")[0]
    if base not in builder.info.splits:
        raise ValueError(
            f"{builder.name} has no split {base!r}, only "
            f"{sorted(builder.info.splits)}; is it prepared?"
        )
    try:
        records = builder.as_data_source(split=split)
    except NotImplementedError as error:
        raise ValueError(
            f"{builder.name} cannot be read at random: prepare it with "
            f"file_format='array_record' ({error})"
        ) from error
    return _Records(records, read, f"{builder.name}/{split}")


def _text(value: Any) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)
