"""What is asked of the sampler, and the checks that come before anything is drawn."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# Logits are off by 1e-7 of their size, log-probs by that over the temperature.
COLDEST = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One response to draw.

    Attributes:
        prompt: token ids (never text), at least one.
        max_new_tokens: of one turn; the row as a whole is bounded by the sampler's
            length.
        seed: in [0, 2^64); with the position it fixes the noise of each token, whatever
            the neighbours and the slot. (Logits may differ in the last bit between
            batches of other shapes; a draw on the edge between two ids then may too.)
        temperature: divides the logits; 0 takes the likeliest id, which is then certain
            (log-prob 0), and such a row cannot be trained on. Else at least 0.001:
            below it float32 cannot hold the law.
        top_k: only the k likeliest ids; 0 means all.
        top_p: only the likeliest ids until their mass reaches it; 1 means all.
        min_p: only ids at least this times as likely as the likeliest; 0 means all.
        stop_ids: ids that end a turn; the one drawn belongs to the response.
        stop_texts: texts that end a turn with the token that completes one.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()


def check_requests(
    requests: Sequence[Request],
    *,
    vocab: int,
    length: int,
    decode: Callable[[list[int]], str] | None,
) -> list[np.ndarray]:
    """The prompts as i32[P], or ValueError naming the first request that is wrong.

    Args:
        requests: what is asked for.
        vocab: how many ids there are.
        length: slots of a row; a prompt must leave one.
        decode: needed by `stop_texts`.
    """
    if not len(requests):
        raise ValueError("no requests: the sampler needs at least one prompt")
    return [
        _check(index, request, vocab, length, decode is not None)
        for index, request in enumerate(requests)
    ]


def check_ids(ids: Any, vocab: int, what: str) -> np.ndarray:
    """`ids` as i32[n], or ValueError: `what` holds no token ids of this vocabulary."""
    array = np.asarray(ids)
    if array.size == 0:
        array = array.astype(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{what} must be a sequence of token ids, "
            f"got {array.dtype} of shape {list(array.shape)}: encode texts first"
        )
    wrong = np.flatnonzero((array < 0) | (array >= vocab))
    if len(wrong):
        raise ValueError(
            f"{what}: token id {int(array[wrong[0]])} at index {int(wrong[0])} is "
            f"outside the vocabulary, ids 0 to {vocab - 1}"
        )
    return array.astype(np.int32)


def _check(
    index: int, request: Request, vocab: int, length: int, decodes: bool
) -> np.ndarray:
    name = f"request {index}"
    prompt = check_ids(request.prompt, vocab, f"{name}: prompt")
    check_ids(request.stop_ids, vocab, f"{name}: stop_ids")
    if not len(prompt):
        raise ValueError(f"{name}: the prompt is empty, it needs at least 1 token")
    numbers = {
        "max_new_tokens": (request.max_new_tokens, 1, math.inf),
        "seed": (request.seed, 0, 2**64 - 1),
        "temperature": (request.temperature, 0.0, 1e30),
        "top_k": (request.top_k, 0, math.inf),
        "top_p": (request.top_p, 0.0, 1.0),
        "min_p": (request.min_p, 0.0, 1.0),
    }
    for key, (value, low, high) in numbers.items():
        if not low <= value <= high:  # also catches nan
            raise ValueError(f"{name}: {key} must be in [{low}, {high}], got {value}")
    for key in ("max_new_tokens", "seed", "top_k"):
        value = getattr(request, key)
        if not isinstance(value, int | np.integer):
            raise ValueError(f"{name}: {key} must be a whole number, got {value!r}")
    if 0 < request.temperature < COLDEST:
        raise ValueError(
            f"{name}: temperature must be 0 (the likeliest id) or at least {COLDEST}, "
            f"got {request.temperature}"
        )
    if request.top_p == 0:
        raise ValueError(f"{name}: top_p must be in (0, 1], got {request.top_p}")
    if isinstance(request.stop_texts, str) or not all(request.stop_texts):
        raise ValueError(
            f"{name}: stop_texts must be a tuple of texts that are not empty, "
            f"got {request.stop_texts!r}"
        )
    if request.stop_texts and not decodes:
        raise ValueError(
            f"{name}: stop_texts needs a sampler with decode=(ids -> text), "
            f"found {request.stop_texts!r} and no decode"
        )
    if len(prompt) >= length:
        raise ValueError(
            f"{name}: the prompt has {len(prompt)} tokens, at most {length - 1} leave "
            f"room for a response in the sampler's length of {length}"
        )
    return prompt
