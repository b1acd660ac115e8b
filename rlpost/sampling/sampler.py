"""The sampler: many requests through a few slots, with the law of every token drawn.

A slot is a row of the cache. Requests with the same prompt share its prefill; rows of
any length decode together in one compiled loop; finished rows leave and waiting ones
enter. What the host decides it decides from arrays that all processes hold.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlpost.sampling import agent, programs
from rlpost.sampling.requests import Request, check_requests
from rlpost.types import Cache, Finish, Params, Policy, Rollout

_log = logging.getLogger(__name__)

__all__ = ["Request", "Sampler", "Stats"]


@dataclasses.dataclass
class Stats:
    """What one call of `sample` did.

    Attributes:
        drawn: tokens that are in the rollout.
        slot_steps: slots times steps of the decode loop.
        prefilled: prompt and environment tokens read by extending a cache.
        copied: rows that took a prompt from another slot, or found it in their own.
        dispatches: runs of the decode loop, each with one wait for the device.
    """

    drawn: int = 0
    slot_steps: int = 0
    prefilled: int = 0
    copied: int = 0
    dispatches: int = 0

    @property
    def utilisation(self) -> float:
        """The share of slot-steps that gave a token of the rollout."""
        return self.drawn / max(self.slot_steps, 1)


@dataclasses.dataclass
class _Row:
    """A response on its way."""

    index: int
    request: Request
    key: bytes  # of the prompt
    tokens: list[int]
    mask: list[bool]
    logp: list[float]
    kept: list[float]
    prompt: int  # its length
    turn: int = 0  # where this turn's tokens begin
    read: int = 0  # tokens already searched for stop texts
    last: int = 0  # the last position this turn may fill
    finish: int = Finish.LENGTH

    def add(self, ids: Sequence[int], logp: Sequence[float], kept: Sequence[float]):
        self.tokens += ids
        self.mask += [True] * len(ids)
        self.logp += logp
        self.kept += kept

    def read_only(self, ids: Sequence[int]) -> None:
        """Append ids that the policy did not draw."""
        self.tokens += ids
        self.mask += [False] * len(ids)
        self.logp += [0.0] * len(ids)
        self.kept += [1.0] * len(ids)

    def cut(self, length: int) -> None:
        for values in (self.tokens, self.mask, self.logp, self.kept):
            del values[length:]  # type: ignore[attr-defined]

    def begin_turn(self, length: int) -> None:
        self.turn = self.read = len(self.tokens)
        self.last = min(self.turn - 1 + self.request.max_new_tokens, length - 1)


# A piece of a row to read into a slot's cache: (slot, first position, ids).
_Piece = tuple[int, int, list[int]]


class Sampler:
    """Draws responses of a policy; owns the compiled programs, and no parameters.

    Args:
        policy: of tokens; its cache is made for each call of `sample` and let go.
        slots: rows that decode together.
        length: slots of the cache per row: prompt, responses and environment together.
        decode: ids -> text, for stop texts.
        vocab: how many ids there are; None asks the policy.
        steps: tokens per run of the decode loop; the host looks at rows in between.
        text_steps: the same while some row has stop texts, since tokens drawn after
            the text are thrown away.
        refill: while requests wait, the loop ends once this share of the rows is done.
        prefill_tokens: at most so many in one prefill (at least one row).
        cache_sharding: sharding of the cache leaves [L, B, S, ...] (one, or a pytree of
            them), over the mesh on which the parameters lie; None leaves it to JAX.

    Raises:
        ValueError: if a size is not positive.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        slots: int,
        length: int,
        decode: Callable[[list[int]], str] | None = None,
        vocab: int | None = None,
        steps: int = 256,
        text_steps: int = 16,
        refill: float = 0.125,
        prefill_tokens: int = 2**14,
        cache_sharding: Any = None,
    ) -> None:
        sizes = {"slots": slots, "steps": steps, "text_steps": text_steps}
        for name, size in (sizes | {"length - 1": length - 1}).items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        self.policy, self.slots, self.length = policy, slots, length
        self.decode, self.vocab = decode, vocab
        self.steps, self.text_steps = min(steps, length), text_steps
        self.refill, self.prefill_tokens = refill, prefill_tokens
        self.stats = Stats()  # of the latest call
        # What the host reads lies whole on every process.
        shared = jax.tree.leaves(cache_sharding)
        everywhere = (
            jax.sharding.NamedSharding(shared[0].mesh, jax.sharding.PartitionSpec())
            if shared
            else None
        )
        self._make_cache = jax.jit(
            lambda: policy.init_cache(slots, length), out_shardings=cache_sharding
        )
        self._decode = jax.jit(
            functools.partial(programs.decode, policy, self.steps),
            static_argnums=0,
            donate_argnums=2,
            out_shardings=(cache_sharding, everywhere),
        )
        self._extend = jax.jit(
            functools.partial(programs.extend, policy),
            static_argnums=0,
            donate_argnums=2,
            out_shardings=cache_sharding,
        )
        self._copy = jax.jit(
            programs.copy,
            static_argnums=0,
            donate_argnums=1,
            out_shardings=cache_sharding,
        )

    def sample(
        self,
        params: Params,
        requests: Sequence[Request],
        *,
        version: int = 0,
        environment: agent.Environment | None = None,
        progress: Callable[[int, int, int], None] | None = None,
        on_error: Callable[[int, Exception], None] | None = None,
    ) -> Rollout:
        """Draw a response to every request.

        Args:
            params: of the policy.
            requests: in any order and number; the rollout's rows come in this order.
            version: of the weights, recorded.
            environment: asked whenever a turn ends, whatever its finish; if there is
                no room for what it appends and one token more, the row ends as LENGTH.
            progress: called with (rows finished, rows in all, tokens drawn) after each
                run of the decode loop.
            on_error: called with the index and what the environment raised; the row
                ends as ERROR and the others go on. None logs a warning.

        Returns:
            NumPy arrays, T the longest row.

        Raises:
            ValueError: naming the first request that is wrong, before any is sampled.
        """
        vocab = self.vocab or _vocabulary(self.policy, params)
        prompts = check_requests(
            requests, vocab=vocab, length=self.length, decode=self.decode
        )
        rows = [
            _begin(i, request, prompt, self.length)
            for i, (request, prompt) in enumerate(zip(requests, prompts, strict=True))
        ]
        filters = programs.Filters(
            greedy=any(r.temperature == 0 for r in requests),
            ranked=any(r.top_k > 0 or r.top_p < 1 for r in requests),
            floor=any(r.min_p > 0 for r in requests),
        )
        stops = _power(max(1, *(len(r.stop_ids) for r in requests)))
        waiting = collections.deque(rows)
        seats: list[_Row | None] = [None] * self.slots
        held: list[bytes | None] = [
            None
        ] * self.slots  # whose prompt a slot's cache has
        self.stats = stats = Stats()
        cache = self._make_cache()
        finished = 0
        while True:
            cache = self._admit(params, cache, waiting, seats, held)
            busy = [(slot, row) for slot, row in enumerate(seats) if row is not None]
            if not busy:
                break
            # Leave the loop early only for what can be done then.
            leave = max(1, int(len(busy) * self.refill))
            if environment is None:
                leave = min(leave, len(waiting))
            texts = any(row.request.stop_texts for _, row in busy)
            cache, drawn = self._decode(
                filters,
                params,
                cache,
                _table(self.slots, busy, stops, vocab),
                np.int32(self.text_steps if texts else self.steps),
                np.int32(len(busy) - leave if leave else 0),
            )
            drawn = jax.device_get(drawn)
            stats.dispatches += 1
            stats.slot_steps += int(drawn.steps) * self.slots
            pieces: list[_Piece] = []
            for slot, row in busy:
                if not self._collect(row, drawn, slot):
                    continue
                before = len(row.tokens)
                if environment and self._goes_on(row, environment, vocab, on_error):
                    ids = row.tokens[before - 1 : -1]
                    pieces.append((slot, before - 1, ids))
                    row.begin_turn(self.length)
                    continue
                seats[slot] = None
                finished += 1
            cache = self._fill(params, cache, pieces)
            stats.drawn = sum(sum(row.mask) for row in rows)
            if progress:
                progress(finished, len(rows), stats.drawn)
        return _rollout(rows, version)

    def _admit(
        self,
        params: Params,
        cache: Cache,
        waiting: collections.deque[_Row],
        seats: list[_Row | None],
        held: list[bytes | None],
    ) -> Cache:
        """Seat waiting rows in free slots, their prompts in the cache but for the last
        token, which the first step of decoding reads."""
        free = [slot for slot in range(self.slots) if seats[slot] is None]
        entering = [waiting.popleft() for _ in range(min(len(free), len(waiting)))]
        # First those whose prompt a free slot still holds, before it is overwritten.
        others = []
        for row in entering:
            slot = next((slot for slot in free if held[slot] == row.key), None)
            if slot is None:
                others.append(row)
                continue
            free.remove(slot)
            seats[slot] = row
            self.stats.copied += 1
        holder = {held[slot]: slot for slot in range(self.slots) if seats[slot]}
        pieces: list[_Piece] = []
        copies: list[tuple[int, int, int]] = []
        for row, slot in zip(others, free, strict=False):
            source = holder.setdefault(row.key, slot)
            if source == slot:
                pieces.append((slot, 0, row.tokens[: row.prompt - 1]))
            elif row.prompt > 1:
                copies.append((source, slot, row.prompt - 1))
                self.stats.copied += 1
            seats[slot], held[slot] = row, row.key
        cache = self._fill(params, cache, pieces)
        groups = _grouped(copies, lambda one: _power(one[2], self.length))
        for columns, group in groups:
            for part in _parts(group, self.slots):
                source, target = np.array([one[:2] for one in part], np.int32).T
                cache = self._copy(columns, cache, source, target)
        return cache

    def _fill(self, params: Params, cache: Cache, pieces: list[_Piece]) -> Cache:
        """Read pieces of rows into their slots' caches, equal shapes together."""

        def shape(piece: _Piece) -> tuple[int, int]:
            _, start, ids = piece
            end = start + len(ids)
            return _power(len(ids), self.length), _power(end, self.length)

        pieces = [piece for piece in pieces if piece[2]]
        for (width, columns), group in _grouped(pieces, shape):
            for part in _parts(group, max(1, self.prefill_tokens // width)):
                tokens = np.zeros((len(part), width), np.int32)
                positions = np.full((len(part), width), -1, np.int32)
                for i, (_, start, ids) in enumerate(part):
                    tokens[i, : len(ids)] = ids
                    positions[i, : len(ids)] = np.arange(start, start + len(ids))
                    self.stats.prefilled += len(ids)
                slots = np.array([piece[0] for piece in part], np.int32)
                cache = self._extend(columns, params, cache, slots, tokens, positions)
        return cache

    def _collect(self, row: _Row, drawn: programs.Drawn, slot: int) -> bool:
        """Take what a row drew; True (with its finish set) if the turn is over."""
        count = int(drawn.count[slot])
        row.add(
            drawn.tokens[slot, :count].tolist(),
            drawn.logp[slot, :count].tolist(),
            drawn.kept[slot, :count].tolist(),
        )
        stopped = row.tokens[-1] in row.request.stop_ids
        end = self._text_end(row)
        if end is not None and not (stopped and end == len(row.tokens)):
            row.cut(end)
            row.finish = Finish.TEXT
            return True
        row.finish = Finish.STOP if stopped else Finish.LENGTH
        return stopped or len(row.tokens) > row.last

    def _text_end(self, row: _Row) -> int | None:
        """How many tokens of the row complete a stop text; None if none does."""
        texts = row.request.stop_texts
        if not texts:
            return None
        assert self.decode is not None  # checked with the requests
        new = row.tokens[row.turn :]
        seen, row.read = row.read, len(row.tokens)
        whole = self.decode(new)
        if not any(text in whole for text in texts):
            return None
        for end in range(seen + 1 - row.turn, len(new)):
            start = self.decode(new[:end])
            if any(text in start for text in texts):
                return row.turn + end
        return len(row.tokens)

    def _goes_on(
        self,
        row: _Row,
        environment: agent.Environment,
        vocab: int,
        on_error: Callable[[int, Exception], None] | None,
    ) -> bool:
        """Let the environment answer; True if the row has another turn."""
        try:
            new = row.tokens[row.turn :]
            turn = agent.ask(environment, row.index, row.tokens, new, vocab)
        except Exception as error:
            row.finish = Finish.ERROR
            if on_error:
                on_error(row.index, error)
            else:
                _log.warning(
                    "the environment of request %d failed", row.index, exc_info=error
                )
            return False
        if turn is None:
            return False
        room = self.length - len(row.tokens)
        if turn.done:
            row.read_only(turn.tokens[:room])
            row.finish = Finish.ENVIRONMENT
        elif len(turn.tokens) >= room:
            row.finish = Finish.LENGTH
        else:
            row.read_only(turn.tokens)
            return True
        return False


def _vocabulary(policy: Policy, params: Params) -> int:
    one = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return jax.eval_shape(policy.apply, params, one)[0].size


def _begin(index: int, request: Request, prompt: np.ndarray, length: int) -> _Row:
    row = _Row(index, request, prompt.tobytes(), [], [], [], [], len(prompt))
    row.read_only(prompt.tolist())
    row.begin_turn(length)
    return row


def _table(
    slots: int, busy: Sequence[tuple[int, _Row]], stops: int, vocab: int
) -> programs.Rows:
    """What the decode loop reads of each slot; slots without a row are not active."""

    def column(value: Callable[[_Row], Any], dtype: Any, empty: Any) -> np.ndarray:
        array = np.full((slots, *np.shape(empty)), empty, dtype)
        for slot, row in busy:
            array[slot] = value(row)
        return array

    def stop(row: _Row) -> list[int]:
        ids = [int(i) for i in row.request.stop_ids]
        return ids + [-1] * (stops - len(ids))

    return programs.Rows(
        token=column(lambda row: row.tokens[-1], np.int32, 0),
        position=column(lambda row: len(row.tokens) - 1, np.int32, 0),
        last=column(lambda row: row.last, np.int32, 0),
        active=column(lambda row: True, np.bool_, False),
        seed=column(lambda row: divmod(row.request.seed, 2**32), np.uint32, (0, 0)),
        temperature=column(lambda row: row.request.temperature, np.float32, 1.0),
        top_p=column(lambda row: row.request.top_p, np.float32, 1.0),
        min_p=column(lambda row: row.request.min_p, np.float32, 0.0),
        top_k=column(lambda row: min(row.request.top_k, vocab), np.int32, 0),
        stop=column(stop, np.int32, (-1,) * stops),
    )


def _rollout(rows: Sequence[_Row], version: int) -> Rollout:
    longest = max(len(row.tokens) for row in rows)

    def table(name: str, dtype: Any, empty: Any) -> np.ndarray:
        array = np.full((len(rows), longest), empty, dtype)
        for i, row in enumerate(rows):
            array[i, : len(row.tokens)] = getattr(row, name)
        return array

    mask = table("mask", np.bool_, False)
    return Rollout(
        tokens=table("tokens", np.int32, 0),
        mask=mask,
        behavior_logp=table("logp", np.float32, 0.0),
        kept=table("kept", np.float32, 1.0),
        prompt_length=np.array([row.prompt for row in rows], np.int32),
        length=np.array([len(row.tokens) for row in rows], np.int32),
        temperature=np.array([row.request.temperature for row in rows], np.float32),
        version=np.full(len(rows), version, np.int32),
        finish=np.array([row.finish for row in rows], np.int32),
    )


def _power(n: int, most: int | None = None) -> int:
    """The next power of two, so that few shapes compile; at most `most`."""
    power = 1 << max(0, n - 1).bit_length()
    return power if most is None else min(max(power, 8), most)


def _grouped(
    items: Sequence[Any], key: Callable[[Any], Any]
) -> Iterator[tuple[Any, list[Any]]]:
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    yield from sorted(groups.items())


def _parts(items: list[Any], most: int) -> Iterator[list[Any]]:
    """Cut into parts of 1, 4, 16, ... items: few shapes, and no row of padding."""
    while items:
        size = 1
        while 4 * size <= min(len(items), most):
            size *= 4
        yield items[:size]
        items = items[size:]
