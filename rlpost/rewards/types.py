"""What a reward sees and gives: `(samples) -> {part: f32[B]}`, nan = unscorable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlpost.data.task import Message, Task

Parts = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One response, as a reward sees it.

    Attributes:
        task: what was asked.
        text: the response, decoded, control tokens left out.
        prompt_ids, response_ids: token ids, the stop token included.
        truncated: the response ended because room or budget ran out.
        finished: it ended by itself: a stop token, a stop string or the environment.
        turns: for agents, the messages of the episode in order.
    """

    task: Task
    text: str
    prompt_ids: Sequence[int] = ()
    response_ids: Sequence[int] = ()
    truncated: bool = False
    finished: bool = True
    turns: Sequence[Message] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON values; `from_json` reads it back."""
        return {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "task": {
                f.name: getattr(self.task, f.name) for f in dataclasses.fields(Task)
            },
            "prompt_ids": [int(i) for i in self.prompt_ids],
            "response_ids": [int(i) for i in self.response_ids],
            "truncated": bool(self.truncated),
            "finished": bool(self.finished),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Sample:
        """The sample that `to_json` wrote."""
        return cls(**{**values, "task": Task(**values["task"])})


Reward = Callable[[Sequence[Sample]], Mapping[str, np.ndarray]]


def reward_of(parts: Mapping[str, np.ndarray]) -> np.ndarray:
    """f32[B], the part that trains: "reward", or the only part there is.

    Raises:
        ValueError: if there are several parts and none is called "reward".
    """
    if "reward" in parts:
        return np.asarray(parts["reward"], np.float32)
    if len(parts) == 1:
        return np.asarray(next(iter(parts.values())), np.float32)
    raise ValueError(
        f"a reward of several parts needs one called 'reward', got {sorted(parts)}; "
        "`weighted` makes one"
    )


def each(
    name: str, samples: Sequence[Sample], score: Callable[[Sample], float]
) -> Parts:
    """{name: f32[B]}, sample by sample; a reward of one part is written so."""
    return {name: np.array([score(sample) for sample in samples], np.float32)}
