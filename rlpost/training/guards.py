"""Guards of a run: what must hold is checked while it runs, from replicated values.

Checks of one moment are functions that raise `GuardError`. `Guards` watches a run from
step to step: steps that are not finite, rewards that fail, rewards that say nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlpost.scores import real_slots
from rlpost.training.dumps import dump
from rlpost.types import Array, Batch, Objective, Params, Score, total

# Gaps in nats between two programs that compute the same log-probs: (mean, largest).
# float32 has room for another order of sums over a real model (1e-5 and 1e-4 seen);
# a bfloat16 logit near 16 is itself only known to 0.06.
GAPS = {"float32": (1e-4, 1e-3), "bfloat16": (0.05, 1.0), "float16": (0.01, 0.2)}
MOST_DUMPS = 10  # of batches; a run of days must not fill the disk with them


class GuardError(RuntimeError):
    """Something that must hold in a run does not."""


def check_ratio(
    logp: Array,
    behavior_logp: Array,
    mask: Array,
    *,
    dtype: Any = jnp.float32,
    gaps: tuple[float, float] | None = None,
) -> dict[str, float]:
    """Before the first update every ratio must be 1: two programs, the same law.

    For rollouts drawn with the trainer's weights, at its dtype.

    Args:
        logp: f32[B, T], of the trainer.
        behavior_logp: f32[B, T], of the sampler, of the full vocabulary.
        mask: bool[B, T].
        dtype: that both compute in, which sets the gaps to expect.
        gaps: (mean, largest) in nats to allow instead.

    Returns:
        Metrics "guard/ratio_mean" and "guard/ratio_largest", the gaps in nats.

    Raises:
        GuardError: if they are larger, or a log-prob is not finite.
    """
    expected = gaps or GAPS[jnp.dtype(dtype).name]
    gap = np.where(mask, np.abs(np.asarray(logp) - np.asarray(behavior_logp)), 0.0)
    mean = float(gap.sum() / max(int(np.sum(mask)), 1))
    row, slot = np.unravel_index(np.argmax(gap), gap.shape)  # nan counts as largest
    largest = float(gap[row, slot])
    if not (mean <= expected[0] and largest <= expected[1]):
        raise GuardError(
            "the trainer's log-probs (training's score of the batch) differ from the "
            "sampler's (behavior_logp of the rollout) though the weights are the same: "
            f"mean {mean:.3g}, largest {largest:.3g} nats at row {row}, slot {slot} "
            f"(trainer {float(logp[row, slot]):.6g}, sampler "
            f"{float(behavior_logp[row, slot]):.6g}); at most {expected[0]:g} and "
            f"{expected[1]:g} are expected in {jnp.dtype(dtype).name}. Look for "
            "another temperature, cut support, positions, padding or stale weights"
        )
    return {"guard/ratio_mean": mean, "guard/ratio_largest": largest}


def scramble_padding(batch: Batch, vocabulary: int) -> Batch:
    """The batch with other tokens in its padding, and nan off its mask.

    Args:
        batch: with tokens.
        vocabulary: ids are below it.
    """
    inside = real_slots(batch)
    tokens = batch.need("tokens")
    changed = {"tokens": jnp.where(inside, tokens, (tokens + 1) % vocabulary)}
    for name in ("advantage", "behavior_logp", "old_logp"):
        value = getattr(batch, name)
        if value is not None:
            changed[name] = jnp.where(batch.mask, value, jnp.nan)
    return batch.replace(**changed)


def check_padding(
    score: Score,
    params: Params,
    frozen: Mapping[str, Params],
    batch: Batch,
    *,
    vocabulary: int,
    objective: Objective | None = None,
    tolerance: float = 1e-6,
) -> None:
    """What stands in padding must change neither log-probs nor the loss.

    Args:
        score, params, frozen, batch: as the train step has them; a few rows suffice.
        vocabulary: token ids are below it.
        objective: also compare its loss on the (prepared) batch.
        tolerance: of the largest gap, in nats and in units of the loss.

    Raises:
        GuardError: naming what changed, where, and by how much.
    """

    @jax.jit
    def look(params: Params, frozen: Mapping[str, Params], batch: Batch):
        scores = score(params, frozen, batch)
        if objective is None:
            return scores.logp, jnp.zeros(())
        return scores.logp, total(objective.loss(scores, batch)[0])

    clean, loss = look(params, frozen, batch)
    other, other_loss = look(params, frozen, scramble_padding(batch, vocabulary))
    gap = np.where(batch.mask, np.abs(np.asarray(clean) - np.asarray(other)), 0.0)
    row, slot = np.unravel_index(np.argmax(gap), gap.shape)
    if not gap[row, slot] <= tolerance:
        raise GuardError(
            "other tokens in the padding changed the score of a sampled token: row "
            f"{row}, slot {slot} went from {float(clean[row, slot]):.6g} to "
            f"{float(other[row, slot]):.6g} nats. The policy attends to padding, or "
            "counts positions over it"
        )
    if not np.abs(float(loss) - float(other_loss)) <= tolerance:
        raise GuardError(
            f"nan in the padding changed the loss from {float(loss):.6g} to "
            f"{float(other_loss):.6g}: the objective reads what its mask leaves out "
            "(select before you multiply: 0 * nan is nan)"
        )


@jax.jit
def fingerprint(params: Params) -> Array:
    """u32[leaves]: a sum over each leaf's bits, each weighed by its place.

    Exact, hence the same for any sharding; one pass over the weights.
    """

    def of(x: Array) -> Array:
        bits = x
        if jnp.issubdtype(x.dtype, jnp.floating):
            width = min(jnp.dtype(x.dtype).itemsize * 8, 32)
            bits = jax.lax.bitcast_convert_type(x, f"uint{width}")
        bits = bits.astype(jnp.uint32)
        place, stride = jnp.uint32(1), 2  # odd weights: no bit of an entry is lost
        for axis in reversed(range(bits.ndim)):
            iota = jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
            place = place + iota * jnp.uint32(stride % 2**32)
            stride *= bits.shape[axis]
        return jnp.sum(bits * place, dtype=jnp.uint32)

    sums = [of(x) for x in jax.tree.leaves(params)]
    return jnp.stack(sums) if sums else jnp.zeros(0, jnp.uint32)


def check_synced(trainer: Params, sampler: Params) -> None:
    """After a sync the sampler must hold the trainer's weights, at its own dtype.

    Args:
        trainer, sampler: trees of the same structure; the trainer's leaves are compared
            after a cast to the sampler's dtypes.

    Raises:
        GuardError: naming the first leaves that differ.
    """
    structures: list[Any] = [jax.tree.structure(tree) for tree in (trainer, sampler)]
    if structures[0] != structures[1]:
        raise GuardError("the sampler's parameters have another structure")
    cast = jax.jit(lambda a, b: jax.tree.map(lambda x, y: x.astype(y.dtype), a, b))
    ours = np.asarray(fingerprint(cast(trainer, sampler)))
    theirs = np.asarray(fingerprint(sampler))
    if (ours != theirs).any():
        paths = [
            jax.tree_util.keystr(path, simple=True, separator="/")
            for path, _ in jax.tree_util.tree_flatten_with_path(sampler)[0]
        ]
        wrong = [path for path, bad in zip(paths, ours != theirs, strict=True) if bad]
        raise GuardError(
            f"after a sync {len(wrong)} of {len(paths)} leaves of the sampler are not "
            f"the trainer's: {', '.join(wrong[:5])}"
        )


class Guards:
    """What a run watches from step to step; a host structure of its checkpoints.

    Args:
        dumps: folder for batches that gave a step that is not finite; None dumps none.
        nonfinite: raise after so many such steps in a row.
        silent: warn after so many steps in a row without any signal in the rewards.
    """

    def __init__(
        self, dumps: Path | None = None, *, nonfinite: int = 5, silent: int = 10
    ):
        self._dumps = dumps
        self._nonfinite = nonfinite
        self._silent = silent
        self._counts = dict.fromkeys(
            ("nonfinite", "nonfinite_in_a_row", "failed", "silent_in_a_row"), 0
        )
        self._errors: list[dict[str, Any]] = []

    def rewards(self, reward: Any, group: Any = None) -> dict[str, float]:
        """Look at the rewards of a rollout.

        Args:
            reward: f32[B] over all processes, nan where unscorable.
            group: i32[B]; None takes all rows as one group.

        Returns:
            Metrics: "guard/failed" (rewards without a score, so far), "guard/signal"
            (share of the groups whose rewards differ).
        """
        reward = np.asarray(reward, np.float64)
        group = np.zeros(len(reward), int) if group is None else np.asarray(group)
        scored = np.isfinite(reward)
        self._counts["failed"] += int(np.sum(~scored))
        if len(reward) and not scored.any():
            self._note("reward", "no response could be scored: nothing is learnt")
        names = np.unique(group)
        told = [reward[scored & (group == name)] for name in names]
        share = float(np.mean([len(r) > 1 and np.ptp(r) > 0 for r in told] or [0.0]))
        silent = self._counts["silent_in_a_row"] = (
            0 if share > 0 else self._counts["silent_in_a_row"] + 1
        )
        if silent and silent % self._silent == 0:
            values = np.unique(reward[scored])
            known = f", all {values[0]:g}" if len(values) == 1 else ""
            self._note(
                "no signal",
                f"for {silent} steps all rewards within a group were equal{known}: "
                "nothing is learnt. The task is too easy or too hard for the policy, "
                "or the reward does not read the responses",
            )
        return {"guard/failed": self._counts["failed"], "guard/signal": share}

    def update(self, step: int, finite: Any, batch: Any = None) -> dict[str, float]:
        """Look at a train step that skipped itself if its gradient was not finite.

        Args:
            step: which; names the dump.
            finite: whether all its updates were finite, a bool or a 0/1 scalar.
            batch: a pytree of arrays to dump if not.

        Returns:
            Metrics: "guard/nonfinite", steps skipped so far.

        Raises:
            GuardError: after too many in a row.
        """
        if bool(np.asarray(finite)):
            self._counts["nonfinite_in_a_row"] = 0
            return {"guard/nonfinite": self._counts["nonfinite"]}
        self._counts["nonfinite"] += 1
        self._counts["nonfinite_in_a_row"] += 1
        row, where = self._counts["nonfinite_in_a_row"], ""
        room = self._counts["nonfinite"] <= MOST_DUMPS
        if self._dumps is not None and batch is not None and room:
            where = f"; its batch is in {dump(self._dumps, step, batch)}"
        message = f"the gradient of step {step} is not finite: the step was skipped"
        self._note("nonfinite", message + where)
        if row >= self._nonfinite:
            raise GuardError(
                f"{row} steps in a row had a gradient that is not finite{where}"
            )
        return {"guard/nonfinite": self._counts["nonfinite"]}

    def take_errors(self) -> list[dict[str, Any]]:
        """What was noted since the last call, for a `Report`."""
        errors, self._errors = self._errors, []
        return errors

    def get_state(self) -> dict[str, Any]:
        """The counts."""
        return dict(self._counts)

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from these counts."""
        self._counts = dict(state)

    def _note(self, kind: str, message: str) -> None:
        self._errors.append({"kind": kind, "message": message})
