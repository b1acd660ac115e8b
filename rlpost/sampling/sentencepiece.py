"""SentencePiece's byte-pair encoding by scores, for GGUF files that hold no merges."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Sequence

SPACE = "\u2581"  # what the pieces write for a blank


def cutter(
    tokens: Sequence[str],
    scores: Sequence[float],
    *,
    whole: Sequence[int],
    control: Sequence[int],
    ordinary: Sequence[int],
    unknown: int | None,
    prefix: bool,
) -> Callable[[str, bool], list[int]]:
    """`(text, special) -> ids`.

    Starts from characters and keeps joining the two neighbours whose joint piece has
    the highest score, the leftmost of equals, until no joint piece exists. A character
    that is no piece is spelt in its UTF-8 bytes, `<0xE2>` and so on.

    Args:
        tokens, scores: the pieces, and what each is worth.
        whole: ids that the user defined; found in any text first, and never joined.
        control: ids found so only when `special` is asked for.
        ordinary: ids that joining may make.
        unknown: stands for a byte that has no piece.
        prefix: put a blank before a text, as if a word had come before it.

    Raises:
        ValueError: if the lengths differ; when encoding, if a byte has no piece and
            there is no `unknown`.

    References:
        Kudo and Richardson, SentencePiece, arXiv:1808.06226, section 3.
    """
    if len(scores) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens but {len(scores)} scores")
    joined = {tokens[i]: i for i in ordinary}
    spelt = {token: i for i, token in enumerate(tokens)}
    found_whole = _finder([tokens[i] for i in whole])
    found_control = _finder([tokens[i] for i in control])

    def spell(piece: str) -> list[int]:
        if piece in joined:
            return [joined[piece]]
        ids = [spelt.get(f"<0x{byte:02X}>", unknown) for byte in piece.encode()]
        if None in ids:
            raise ValueError(
                f"{piece!r} has no piece, nor have its bytes, nor is there an unknown"
            )
        return ids  # type: ignore[return-value]

    def cut_plain(text: str) -> list[int]:
        ids: list[int] = []
        text = (SPACE if prefix else "") + text.replace(" ", SPACE)
        for part, found in found_whole(text):
            if found:
                ids.append(spelt[part])
            else:
                for piece in _join(part, joined, scores):
                    ids += spell(piece)
        return ids

    def cut(text: str, special: bool) -> list[int]:
        parts = found_control(text) if special else [(text, False)] if text else []
        # After a control token a text begins anew, as llama.cpp reads these files.
        return [
            token
            for part, found in parts
            for token in ([spelt[part]] if found else cut_plain(part))
        ]

    return cut


def _finder(tokens: Sequence[str]) -> Callable[[str], list[tuple[str, bool]]]:
    """`(text) -> [(part, whether it is one of tokens), ...]`, the longest first."""
    longest_first = sorted(tokens, key=len, reverse=True)
    pattern = re.compile(f"({'|'.join(map(re.escape, longest_first))})")

    def find(text: str) -> list[tuple[str, bool]]:
        parts = pattern.split(text) if tokens else [text]  # tokens at odd places
        return [(part, i % 2 == 1) for i, part in enumerate(parts) if part]

    return find


def _join(text: str, vocabulary: dict[str, int], scores: Sequence[float]) -> list[str]:
    """The text cut into pieces (or characters that are none)."""
    pieces: list[str] = list(text)
    before = list(range(-1, len(pieces) - 1))
    after = list(range(1, len(pieces) + 1))
    candidates: list[tuple[float, int, int, str]] = []

    def consider(left: int, right: int) -> None:
        if left >= 0 and right < len(pieces):
            both = pieces[left] + pieces[right]
            if both in vocabulary:
                rank = -scores[vocabulary[both]]
                heapq.heappush(candidates, (rank, left, right, both))

    for left in range(len(pieces) - 1):
        consider(left, left + 1)
    while candidates:
        _, left, right, both = heapq.heappop(candidates)
        # Either half may have been joined otherwise since: then it reads differently.
        if not pieces[left] or pieces[left] + pieces[right] != both:
            continue
        if after[left] != right:
            continue
        pieces[left], pieces[right] = both, ""
        after[left] = after[right]
        if after[right] < len(pieces):
            before[after[right]] = left
        consider(before[left], left)
        consider(left, after[left])
    return [piece for piece in pieces if piece]
