"""Rewards made of rewards; every part is kept for the log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rlpost.rewards.types import Parts, Reward, Sample, reward_of


def weighted(parts: Mapping[str, tuple[float, Reward]]) -> Reward:
    """The weighted sum of rewards.

    `reward = sum_i w_i r_i` over the parts whose weight is not 0; those of weight 0 are
    computed and logged, but a nan there does not make the row unscorable.

    Args:
        parts: {name: (weight, reward)}; a weight may be negative.

    Returns:
        A reward giving "reward", each part under its name, and the parts of a part that
        has several as "name/part".

    Raises:
        ValueError: if there are no parts, one is called "reward", or a weight is not
            finite.
    """
    if not parts:
        raise ValueError("a weighted reward needs at least one part")
    if "reward" in parts:
        raise ValueError("a part may not be called 'reward': that is the sum's name")
    for name, (weight, _) in parts.items():
        if not np.isfinite(weight):
            raise ValueError(f"the weight of {name!r} must be finite, got {weight}")

    def reward(samples: Sequence[Sample]) -> Parts:
        total = np.zeros(len(samples), np.float32)
        out: Parts = {}
        for name, (weight, function) in parts.items():
            given = function(samples)
            own = reward_of(given)
            if weight != 0:  # 0 * nan is nan
                total += np.float32(weight) * own
            out[name] = own
            if len(given) > 1:
                out |= {f"{name}/{part}": value for part, value in given.items()}
        return {"reward": total, **out}

    return reward


def gate(
    condition: Callable[[Sequence[Sample]], Mapping[str, np.ndarray]],
    reward: Reward,
    *,
    closed: float = 0.0,
) -> Reward:
    """A reward that only samples meeting a condition can earn.

    Args:
        condition: a reward whose value above 0 opens the gate; nan leaves the row
            unscorable.
        reward: asked of the samples that pass, and of no others: a costly judge is
            spared the rest.
        closed: what the others get, in the reward's unit.

    Returns:
        A reward giving "reward", "gate" (0, 1 or nan) and the parts of `reward`, nan
        where they were not asked.
    """

    def gated(samples: Sequence[Sample]) -> Parts:
        opens = reward_of(condition(samples))
        passes = np.flatnonzero(opens > 0)
        total = np.where(np.isnan(opens), np.nan, closed).astype(np.float32)
        state = np.where(np.isnan(opens), np.nan, opens > 0).astype(np.float32)
        out: Parts = {"reward": total, "gate": state}
        if len(passes) or not len(samples):  # with none it may still do its imports
            given = reward([samples[int(i)] for i in passes])
            total[passes] = reward_of(given)
            for name, value in given.items():
                if name not in out:
                    out[name] = np.full(len(samples), np.nan, np.float32)
                    out[name][passes] = value
        return out

    return gated
