"""Responses that can be watched while they are drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from rlpost.sampling.agent import Turn
from rlpost.sampling.sampler import Request, Sampler
from rlpost.types import Params

Show = Callable[[int, list[int], bool], None]


def sample_watched(
    sampler: Sampler,
    params: Params,
    requests: Sequence[Request],
    show: Show,
    *,
    every: int = 8,
) -> list[list[int]]:
    """Draw as `sampler.sample` does, and show each response on its way.

    A turn of few tokens after which nothing is said is a look at the response; the
    tokens are those of one turn, since noise depends on seed and position alone.

    Args:
        sampler, params, requests: as for `sampler.sample`, without stop texts.
        show: called with (row, ids drawn so far, whether the response is complete).
        every: tokens between two looks.

    Returns:
        The ids of each response, the stop id included.

    Raises:
        ValueError: naming a request that is wrong, or asks for stop texts.
        Exception: what `show` raises, once the other responses have ended.
    """
    if any(request.stop_texts for request in requests):
        raise ValueError("a watched response cannot have stop_texts: they end turns")
    drawn: list[list[int]] = [[] for _ in requests]
    failed: list[Exception] = []

    def watch(row: int, tokens: list[int], new: list[int]) -> Turn | None:
        request = requests[row]
        # The last turn may draw more than there was left to draw.
        drawn[row] = (drawn[row] + new)[: request.max_new_tokens]
        over = (
            new[-1] in request.stop_ids
            or len(drawn[row]) == request.max_new_tokens
            or len(tokens) >= sampler.length
        )
        show(row, drawn[row], over)
        return None if over else Turn()

    pieces = [
        dataclasses.replace(r, max_new_tokens=min(every, r.max_new_tokens))
        for r in requests
    ]
    sampler.sample(
        params,
        pieces,
        environment=watch,
        on_error=lambda row, error: failed.append(error),
    )
    if failed:
        raise failed[0]
    return drawn
