"""Rows to learn by likelihood: prompts with answers, padded or packed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from rlpost.data.task import Task
from rlpost.sampling.chat import prompt_ids
from rlpost.sampling.tokenizer import Tokenizer
from rlpost.types import Batch


class Row(NamedTuple):
    """One sequence: token ids, and which of them are learnt, True or False each."""

    tokens: Sequence[int]
    mask: Sequence[bool]


@dataclasses.dataclass(frozen=True)
class Packed:
    """Several sequences in a row; every array is [B, T].

    Attributes:
        tokens: i32, 0 in padding.
        segment: i32, 1, 2, ... within a row, 0 in padding.
        positions: i32, from 0 in each sequence, -1 in padding.
        mask: bool, True on tokens to learn; never on the first of a sequence, which
            nothing precedes.
    """

    tokens: np.ndarray
    segment: np.ndarray
    positions: np.ndarray
    mask: np.ndarray

    def batch(self) -> Batch:
        """A Batch for a likelihood loss; scoring forms the positions from `segment`."""
        return Batch(
            mask=jnp.asarray(self.mask),
            tokens=jnp.asarray(self.tokens),
            length=jnp.asarray(np.sum(self.segment > 0, axis=1), jnp.int32),
            segment=jnp.asarray(self.segment),
        )


def answer_row(tokenizer: Tokenizer, task: Task, *, stop: bool = True) -> Row:
    """The prompt's ids, then the answer's; only the answer is learnt.

    Prompt and answer are encoded apart, since that is how they meet when sampling.

    Args:
        tokenizer: with a chat template if the prompt is messages.
        task: with an answer.
        stop: end with the first stop id, learnt too, so that the model learns to end.

    Raises:
        ValueError: if the task has no answer, or `stop` meets a tokenizer without stop
            ids.
    """
    if task.answer is None:
        raise ValueError(f"task {task.id!r} has no answer to learn")
    if stop and not tokenizer.stop_ids:
        raise ValueError("the tokenizer has no stop ids: give stop=False")
    prompt = prompt_ids(tokenizer, task.prompt)
    answer = tokenizer.encode(task.answer) + list(
        tokenizer.stop_ids[:1] if stop else ()
    )
    return Row(prompt + answer, [False] * len(prompt) + [True] * len(answer))


def padded(rows: Iterable[Row], length: int, *, pad_id: int = 0) -> Batch:
    """One sequence a row: a Batch of [B, length], padded on the right.

    The mask leaves out the first token of a row, which nothing precedes.

    Raises:
        ValueError: if a row is empty, longer than `length`, or its mask does not fit.
    """
    rows = [_checked(number, row, length) for number, row in enumerate(rows)]
    tokens = np.full((len(rows), length), pad_id, np.int32)
    mask = np.zeros((len(rows), length), bool)
    for b, row in enumerate(rows):
        tokens[b, : len(row.tokens)] = row.tokens
        mask[b, : len(row.tokens)] = row.mask
    mask[:, :1] = False
    size = jnp.array([len(row.tokens) for row in rows], jnp.int32)
    return Batch(mask=jnp.asarray(mask), tokens=jnp.asarray(tokens), length=size)


def pack(rows: Iterable[Row], length: int) -> Packed:
    """Sequences laid end to end in rows of `length`, none of them cut.

    Each goes into the first row with room for it, so the result depends on their order
    alone. `segment` keeps them apart in attention; a token's law is that of the token
    before it in the same segment.

    Args:
        rows: the sequences.
        length: slots of a row, T.

    Returns:
        Packed arrays [B, T], with as many rows as it takes.

    Raises:
        ValueError: if there are no rows, or as in `padded`.
    """
    bins: list[list[Row]] = []
    room: list[int] = []
    for number, row in enumerate(rows):
        _checked(number, row, length)
        size = len(row.tokens)
        place = next((b for b, left in enumerate(room) if left >= size), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(length)
        bins[place].append(row)
        room[place] -= size
    if not bins:
        raise ValueError("no rows to pack")
    tokens = np.zeros((len(bins), length), np.int32)
    segment = np.zeros_like(tokens)
    positions = np.full_like(tokens, -1)
    mask = np.zeros(tokens.shape, bool)
    for b, held in enumerate(bins):
        start = 0
        for number, row in enumerate(held, 1):
            end = start + len(row.tokens)
            tokens[b, start:end] = row.tokens
            segment[b, start:end] = number
            positions[b, start:end] = np.arange(end - start)
            mask[b, start + 1 : end] = row.mask[1:]
            start = end
    return Packed(tokens, segment, positions, mask)


def _checked(number: int, row: Row, length: int) -> Row:
    if len(row.tokens) != len(row.mask):
        raise ValueError(
            f"row {number} has {len(row.tokens)} tokens but {len(row.mask)} in its mask"
        )
    if not 0 < len(row.tokens) <= length:
        raise ValueError(
            f"row {number} has {len(row.tokens)} tokens, a row holds 1 to {length}"
        )
    return row
