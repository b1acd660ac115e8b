"""The train step against the gradient of the whole batch, in any split."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlpost.models.paths import join, partition
from rlpost.training import microbatches
from rlpost.training.sharding import constrain_like, shard_params, shard_rows
from rlpost.training.step import TrainState, apply_gradient, ema, learner
from rlpost.types import Batch, Mean, Objective, Scores

ROWS, SLOTS, VOCAB = 12, 7, 5


def params(key=0):
    first, second = jax.random.split(jax.random.key(key))
    return {
        "embed": jax.random.normal(first, (VOCAB, 8)),
        "head": jax.random.normal(second, (8, VOCAB)),
    }


def score(params, frozen, batch):
    """A bigram model: enough of a network to have gradients that can be wrong."""
    hidden = jnp.tanh(params["embed"][jnp.where(batch.mask, batch.tokens, 0)])
    logits = jnp.pad(hidden[:, :-1], ((0, 0), (1, 0), (0, 0))) @ params["head"]
    logp = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(logp, batch.tokens[..., None], axis=-1)[..., 0]
    return Scores(logp=jnp.where(batch.mask, picked, 0.0))


def batch(seed=0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, SLOTS + 1, ROWS)
    slots = np.arange(SLOTS)
    return Batch(
        mask=(slots >= 1) & (slots < lengths[:, None]),
        tokens=rng.integers(0, VOCAB, (ROWS, SLOTS)).astype(np.int32),
        length=lengths.astype(np.int32),
        advantage=rng.normal(size=(ROWS, SLOTS)).astype(np.float32),
    )


def two_terms(coefficient=0.3):
    """A token mean, a mean whose denominator depends on the scores, and a plain sum."""

    def loss(scores, batch):
        x = jnp.where(batch.mask, -scores.logp * batch.advantage, 0.0)
        likely = batch.mask & (jax.lax.stop_gradient(scores.logp) > -1.6)
        y = jnp.where(likely, scores.logp**2, 0.0)
        terms = {
            "policy": Mean(x.sum(), batch.mask.sum() * 1.0),
            "likely": Mean(coefficient * y.sum(), likely.sum() * 1.0),
            "sum": Mean(1e-2 * y.sum()),
        }
        return terms, {"logp": Mean(scores.logp.sum(), batch.mask.sum() * 1.0)}

    return Objective(lambda batch: batch, loss)


def whole_gradient(tree, data, objective):
    def loss(tree):
        terms, _ = objective.loss(score(tree, {}, data), data)
        return sum(term.value for term in terms.values())

    return jax.grad(loss)(tree)


def descend(objective, **kwargs):
    """A learner whose step of size 1 shows the gradient: new = old - gradient."""
    return learner(objective, score, optax.sgd(1.0), **kwargs)


def gradient_of(before, state):
    return jax.tree.map(lambda a, b: a - b, before, state.params)


def agree(actual, expected, tolerance=1e-6):
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected))
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * largest, rtol=0)


@pytest.mark.parametrize("rows", [1, 5, 12])
def test_any_split_gives_the_gradient_of_the_whole(rows):
    data, tree, objective = batch(), params(), two_terms()
    learn = descend(objective)
    parts = microbatches.split(data, rows=rows, buckets=[4, SLOTS])
    state, metrics = learn.update(learn.init(tree), {}, {}, parts)
    # float32 rounding of p - (p - g), with p about 1, adds to that of the gradient.
    agree(gradient_of(tree, state), whole_gradient(tree, data, objective), 3e-6)
    whole = objective.loss(score(tree, {}, data), data)
    np.testing.assert_allclose(
        metrics["loss/likely"], whole[0]["likely"].value, rtol=1e-5
    )
    np.testing.assert_allclose(metrics["logp"], whole[1]["logp"].value, rtol=1e-5)
    assert int(state.step) == 1


@pytest.mark.parametrize("n", [1, 2, 4])
def test_scanned_microbatches_give_the_same(n):
    data, tree, objective = batch(), params(), two_terms()
    learn = descend(objective)
    stacked = jax.tree.map(lambda x: x.reshape(n, -1, *x.shape[1:]), data)
    state, _ = learn.step(learn.init(tree), {}, {}, stacked)
    agree(gradient_of(tree, state), whole_gradient(tree, data, objective), 3e-6)


def test_eight_devices_give_the_gradient_of_one(mesh):
    data, tree, objective = batch(), params(), two_terms()
    rules = ((r"embed$", jax.sharding.PartitionSpec(None, "tensor")),)
    learn = descend(objective, constrain=constrain_like(mesh, rules))
    sharded = learn.init(shard_params(tree, mesh, rules))
    assert not sharded.params["embed"].sharding.is_fully_replicated
    state, _ = learn.update(sharded, {}, {}, [shard_rows(data, mesh)])
    agree(gradient_of(tree, state), whole_gradient(tree, data, objective), 3e-6)
    assert state.params["embed"].sharding.spec == rules[0][1]


def weights_program(objective):
    """The compiled first pass, as text."""
    from rlpost.training.step import loss_weights

    def weigh(tree, data):
        return loss_weights(objective, score, tree, {}, data)

    return jax.jit(weigh).lower(params(), batch()).compile().as_text()


def test_the_first_pass_holds_no_model_unless_a_weight_depends_on_it():
    def loss(scores, batch):
        x = jnp.where(batch.mask, -scores.logp, 0.0)
        return {"x": Mean(x.sum(), batch.mask.sum() * 1.0)}, {}

    plain = weights_program(Objective(lambda b: b, loss))
    assert "dot(" not in plain
    assert "tanh" not in plain
    # The same test can see a model: the denominator of `likely` needs the scores.
    assert "tanh" in weights_program(two_terms())


def test_a_batch_with_nothing_to_learn_changes_nothing():
    tree = params()
    learn = learner(two_terms(), score, optax.adam(0.1))
    state, _ = learn.update(learn.init(tree), {}, {}, [batch()])  # momentum to move on
    before = jax.tree.map(np.asarray, state)
    empty = batch().replace(mask=np.zeros((ROWS, SLOTS), bool))
    state, metrics = learn.update(state, {}, {}, [empty])
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, state))
    assert metrics["gradient/applied"] == 0
    assert metrics["gradient/finite"] == 1


def test_a_plain_sum_is_learnt_where_another_term_weighs_nothing():
    def loss(scores, batch):
        kept = jnp.sum(jnp.where(batch.mask, -scores.logp, 0.0))
        return {"sum": Mean(kept), "none": Mean(0.0 * kept, jnp.zeros(()))}, {}

    objective, data, tree = Objective(lambda b: b, loss), batch(), params()
    learn = descend(objective)
    state, metrics = learn.update(learn.init(tree), {}, {}, [data])
    assert metrics["gradient/applied"] == 1
    agree(gradient_of(tree, state), whole_gradient(tree, data, objective), 3e-6)


def test_a_gradient_that_is_not_finite_changes_nothing():
    state = TrainState(params(), optax.adam(0.1).init(params()), jnp.int32(3))
    broken = jax.tree.map(jnp.zeros_like, params())
    broken["head"] = broken["head"].at[0, 0].set(jnp.nan)
    after, report = apply_gradient(optax.adam(0.1), state, broken, jnp.array(True))
    jax.tree.map(np.testing.assert_array_equal, after, state)
    assert report["gradient/finite"] == 0
    assert report["gradient/applied"] == 0


def test_what_is_held_stays_and_needs_no_gradient():
    tree = params()
    trained, held = partition(tree, r"^head$")
    learn = descend(two_terms())
    state, _ = learn.update(learn.init(trained), held, {}, [batch()])
    assert state.params["embed"] is None
    after = join(state.params, held)
    np.testing.assert_array_equal(after["embed"], tree["embed"])
    assert np.abs(after["head"] - tree["head"]).max() > 1e-3


def test_the_first_parameters_survive_the_donated_step():
    tree = params()
    learn = descend(two_terms())
    before = np.asarray(tree["head"])
    learn.update(learn.init(tree), {}, {}, [batch()])
    np.testing.assert_array_equal(tree["head"], before)


def test_a_decision_moves_a_coefficient_without_compiling_again():
    traces = []

    def objective(decision):
        traces.append(decision)
        return two_terms(decision["coefficient"])

    tree, data = params(), batch()
    learn = descend(objective)
    for coefficient in (0.0, 0.3, 2.0):
        decision = {"coefficient": jnp.float32(coefficient)}
        state, _ = learn.update(learn.init(tree), {}, {}, [data], decision)
        expected = whole_gradient(tree, data, two_terms(coefficient))
        agree(gradient_of(tree, state), expected, 3e-6)
        if coefficient == 0.0:
            first = len(traces)
    assert len(traces) == first


def test_exponential_average_by_hand():
    # 0.9 * 1 + 0.1 * 3 = 1.2, in the average's own dtype.
    average = {"w": jnp.ones(2, jnp.bfloat16)}
    new = ema(average, {"w": 3 * jnp.ones(2)}, 0.9)
    np.testing.assert_allclose(new["w"].astype(np.float32), 1.2, rtol=1e-2)
    assert new["w"].dtype == jnp.bfloat16


def test_an_update_without_microbatches_is_refused():
    learn = descend(two_terms())
    with pytest.raises(ValueError, match="at least one microbatch"):
        learn.update(learn.init(params()), {}, {}, [])
