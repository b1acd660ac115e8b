"""What must hold for any objective, whatever it computes: `check_objective`.

A test of a new objective calls it once:

    def test_invariants():
        check_objective(my_method, numbers={"clip_low": 0.2}, batch=rollouts())

It runs the objective through the very functions of the train step, on a small network
over token ids with a reference beside it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlpost.distributions import Categorical
from rlpost.scores import token_scores
from rlpost.training import step as train
from rlpost.training.microbatches import split, stack
from rlpost.types import Batch, Mean, Objective, Policy, Scores, total

V, D = 13, 6
SPLIT_TOLERANCE = 1e-6  # of the largest entry of the gradient
HUGE_ID = 2**30


def network() -> Policy:
    """A policy whose law of the next token depends on the last two; 250 parameters."""

    def init(key):
        keys = jax.random.split(key, 3)
        shapes = {"embed": (V, D), "mix": (D, D), "head": (D, V)}
        return {
            name: jax.random.normal(k, shape)
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def apply(params, tokens, positions=None, cache=None, segments=None):
        x = params["embed"][tokens]
        before = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
        hidden = jnp.tanh(x + before @ params["mix"])
        return Categorical(hidden=hidden, head=params["head"], chunk=4), cache

    def init_cache(batch, length):
        raise NotImplementedError("this network is only scored")

    return Policy(init, apply, init_cache)


POLICY = network()
SCORE = token_scores(POLICY, {"reference": POLICY})
PARAMS = POLICY.init(jax.random.key(1))
FROZEN = {"reference": POLICY.init(jax.random.key(2))}


def rollouts(seed: int = 0, *, rows: int = 12, length: int = 9) -> Batch:
    """Rows as a sampler leaves them: ragged prompts, responses and groups, shuffled.

    One row could not be scored, one is padding through and through, one group has a
    single row. The behavior policy is near the network, the trainer's own old policy
    nearer still.
    """
    rng = np.random.default_rng(seed)
    prompt = rng.integers(1, 4, rows)
    end = np.minimum(prompt + rng.integers(1, length, rows), length)
    end[0] = length
    slots = np.arange(length)
    mask = (slots >= prompt[:, None]) & (slots < end[:, None])
    mask[3] = False
    reward = rng.integers(0, 3, rows) / 2.0
    reward[5] = np.nan
    group = rng.permutation(np.resize([0, 0, 0, 1, 1, 1, 1, 2, 4, 4, 4, 4], rows))
    tokens = np.where(slots < end[:, None], rng.integers(0, V, (rows, length)), 0)
    batch = Batch(
        mask=mask,
        tokens=tokens.astype(np.int32),
        length=end.astype(np.int32),
        reward=reward.astype(np.float32),
        group=group.astype(np.int32),
        temperature=rng.uniform(0.7, 1.3, rows).astype(np.float32),
        truncated=end == length,
        extras={"weight": rng.uniform(0.5, 2.0, rows).astype(np.float32)},
    )
    batch = jax.tree.map(jnp.asarray, batch)
    logp = SCORE(PARAMS, FROZEN, batch).logp

    def near(spread):
        return logp + spread * rng.normal(size=mask.shape).astype(np.float32)

    return batch.replace(behavior_logp=near(0.3), old_logp=near(0.2))


def preference_pairs(seed: int = 0, *, rows: int = 12) -> Batch:
    """Rollouts whose rows form pairs, mates apart from each other; row 3 is padding."""
    batch = rollouts(seed, rows=rows)
    real = np.random.default_rng(seed).permutation(np.delete(np.arange(rows), 3))
    pairs = len(real) // 2
    unit, preferred = np.full(rows, 99, np.int32), np.zeros(rows, bool)
    unit[real[: 2 * pairs]] = np.resize(np.arange(pairs), 2 * pairs)
    preferred[real[:pairs]] = True
    lone = real[2 * pairs :]  # an odd row out is padding too
    return batch.replace(
        reward=None,
        unit=jnp.array(unit),
        preferred=jnp.array(preferred),
        mask=batch.mask.at[lone].set(False),
    )


def check_objective(
    make: Callable[..., Objective],
    *,
    batch: Batch,
    numbers: dict | None = None,
) -> float:
    """Assert all that must hold of an objective.

    Padding is inert (nan, inf and absurd ids in it, more of it), any split into whole
    units gives one gradient, so do 1 and 8 devices and any order of rows, jit equals
    eager, numbers may be traced, an all-masked batch changes nothing, and half
    precision inputs are read as float32.

    Args:
        make: a factory; called with `numbers`.
        batch: not yet prepared, with every field that the objective needs.
        numbers: hyperparameters to hand over concrete and traced.

    Returns:
        The largest split error, as a share of the largest entry of the gradient.
    """
    numbers = dict(numbers or {})
    objective = make(**numbers)
    gradient = jax.jit(lambda batch: _gradient(objective, objective.prepare(batch)))
    whole, report = gradient(batch)
    size = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(whole))
    assert size > 0, "the gradient of the test batch is 0: it shows nothing"
    assert all(np.isfinite(value) for value in report.values()), report

    def same(other, what):
        return _same_gradient(whole, other, size, what)

    for poison in (np.nan, np.inf, -np.inf):
        dirty, dirty_report = gradient(_poisoned(batch, poison))
        same(dirty, f"{poison} in padding")
        _same_report(report, dirty_report, f"{poison} in padding")
    order = jnp.array(np.random.default_rng(1).permutation(batch.mask.shape[0]))
    same(gradient(batch.select(order))[0], "another order of rows")
    same(_traced(make, numbers, batch), "traced numbers")
    spread, spread_report = _on_devices(objective, batch)
    same(spread, "more padding, on 8 devices")
    _same_report(report, spread_report, "more padding, on 8 devices")

    worst = _check_splits(objective, batch, same)
    _check_raw_scores(objective, batch)
    _check_half_precision(objective, batch)
    return worst


def _gradient(objective, prepared):
    weights = train.loss_weights(objective, SCORE, PARAMS, FROZEN, prepared)
    held = jax.tree.map(lambda _: None, PARAMS)
    gradient, metrics = train.loss_gradient(
        objective, SCORE, PARAMS, held, FROZEN, prepared, weights
    )
    return gradient, {name: mean.value for name, mean in metrics.items()}


def _same_gradient(expected, actual, size, what):
    error = max(
        float(np.abs(np.asarray(a, np.float64) - np.asarray(e, np.float64)).max())
        for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    )
    assert error <= SPLIT_TOLERANCE * size, f"{what} moves the gradient: {error / size}"
    return error / size


def _same_report(expected, actual, what):
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(
            actual[name], value, rtol=1e-5, atol=1e-6, err_msg=f"{name}: {what}"
        )


def _poisoned(batch: Batch, value: float) -> Batch:
    """The value wherever no decision is: off the mask, and all over an empty row."""
    mask = np.asarray(batch.mask)
    empty = ~mask.any(-1)

    def dirty(x):
        x = np.asarray(x)
        if not np.issubdtype(x.dtype, np.floating):
            return x
        x = x.copy()
        x[~mask if x.shape[:2] == mask.shape else empty] = value
        return x

    batch = jax.tree.map(dirty, batch)
    slots = np.arange(mask.shape[1])
    past = (slots >= np.asarray(batch.length)[:, None]) | empty[:, None]
    return batch.replace(tokens=np.where(past, HUGE_ID, batch.tokens))


def _padded(batch: Batch, rows: int, slots: int) -> Batch:
    """More empty rows, filled with what another row holds, and more slots."""
    mask = batch.mask

    def grow(x):
        x = np.concatenate([np.asarray(x), np.asarray(x)[:rows]])
        if x.shape[1:2] == mask.shape[1:]:
            x = np.concatenate([x, np.repeat(x[:, :1], slots, axis=1)], axis=1)
        return x

    batch = jax.tree.map(grow, batch)
    real = np.pad(np.asarray(mask), ((0, rows), (0, slots)))
    return batch.replace(mask=real)


def _traced(make, numbers, batch):
    @jax.jit
    def gradient(numbers, batch):
        objective = make(**numbers)
        return _gradient(objective, objective.prepare(batch))[0]

    return gradient(jax.tree.map(jnp.float32, numbers), batch)


def _on_devices(objective, batch):
    devices = jax.devices()
    assert len(devices) == 8, "tests/conftest.py asks for eight host devices"
    rows = batch.mask.shape[0]
    batch = _padded(batch, rows=-rows % 8 or 8, slots=2)
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    over_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    batch = jax.device_put(batch, over_rows)
    return jax.jit(lambda b: _gradient(objective, objective.prepare(b)))(batch)


def _keep_gradient():
    """An optimiser that takes no step and remembers the gradient it was given."""

    def zeros(params):
        return jax.tree.map(jnp.zeros_like, params)

    return optax.GradientTransformation(
        zeros, lambda gradient, state, params=None: (zeros(gradient), gradient)
    )


def _check_splits(objective, batch, same):
    learner = train.learner(objective, SCORE, _keep_gradient())
    held = jax.tree.map(lambda _: None, PARAMS)
    prepared = jax.tree.map(np.asarray, learner.prepare(batch))
    rows, length = prepared.mask.shape
    rng = np.random.default_rng(0)

    def accumulated(parts, what):
        state, report = learner.update(learner.init(PARAMS), held, FROZEN, parts)
        assert report["gradient/applied"] == 1
        return same(state.opt_state, what)

    worst = 0.0
    units = _units(prepared)
    for size in range(max(map(len, units)), rows + 1):
        # Each part is filled up to all rows, so that one compilation serves all sizes.
        parts = [
            split(prepared.select(chosen), rows=rows, buckets=(length,))[0]
            for chosen in _filled([units[i] for i in rng.permutation(len(units))], size)
        ]
        worst = max(worst, accumulated(parts, f"{len(parts)} parts of {size} rows"))
    parts = split(prepared, rows=rows, buckets=(length // 2,))
    worst = max(worst, accumulated(parts, "microbatches of several lengths"))

    stacked = stack(split(prepared, rows=max(5, *map(len, units)), buckets=(length,)))
    state, report = learner.step(learner.init(PARAMS), held, FROZEN, stacked)
    assert report["gradient/applied"] == 1
    worst = max(worst, same(state.opt_state, "scanned microbatches"))

    nothing = stacked.replace(mask=np.zeros_like(stacked.mask))
    before = learner.init(PARAMS)
    after, report = learner.step(learner.init(PARAMS), held, FROZEN, nothing)
    jax.tree.map(np.testing.assert_array_equal, after, before)
    assert report["gradient/applied"] == 0
    assert report["gradient/norm"] == 0, "an all-masked batch has a gradient"
    for name, value in report.items():
        assert np.isfinite(value), f"{name} of an all-masked batch is {value}"
        if name.startswith("loss/"):
            assert value == 0, f"an all-masked batch has a loss: {name} {value}"
    return worst


def _units(batch):
    """The rows of each unit that has anything to learn from."""
    rows = np.flatnonzero(batch.mask.any(-1))
    if batch.unit is None:
        return [[row] for row in rows]
    return [rows[batch.unit[rows] == unit] for unit in np.unique(batch.unit[rows])]


def _filled(units, size):
    parts = [[]]
    for unit in units:
        if len(parts[-1]) + len(unit) > size:
            parts.append([])
        parts[-1].extend(unit)
    return [np.array(part) for part in parts]


def _check_raw_scores(objective, batch):
    """On arrays alone: jit equals eager, and padding reaches no value or derivative."""
    prepared = objective.prepare(batch)
    scores = SCORE(PARAMS, FROZEN, prepared)

    def eager(logp, scores):
        def loss(logp):
            return total(objective.loss(scores.replace(logp=logp), prepared)[0])

        return jax.value_and_grad(loss)(logp)

    gradient = jax.jit(eager)
    expected = gradient(scores.logp, scores)
    size = float(jnp.abs(expected[1]).max())
    plain = eager(scores.logp, scores)
    np.testing.assert_allclose(plain[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(plain[1], expected[1], rtol=0, atol=1e-6 * size)
    for poison in (np.nan, np.inf, -np.inf):

        def dirty(x, poison=poison):
            return jnp.where(prepared.mask, x, poison)

        frozen = {
            name: other.replace(logp=dirty(other.logp))
            for name, other in scores.frozen.items()
        }
        actual = gradient(dirty(scores.logp), scores.replace(frozen=frozen))
        for a, e in zip(actual, expected, strict=True):
            what = f"{poison} off the mask of raw scores"
            np.testing.assert_array_equal(a, e, err_msg=what)
    np.testing.assert_array_equal(expected[1][~prepared.mask], 0.0)


def _check_half_precision(objective, batch):
    """bfloat16 inputs give what their float32 copies give: losses are float32."""

    def cast(tree, dtype):
        return jax.tree.map(
            lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x,
            jax.tree.map(jnp.asarray, tree),
        )

    half = cast(batch, jnp.bfloat16)
    scores = SCORE(PARAMS, FROZEN, batch)
    logp = scores.logp.astype(jnp.bfloat16)

    def loss(batch, logp):
        prepared = objective.prepare(batch)
        given: Scores = scores.replace(logp=logp)
        return objective.loss(given, prepared)

    narrow = loss(half, logp)
    wide = loss(cast(half, jnp.float32), logp.astype(jnp.float32))
    for (path, a), e in zip(
        jax.tree_util.tree_leaves_with_path(narrow), jax.tree.leaves(wide), strict=True
    ):
        assert a.dtype == jnp.float32, f"{jax.tree_util.keystr(path)} is {a.dtype}"
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5)
    assert all(isinstance(t, Mean) for part in narrow for t in part.values())
