import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlpost.models import DecoderSpec, decoder
from rlpost.scores import token_scores
from rlpost.training.dumps import dump
from rlpost.training.guards import (
    GuardError,
    Guards,
    check_padding,
    check_ratio,
    check_synced,
    fingerprint,
    scramble_padding,
)
from rlpost.types import Batch, Mean, Objective, Scores

POLICY = decoder(DecoderSpec(vocab=19, width=16, depth=2, heads=4, kv_heads=2))
PARAMS = POLICY.init(jax.random.key(0))


def batch():
    tokens = jax.random.randint(jax.random.key(1), (3, 8), 0, 19)
    length = jnp.array([8, 5, 3])
    slots = jnp.arange(8)
    mask = (slots >= 2) & (slots < length[:, None])
    return Batch(mask=mask, tokens=tokens, length=length, advantage=jnp.ones((3, 8)))


def test_equal_log_probs_pass_and_a_gap_is_placed():
    logp = jnp.array([[0.0, -1.0, -2.0], [0.0, -0.5, jnp.nan]])
    mask = jnp.array([[False, True, True], [False, True, False]])
    other = logp.at[0, 2].add(2e-4)  # mean over three tokens 6.67e-5
    metrics = check_ratio(logp, other, mask)
    assert metrics["guard/ratio_largest"] == pytest.approx(2e-4, rel=1e-3)
    assert metrics["guard/ratio_mean"] == pytest.approx(2e-4 / 3, rel=1e-3)
    with pytest.raises(GuardError, match=r"row 0, slot 2 .trainer -2, sampler -1.9"):
        check_ratio(logp, logp.at[0, 2].add(0.1), mask)
    with pytest.raises(GuardError, match="row 1, slot 1"):
        check_ratio(logp.at[1, 1].set(jnp.nan), logp, mask)


def test_half_precision_is_given_its_own_room():
    logp = jnp.full((1, 4), -1.0)
    mask = jnp.ones((1, 4), bool)
    with pytest.raises(GuardError, match="are expected in float32"):
        check_ratio(logp, logp + 0.02, mask)
    check_ratio(logp, logp + 0.02, mask, dtype=jnp.bfloat16)
    with pytest.raises(GuardError):
        check_ratio(logp, logp + 0.1, mask, dtype=jnp.bfloat16)


def test_a_sound_policy_and_loss_do_not_see_padding():
    def loss(scores: Scores, batch: Batch):
        kept = jnp.where(batch.mask, scores.logp * batch.advantage, 0.0)
        return {"pg": Mean(-kept.sum(), batch.mask.sum() * 1.0)}, {}

    check_padding(
        token_scores(POLICY),
        PARAMS,
        {},
        batch(),
        vocabulary=19,
        objective=Objective(lambda b: b, loss),
    )


def test_scrambling_changes_padding_alone():
    data = batch()
    other = scramble_padding(data, 19)
    inside = np.arange(8) < np.asarray(data.length)[:, None]
    np.testing.assert_array_equal((other.tokens == data.tokens), inside)
    np.testing.assert_array_equal(np.isfinite(other.advantage), data.mask)


def test_a_score_that_counts_padding_is_caught():
    def score(params, frozen, batch):
        mean = jnp.mean(batch.tokens, axis=1, keepdims=True)  # padding included
        return Scores(logp=-jnp.broadcast_to(mean, batch.mask.shape) / 19)

    with pytest.raises(GuardError, match="other tokens in the padding changed"):
        check_padding(score, PARAMS, {}, batch(), vocabulary=19)


def test_a_loss_that_relies_on_zeros_off_its_mask_is_caught():
    def loss(scores, batch):
        return {"pg": Mean((scores.logp * batch.advantage).sum())}, {}

    with pytest.raises(GuardError, match=r"changed the loss .* to nan"):
        check_padding(
            token_scores(POLICY),
            PARAMS,
            {},
            batch(),
            vocabulary=19,
            objective=Objective(lambda b: b, loss),
        )


def test_the_fingerprint_is_the_weighed_sum_of_bits():
    # By hand: bits of 1.0 and -2.0 are 0x3F800000 and 0xC0000000; weights 1, 3, 5, 7.
    values = np.array([[1.0, 0.0], [0.0, -2.0]], np.float32)
    bits = values.view(np.uint32).astype(object)
    expected = (bits[0, 0] * 1 + bits[1, 1] * 7) % 2**32
    assert int(fingerprint({"w": values})[0]) == expected


