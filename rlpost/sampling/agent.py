"""Turns of an agent: between them token ids are carried, never encoded again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from rlpost.sampling.requests import check_ids


@dataclasses.dataclass(frozen=True)
class Turn:
    """What an environment answers.

    Attributes:
        tokens: ids appended to the row, which the policy reads but did not draw.
        done: the episode is over; `tokens` still end the row, as a last observation.
    """

    tokens: Sequence[int] = ()
    done: bool = False


# (index of the request, all ids of the row, ids drawn in this turn) -> what comes next;
# None ends the row with the turn's own finish reason. Where several processes sample
# together each asks its own copy, so the answers must not differ between them.
Environment = Callable[[int, list[int], list[int]], Turn | None]


def ask(
    environment: Environment,
    index: int,
    tokens: Sequence[int],
    new: Sequence[int],
    vocab: int,
) -> Turn | None:
    """The environment's answer, its ids checked.

    Raises:
        ValueError: if it appends what is no id of the vocabulary.
        Exception: whatever the environment raises.
    """
    turn = environment(index, list(tokens), list(new))
    if turn is None:
        return None
    if not isinstance(turn, Turn):
        raise TypeError(
            f"the environment must return a Turn or None, got {type(turn).__name__}"
        )
    ids = check_ids(turn.tokens, vocab, f"request {index}: the environment's tokens")
    return Turn(ids.tolist(), bool(turn.done))


def text_environment(
    step: Callable[[int, str], tuple[str, bool] | None],
    *,
    decode: Callable[[Sequence[int]], str],
    encode: Callable[[str], Sequence[int]],
) -> Environment:
    """An environment that speaks text, for a policy that speaks tokens.

    Only what it says is encoded; what the policy said is decoded for it, and stays in
    the row as the ids that were drawn.

    Args:
        step: (index, what the policy said) -> (what the policy reads next, with any
            chat markup; whether the episode is over), or None to leave the row as is.
        decode: ids -> text.
        encode: text -> ids, without added special tokens.
    """

    def environment(index: int, tokens: list[int], new: list[int]) -> Turn | None:
        answer = step(index, decode(new))
        if answer is None:
            return None
        text, done = answer
        return Turn(encode(text) if text else (), done)

    return environment
