"""Demonstrations: tasks with answers as an endless iterator of likelihood batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlpost.data.likelihood import answer_row, padded
from rlpost.data.pipeline import Prompts
from rlpost.sampling.tokenizer import Tokenizer
from rlpost.types import Batch


class Demonstrations:
    """The batches of a prompt pipeline, each task with its answer as a row.

    Args:
        prompts: the pipeline; its position is that of the demonstrations.
        tokenizer: encodes prompts and answers.
        length: slots of a row, T.
    """

    def __init__(self, prompts: Prompts, tokenizer: Tokenizer, *, length: int) -> None:
        self._prompts, self._tokenizer, self._length = prompts, tokenizer, length

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """A Batch of [B, length], the answers on its mask."""
        rows = [answer_row(self._tokenizer, task) for task in next(self._prompts)]
        return padded(rows, self._length, pad_id=self._tokenizer.pad_id)

    def get_state(self) -> dict[str, Any]:
        """The position of the pipeline."""
        return self._prompts.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on at the first batch not handed out when `state` was taken."""
        self._prompts.set_state(state)