def test_every_bit_and_every_swap_changes_the_fingerprint():
    values = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    before = int(fingerprint([values])[0])
    for bit in range(32):
        changed = values.copy()
        changed.view(np.uint32)[1, 3] ^= np.uint32(1 << bit)
        assert int(fingerprint([changed])[0]) != before
    assert int(fingerprint([values[::-1]])[0]) != before
    assert int(fingerprint([values.T.reshape(3, 5)])[0]) != before


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "int4", "bool"])
def test_a_fingerprint_of_any_dtype(dtype):
    x = jnp.array([0, 1, 1, 0]).astype(dtype)
    y = jnp.array([0, 1, 0, 1]).astype(dtype)
    assert fingerprint([x])[0] != fingerprint([y])[0]
    assert fingerprint({}).shape == (0,)


def test_the_fingerprint_is_the_same_on_any_sharding(devices):
    assert len(devices) == 8
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    values = jax.random.normal(jax.random.key(0), (16, 4))
    placed = jax.device_put(values, rows)
    assert fingerprint([placed])[0] == fingerprint([values])[0]


def test_a_sync_that_missed_a_leaf_is_named():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    check_synced(PARAMS, half)  # the sampler's copy at its own dtype
    leaves, tree = jax.tree.flatten(half)
    leaves[-1] = leaves[-1] + 1
    path = jax.tree_util.tree_flatten_with_path(half)[0][-1][0]
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    with pytest.raises(GuardError, match=f"1 of {len(leaves)} leaves .*: {name}$"):
        check_synced(PARAMS, jax.tree.unflatten(tree, leaves))
    with pytest.raises(GuardError, match="another structure"):
        check_synced(PARAMS, [half])


def test_steps_that_are_not_finite_are_dumped_counted_and_at_last_an_error(tmp_path):
    guards = Guards(tmp_path / "dumps", nonfinite=3)
    data = batch().replace(behavior_logp=jnp.full((3, 8), jnp.nan, jnp.bfloat16))
    assert guards.update(1, jnp.array(1.0), data) == {"guard/nonfinite": 0}
    assert guards.update(2, jnp.array(0.0), data) == {"guard/nonfinite": 1}
    assert guards.update(3, True) == {"guard/nonfinite": 1}  # the row is broken
    guards.update(4, False)
    guards.update(5, False)
    assert len(guards.take_errors()) == 3
    assert guards.take_errors() == []
    with pytest.raises(GuardError, match="3 steps in a row"):
        guards.update(6, False)
    with np.load(tmp_path / "dumps/step-00000002.npz", allow_pickle=False) as stored:
        np.testing.assert_array_equal(stored["tokens"], data.tokens)
        assert np.isnan(stored["behavior_logp"]).all()
    told = json.loads((tmp_path / "dumps/step-00000002.json").read_text())
    assert told["behavior_logp"]["not finite"] == 24
    assert told["advantage"] == {
        "shape": [3, 8],
        "dtype": "float32",
        "not finite": 0,
        "least": 1.0,
        "most": 1.0,
    }


def test_dumps_do_not_fill_a_disk(tmp_path):
    guards = Guards(tmp_path, nonfinite=2)
    for step in range(0, 40, 2):
        guards.update(step, False, {"x": jnp.ones(2)})
        guards.update(step + 1, True)
    assert len(list(tmp_path.glob("*.npz"))) == 10


def test_failed_rewards_are_counted_and_groups_with_signal_shared():
    guards = Guards()
    reward = [1.0, 0.0, np.nan, 1.0, 1.0, np.nan, np.nan, 0.5]
    group = [0, 0, 0, 1, 1, 2, 2, 3]  # group 0 alone tells good from bad
    assert guards.rewards(reward, group) == {"guard/failed": 3, "guard/signal": 0.25}
    assert guards.rewards([np.nan, np.nan]) == {"guard/failed": 5, "guard/signal": 0.0}
    (error,) = guards.take_errors()
    assert error["message"].startswith("no response could be scored")


def test_rewards_without_signal_warn_now_and_then_and_not_for_ever():
    guards = Guards(silent=3)
    for _ in range(7):
        guards.rewards([0.0, 0.0])
    messages = [e["message"] for e in guards.take_errors()]
    assert [m[:13] for m in messages] == ["for 3 steps a", "for 6 steps a"]
    assert "all 0" in messages[0]
    guards.rewards([0.0, 1.0])
    guards.rewards([0.0, 0.0])
    assert guards.take_errors() == []


def test_the_counts_are_part_of_a_checkpoint():
    guards = Guards(nonfinite=2)
    guards.update(1, False)
    other = Guards(nonfinite=2)
    other.set_state(json.loads(json.dumps(guards.get_state())))
    with pytest.raises(GuardError):
        other.update(2, False)


def test_keys_can_be_dumped(tmp_path):
    path = dump(tmp_path, 3, {"key": jax.random.key(5)})
    assert np.load(path, allow_pickle=False)["key"].tolist() == [0, 5]
