"""The lazy categorical against plain float64 NumPy, and what it must never hold."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlpost.distributions import Categorical, matmul_head, tied_head
from tests.conformance import case

B, T, D, V = 3, 7, 5, 11


def draw(seed, shape):
    return np.random.default_rng(seed).normal(size=shape)


HIDDEN, HEAD = draw(0, (B, T, D)), draw(1, (D, V))
LOGITS = HIDDEN @ HEAD
TOKENS = np.random.default_rng(2).integers(0, V, (B, T))
TEMPERATURE = np.array([0.7, 1.0, 1.9])


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


LOGP = log_softmax(LOGITS / TEMPERATURE[:, None, None])


def law(form, chunk=None):
    """The same law in each of its forms."""
    if form == "logits":
        made = Categorical(logits=jnp.array(LOGITS, jnp.float32), chunk=chunk)
    else:
        tied = form == "tied"
        made = Categorical(
            hidden=jnp.array(HIDDEN, jnp.float32),
            head=jnp.array(HEAD.T if tied else HEAD, jnp.float32),
            project=tied_head if tied else matmul_head,
            chunk=chunk,
        )
    return made.tempered(jnp.array(TEMPERATURE))


FORMS = pytest.mark.parametrize("form", ["logits", "hidden", "tied"])
CHUNKS = pytest.mark.parametrize("chunk", [None, 1, 3])


@FORMS
@CHUNKS
def test_log_probs_entropy_and_top_k_match_numpy(form, chunk):
    made = law(form, chunk)
    assert made.shape == (B, T)
    assert made.size == V
    picked = np.take_along_axis(LOGP, TOKENS[..., None], -1)[..., 0]
    entropy = -(np.exp(LOGP) * LOGP).sum(-1)
    values, ids = made.top_k(3)
    order = np.argsort(-LOGP, axis=-1)[..., :3]
    np.testing.assert_allclose(made.logp(jnp.array(TOKENS)), picked, atol=2e-6)
    np.testing.assert_allclose(made.entropy(), entropy, atol=2e-6)
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(values, np.take_along_axis(LOGP, order, -1), atol=2e-6)


@FORMS
@CHUNKS
def test_kl_and_expected_counts_match_numpy(form, chunk):
    other_logits = draw(5, (B, T, V))
    other = log_softmax(other_logits)
    kl = (np.exp(LOGP) * (LOGP - other)).sum(-1)
    teacher = Categorical(logits=jnp.array(other_logits, jnp.float32))
    np.testing.assert_allclose(law(form, chunk).kl(teacher), kl, atol=3e-6)
    np.testing.assert_allclose(law(form, chunk).kl(law(form)), 0.0, atol=1e-6)

    weight = draw(6, (B, T)) * (np.arange(T) < np.array([7, 3, 0])[:, None])
    counts = np.einsum("bt,btv->bv", weight, np.exp(LOGP))
    actual = law(form, chunk).expected_counts(jnp.array(weight, jnp.float32))
    np.testing.assert_allclose(actual, counts, atol=3e-6)


def test_a_map_over_several_laws_sees_all_of_them():
    # The Gram matrix of two teachers' log-probs under the student, say.
    others = [draw(seed, (B, T, V)) for seed in (7, 8)]
    laws = [Categorical(logits=jnp.array(x, jnp.float32)) for x in others]
    weight = draw(9, (B, T))

    def gram(p, q, r, w):
        rows = jnp.stack([q, r])
        moment = jnp.einsum("ibtv,jbtv,btv->btij", rows, rows, jnp.exp(p))
        return {"gram": moment, "w": w}

    q = np.stack([log_softmax(x) for x in others])
    expected = np.einsum("ibtv,jbtv,btv->btij", q, q, np.exp(LOGP))
    for chunk in (None, 2):
        result = law("hidden", chunk).map(
            gram, *laws, per_token=(jnp.array(weight, jnp.float32),)
        )
        np.testing.assert_allclose(result["gram"], expected, rtol=1e-5)
        np.testing.assert_allclose(result["w"], weight, rtol=1e-6)


def naive(hidden, head):
    logits = hidden @ head / jnp.array(TEMPERATURE, jnp.float32)[:, None, None]
    return jax.nn.log_softmax(logits)


def lazy(hidden, head, chunk, where=None):
    made = Categorical(hidden=hidden, head=head, chunk=chunk)
    made = made.tempered(jnp.array(TEMPERATURE))
    return made if where is None else made.only(where)


QUANTITIES = {
    "logp": (
        lambda m: m.logp(jnp.array(TOKENS)),
        lambda p: jnp.take_along_axis(p, jnp.array(TOKENS)[..., None], -1)[..., 0],
    ),
    "entropy": (lambda m: m.entropy(), lambda p: -(jnp.exp(p) * p).sum(-1)),
    "counts": (
        lambda m: m.expected_counts(jnp.array(draw(3, (B, T)), jnp.float32)),
        lambda p: jnp.einsum(
            "bt,btv->bv", jnp.array(draw(3, (B, T)), jnp.float32), jnp.exp(p)
        ),
    ),
}


@pytest.mark.parametrize("name", QUANTITIES)
@pytest.mark.parametrize("chunk", [None, 3])
def test_gradients_equal_those_of_the_full_array(name, chunk):
    ours, plain = QUANTITIES[name]
    hidden, head = jnp.array(HIDDEN, jnp.float32), jnp.array(HEAD, jnp.float32)

    def pulled(f):
        shape = jax.eval_shape(f, hidden, head).shape
        cotangent = jnp.array(draw(4, shape), jnp.float32)
        return jax.grad(lambda h, w: jnp.sum(cotangent * f(h, w)), argnums=(0, 1))(
            hidden, head
        )

    expected = pulled(lambda h, w: plain(naive(h, w)))
    actual = pulled(lambda h, w: ours(lazy(h, w, chunk)))
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, e, atol=2e-6 * float(jnp.abs(e).max()))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_not_asked_for_never_matters(poison):
    # Rows 0 and 1 ask for 4 and 2 slots, row 2 (whose temperature is nan) for none:
    # with chunks of 2 the last two chunks are skipped and give exactly 0.
    where = np.arange(T) < np.array([4, 2, 0])[:, None]
    weight = jnp.array(np.where(where, draw(3, (B, T)), 0.0), jnp.float32)
    dirty = np.where(where[..., None], HIDDEN, poison)
    head = jnp.array(HEAD, jnp.float32)
    temperature = np.where(where.any(-1), TEMPERATURE, np.nan)

    def value(hidden, head, temperature):
        made = Categorical(hidden=jnp.array(hidden, jnp.float32), head=head, chunk=2)
        made = made.tempered(jnp.array(temperature)).only(jnp.array(where))
        x = made.logp(jnp.array(TOKENS)) + made.entropy()
        return jnp.sum(jnp.where(where, x, 0.0)) + jnp.sum(
            made.expected_counts(weight)[:, 0]
        )

    grad = jax.value_and_grad(value, argnums=1)
    clean = grad(HIDDEN, head, TEMPERATURE)
    np.testing.assert_array_equal(clean[0], grad(dirty, head, temperature)[0])
    np.testing.assert_array_equal(clean[1], grad(dirty, head, temperature)[1])

    made = lazy(jnp.array(dirty, jnp.float32), head, 2, jnp.array(where))
    np.testing.assert_array_equal(made.logp(jnp.array(TOKENS))[:, 4:], 0.0)


def test_ids_that_no_vocabulary_has_do_not_reach_the_gradient():
    where = np.arange(T) < np.array([4, 2, 0])[:, None]
    ids = jnp.array(np.where(where, TOKENS, 10**9))

    def value(head, ids):
        made = lazy(jnp.array(HIDDEN, jnp.float32), head, 3, jnp.array(where))
        return jnp.sum(jnp.where(where, made.logp(ids), 0.0))

    head = jnp.array(HEAD, jnp.float32)
    expected = jax.value_and_grad(value)(head, jnp.array(TOKENS))
    actual = jax.value_and_grad(value)(head, ids)
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_array_equal(actual[1], expected[1])


def test_impossible_tokens_leave_entropy_and_kl_finite():
    # Two ids at equal odds, the third impossible: H = ln 2, d H / d logits = 0.
    logits = jnp.array([[[0.0, 0.0, -jnp.inf]]])
    value, gradient = jax.value_and_grad(
        lambda x: Categorical(logits=x).entropy().sum()
    )(logits)
    np.testing.assert_allclose(value, np.log(2.0), rtol=1e-6)
    np.testing.assert_allclose(gradient, 0.0, atol=1e-7)

    other = Categorical(logits=jnp.array([[[1.0, 0.0, -jnp.inf]]]))
    value, gradient = jax.value_and_grad(
        lambda x: Categorical(logits=x).kl(other).sum()
    )(logits)
    q = np.log(np.exp([1.0, 0.0]) / np.exp([1.0, 0.0]).sum())
    np.testing.assert_allclose(value, (0.5 * (np.log(0.5) - q)).sum(), rtol=1e-5)
    assert np.isfinite(gradient).all()
    # And an id that only the other law excludes: infinite, as it must be.
    free = Categorical(logits=jnp.zeros((1, 1, 3)))
    assert np.isposinf(free.kl(other)).all()


@FORMS
def test_half_precision_inputs_give_float32_results(form):
    made = law(form)
    half = {
        name: None if x is None else x.astype(jnp.bfloat16)
        for name, x in [("logits", made.logits), ("hidden", made.hidden)]
    }
    made = made.replace(
        **half, head=None if made.head is None else made.head.astype(jnp.bfloat16)
    )
    actual = made.logp(jnp.array(TOKENS))
    assert actual.dtype == made.entropy().dtype == jnp.float32
    picked = np.take_along_axis(LOGP, TOKENS[..., None], -1)[..., 0]
    # bfloat16 keeps 8 bits, and the logits here reach 8.
    np.testing.assert_allclose(actual, picked, atol=0.1)


def test_shift_hands_each_token_the_law_of_the_slot_before():
    made = law("logits").shift()
    np.testing.assert_allclose(made.all_logits()[:, 0], 0.0)
    shifted = jax.nn.log_softmax(made.all_logits())[:, 1:]
    np.testing.assert_allclose(shifted, LOGP[:, :-1], atol=2e-6)


def test_temperatures_multiply_and_none_changes_nothing():
    made = Categorical(logits=jnp.array(LOGITS, jnp.float32))
    assert made.tempered(None) is made
    twice = made.tempered(0.5).tempered(jnp.array([2.0, 4.0, 6.0])).all_logits()
    expected = LOGITS / np.array([1.0, 2.0, 3.0])[:, None, None]
    np.testing.assert_allclose(twice, expected, rtol=1e-6)


def test_laws_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match="different shapes"):
        law("logits").kl(Categorical(logits=jnp.zeros((B, T + 1, V))))


@pytest.mark.parametrize("asked", [False, True])
def test_the_compiled_gradient_never_holds_all_logits(asked):
    # 2 x 64 x 1000 logits are formed 8 slots at a time: nothing in the whole program,
    # saved residuals included, may be as large as all of them.
    b, t, d, v, chunk = 2, 64, 16, 1000, 8

    def value(hidden, head, ids, weight):
        made = Categorical(hidden=hidden, head=head, chunk=chunk)
        if asked:
            made = made.only(weight > 0)
        x = made.logp(ids) + made.entropy() + made.kl(made.tempered(2.0))
        return jnp.sum(weight * x) + jnp.sum(made.expected_counts(weight) ** 2)

    f32 = jnp.float32
    arguments = [
        jax.ShapeDtypeStruct((b, t, d), f32),
        jax.ShapeDtypeStruct((d, v), f32),
        jax.ShapeDtypeStruct((b, t), jnp.int32),
        jax.ShapeDtypeStruct((b, t), f32),
    ]
    lowered = jax.jit(jax.grad(value, argnums=(0, 1))).lower(*arguments)
    assert largest_array(lowered.compile().as_text()) < b * t * v / 4

    def full(hidden, head, ids, weight):
        made = Categorical(hidden=hidden, head=head, chunk=t)
        return jnp.sum(weight * made.logp(ids))

    lowered = jax.jit(jax.grad(full, argnums=(0, 1))).lower(*arguments)
    # The measure sees what it should: without chunks the array is there.
    assert largest_array(lowered.compile().as_text()) >= b * t * v


def largest_array(text):
    shapes = re.findall(r"\b(?:f|bf|s|u|pred)\d*\[([\d,]+)\]", text)
    return max(np.prod([int(n) for n in shape.split(",")]) for shape in shapes)


def test_peer_case_full_vocabulary_law_at_the_temperature():
    data = case("sampler_trainer_logprob_temperature_and_nucleus")
    given, expected = data["inputs"], data["expected"]
    made = Categorical(logits=jnp.array([[given["logits"]]]))
    token = jnp.array([[given["sampled_token"]]])
    at_t = made.tempered(given["temperature"])
    tolerance = data["tolerance"]
    for actual, name in [
        (at_t.logp(token), "full_vocab_logp_at_T"),
        (made.logp(token), "raw_logp_T1"),
    ]:
        np.testing.assert_allclose(actual, [[expected[name]]], atol=tolerance)
    probs, ids = at_t.top_k(2)
    np.testing.assert_array_equal(ids[0, 0], expected["kept_tokens"])
    mass = np.exp(probs[0, 0]).sum()
    np.testing.assert_allclose(mass, expected["kept_mass"], atol=tolerance)


def test_peer_case_packed_next_token_labels():
    # Slot = token here, so the law of tokens[t] is the shifted one; the first token of
    # each sequence has none of its own.
    data = case("packed_next_token_labels")
    given, expected = data["inputs"], data["expected"]
    ids = np.array([given["packed_token_ids"]])
    raw = jnp.array([given["logits_row_t_predicts_t_plus_1"]])
    logp = Categorical(logits=raw).shift().logp(jnp.array(ids))[0]
    bounds = given["cu_seqlens"]
    for start, end, total in zip(
        bounds, bounds[1:], expected["sum_logp_per_sequence"], strict=False
    ):
        np.testing.assert_allclose(logp[start + 1 : end].sum(), total, atol=1e-6)
    # What the case lists at t, the position that predicts, stands at t + 1 here.
    listed = np.array(expected["logp_of_label"])
    has_label = np.array(expected["label_mask"], bool)
    np.testing.assert_allclose(
        logp[1:][has_label[:-1]], listed[has_label], atol=data["tolerance"]
    )


AT = np.array([[1, 4, 6], [0, 2, -1], [-1, -1, -1]])


def test_a_law_of_some_slots_answers_for_those_and_gives_0_elsewhere():
    there = np.zeros((B, T), bool)
    for row, slots in enumerate(AT):
        there[row, slots[slots >= 0]] = True
    full, some = law("hidden"), law("hidden", 2).gather(jnp.array(AT))
    assert some.hidden.shape == (B, 3, D)
    assert some.shape == full.shape
    tokens, weight = jnp.array(TOKENS), jnp.array(draw(3, (B, T)), jnp.float32)
    other = Categorical(logits=jnp.array(draw(5, (B, T, V)), jnp.float32))
    for ask in (
        lambda made: made.logp(tokens),
        lambda made: made.entropy(),
        lambda made: made.kl(other),
        lambda made: made.top_k(2)[0],
        lambda made: made.only(jnp.array(there)).logp(tokens),
        lambda made: made.all_logits(),
    ):
        everywhere = np.asarray(ask(full))
        kept = there.reshape(B, T, *[1] * (everywhere.ndim - 2))
        expected = np.where(kept, everywhere, 0.0)
        np.testing.assert_allclose(ask(some), expected, atol=2e-6)
    np.testing.assert_allclose(
        some.expected_counts(weight),
        full.expected_counts(jnp.where(there, weight, 0.0)),
        atol=2e-6,
    )


def test_laws_of_different_slots_are_refused():
    some = law("hidden").gather(jnp.array(AT))
    assert some.gather(some.at) is some
    with pytest.raises(ValueError, match="different slots"):
        law("hidden").kl(some)
    with pytest.raises(ValueError, match="different slots"):
        some.kl(law("hidden").gather(jnp.array(AT[:, :2])))
    with pytest.raises(ValueError, match="cannot be shifted"):
        some.shift()
