"""Compare an objective with an independent calculation of it in float64 NumPy.

`check_twin` asks both for the loss of the same rows and for its derivative by every
logit: ours by autodiff in float32, the twin's by central differences.
"""

from collections.abc import Callable
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from rlpost.distributions import Categorical
from rlpost.types import Batch, Objective, Scores, total

B, T, V = 6, 4, 3


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def rows(seed: int = 0) -> SimpleNamespace:
    """Six ragged rows in two groups, one of them unscorable; all float64 NumPy.

    `logits` [B, T, V] are the variable; `behavior`, `old`, `reference` [B, T] log-probs
    of the tokens; `reference_all` [B, T, V] the reference's laws.
    """
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(B, T, V))
    reference_all = log_softmax(rng.normal(size=(B, T, V)))
    tokens = rng.integers(0, V, (B, T))
    logp = pick(log_softmax(logits), tokens)
    return SimpleNamespace(
        logits=logits,
        tokens=tokens,
        mask=np.arange(T) < np.array([4, 1, 3, 2, 4, 3])[:, None],
        reward=np.array([1.0, 0.0, 0.5, np.nan, 1.0, 0.0]),
        group=np.array([7, 2, 7, 2, 2, 2]),
        behavior=logp + 0.3 * rng.normal(size=(B, T)),
        old=logp + 0.2 * rng.normal(size=(B, T)),
        reference=pick(reference_all, tokens),
        reference_all=reference_all,
        truncated=np.array([True, False, False, False, False, True]),
    )


def pick(logp_all: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return np.take_along_axis(logp_all, tokens[..., None], -1)[..., 0]


def batch_of(data: SimpleNamespace, **fields) -> Batch:
    """The rows as a Batch, without `old_logp` unless it is given in `fields`."""
    given = {
        "mask": data.mask,
        "tokens": data.tokens.astype(np.int32),
        "reward": data.reward.astype(np.float32),
        "group": data.group.astype(np.int32),
        "behavior_logp": data.behavior.astype(np.float32),
        "truncated": data.truncated,
    }
    return Batch(**jax.tree.map(jnp.asarray, given | fields))


def scores_of(logits: jax.Array, data: SimpleNamespace) -> Scores:
    law = Categorical(logits=logits)
    reference = Scores(
        logp=jnp.array(data.reference, jnp.float32),
        distribution=Categorical(logits=jnp.array(data.reference_all, jnp.float32)),
    )
    return Scores(
        logp=law.logp(jnp.array(data.tokens)),
        distribution=law,
        frozen={"reference": reference},
    )


def check_twin(
    objective: Objective,
    twin: Callable[[np.ndarray, np.ndarray], float],
    data: SimpleNamespace,
    batch: Batch | None = None,
) -> None:
    """Assert that loss and gradient are the twin's, to float32 rounding.

    Args:
        objective: ours.
        twin: (logp [B, T] of the tokens, logp_all [B, T, V]) to the loss.
        data: from `rows`.
        batch: what to prepare; default `batch_of(data)`.
    """
    prepared = objective.prepare(batch_of(data) if batch is None else batch)

    def ours(logits):
        return total(objective.loss(scores_of(logits, data), prepared)[0])

    def theirs(logits):
        logp_all = log_softmax(logits)
        return twin(pick(logp_all, data.tokens), logp_all)

    value, gradient = jax.value_and_grad(ours)(jnp.array(data.logits, jnp.float32))
    np.testing.assert_allclose(value, theirs(data.logits), rtol=1e-5, atol=1e-6)
    expected = differences(theirs, data.logits)
    assert np.abs(expected).max() > 1e-3, "a twin without gradient shows nothing"
    np.testing.assert_allclose(gradient, expected, atol=3e-6 * np.abs(expected).max())


def differences(f: Callable, x: np.ndarray, step: float = 1e-5) -> np.ndarray:
    """The gradient of f at x by central differences, float64."""
    gradient = np.zeros_like(x)
    for index in np.ndindex(*x.shape):
        up, down = x.copy(), x.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (f(up) - f(down)) / (2 * step)
    return gradient
