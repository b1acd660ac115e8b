import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlpost.controllers import constant, moving_baseline, schedule
from rlpost.training.checkpoints import Checkpoints

KEY = jax.random.key(0)


def test_a_constant_decides_the_same_always():
    controller = constant({"clip": 0.2})
    state = controller.update(controller.init(), {"kl": 3.0})
    assert controller.decide(state, None, KEY) == {"clip": 0.2}
    assert jax.tree.leaves(state) == []


def test_a_schedule_is_that_of_optax_counted_in_updates():
    value = optax.linear_schedule(1.0, 0.0, 4)
    controller = schedule(lambda n: {"kl": value(n)})
    state, seen = controller.init(), []
    for _ in range(6):
        seen.append(float(controller.decide(state, None, KEY)["kl"]))
        state = controller.update(state, None)
    assert seen == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_a_baseline_by_hand():
    # decay 0.5; key 0 sees means 1, then 0: total 0.5 -> 0.25, weight 0.5 -> 0.75, so
    # 1 -> 1/3. Key 1 sees 2 once. Key 2 has a reward that is nan, key 9 is no key.
    controller = moving_baseline(3, 0.5, initial=-1.0)
    state = controller.init()
    keys = jnp.array([0, 1, 2, 3, 9, -1])
    np.testing.assert_array_equal(controller.decide(state, keys, KEY), -1.0)
    rewards = jnp.array([1.0, 2.0, jnp.nan, 5.0])
    state = controller.update(state, (jnp.array([0, 1, 2, 9]), rewards))
    decided = controller.decide(state, keys, KEY)
    np.testing.assert_allclose(decided, [1.0, 2.0, -1.0, -1.0, -1.0, -1.0])
    state = controller.update(state, (jnp.array([0, 0]), jnp.array([1.0, -1.0])))
    np.testing.assert_allclose(
        controller.decide(state, keys[:3], KEY), [1 / 3, 2.0, -1.0], rtol=1e-6
    )


def twin(size, decay, initial, batches):
    """The same in float64 NumPy: each key's own list, weighed from its end."""
    seen = [[] for _ in range(size)]
    for keys, rewards in batches:
        for key in range(size):
            mine = [r for k, r in zip(keys, rewards, strict=True) if k == key]
            mine = [r for r in mine if not np.isnan(r)]
            if mine:
                seen[key].append(np.mean(mine))
    weights = [decay ** np.arange(len(means))[::-1] for means in seen]
    return [
        np.average(means, weights=w) if means else initial
        for means, w in zip(seen, weights, strict=True)
    ]


def test_a_baseline_against_lists_of_means_and_jit_against_eager():
    rng = np.random.default_rng(0)
    batches = [
        (
            rng.integers(0, 5, 7),
            np.where(rng.random(7) < 0.2, np.nan, rng.normal(size=7)),
        )
        for _ in range(12)
    ]
    controller = moving_baseline(6, 0.8, initial=0.5)
    eager, compiled = controller.init(), controller.init()
    update = jax.jit(controller.update)
    for keys, rewards in batches:
        feedback = (jnp.asarray(keys), jnp.asarray(rewards, jnp.float32))
        eager = controller.update(eager, feedback)
        compiled = update(compiled, feedback)
    expected = twin(6, 0.8, 0.5, batches)
    for state in (eager, compiled):
        actual = jax.jit(controller.decide)(state, jnp.arange(6), KEY)
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
    assert expected[5] == 0.5


def test_order_of_rows_does_not_matter_and_decay_may_be_traced():
    keys, rewards = jnp.array([0, 1, 0]), jnp.array([1.0, 2.0, 4.0])

    @jax.jit
    def after(decay, order):
        controller = moving_baseline(2, decay)
        state = controller.update(controller.init(), (keys[order], rewards[order]))
        return controller.decide(state, jnp.arange(2), KEY)

    for order in ([0, 1, 2], [2, 1, 0]):
        actual = after(0.3, jnp.array(order))
        np.testing.assert_allclose(actual, [2.5, 2.0], rtol=1e-6)


@pytest.mark.parametrize("size, decay", [(0, 0.5), (3, 1.0), (3, -0.1), (3, 1.5)])
def test_numbers_out_of_range(size, decay):
    with pytest.raises(ValueError, match=r"size|decay"):
        moving_baseline(size, decay)


@pytest.mark.parametrize(
    "controller, feedback",
    [
        (constant(0.2), None),
        (schedule(optax.cosine_decay_schedule(1.0, 10)), None),
        (moving_baseline(4), (jnp.array([1, 1, 3]), jnp.array([1.0, 0.3, jnp.nan]))),
    ],
)
def test_a_restored_controller_goes_on_bit_for_bit(tmp_path, controller, feedback):
    state = {"controller": controller.init()}
    for _ in range(3):
        state["controller"] = controller.update(state["controller"], feedback)
    Checkpoints(tmp_path).save(3, state)
    restored = Checkpoints(tmp_path).restore({"controller": controller.init()}).state
    context = jnp.arange(4)
    for _ in range(3):
        for one in (state, restored):
            one["controller"] = controller.update(one["controller"], feedback)
        decisions = [
            controller.decide(s["controller"], context, KEY) for s in (state, restored)
        ]
        np.testing.assert_array_equal(*decisions)
