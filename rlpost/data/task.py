"""What a policy is asked, and what the reward needs to judge its answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Message = Mapping[str, Any]  # {"role": ..., "content": ...}, as chat templates read it


@dataclasses.dataclass(frozen=True)
class Task:
    """One prompt.

    Attributes:
        prompt: plain text, or the messages of a conversation.
        answer: the reference answer, None where a reward needs none.
        data: what else a reward or an environment needs; JSON values only.
        id: names the task in logs and pages, and tells equal prompts apart.
    """

    prompt: str | Sequence[Message]
    answer: str | None = None
    data: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    id: str = ""


class Source(Protocol):
    """A random-access collection of tasks, all that a pipeline asks for.

    `source[i]` is the same task at every call and in every process.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Task: ...
