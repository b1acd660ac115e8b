import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlpost.models.linear import (
    LowRank,
    Quantised,
    dense,
    linear,
    linear_transposed,
    quantise,
    rows,
    shape,
)

RNG = np.random.default_rng(0)
W = RNG.normal(size=(12, 8)).astype(np.float32)
A = RNG.normal(size=(12, 2)).astype(np.float32)
B = RNG.normal(size=(2, 8)).astype(np.float32)
X = RNG.normal(size=(3, 5, 12)).astype(np.float32)
Y = RNG.normal(size=(3, 5, 8)).astype(np.float32)

KINDS = {
    "array": lambda: jnp.asarray(W),
    "pair": lambda: LowRank(jnp.asarray(W), jnp.asarray(A), jnp.asarray(B), 0.5),
    "int8": lambda: quantise(jnp.asarray(W)),
    "int8 in groups": lambda: quantise(jnp.asarray(W), 8, 4),
    "int4": lambda: quantise(jnp.asarray(W), 4),
    "int4 in groups": lambda: quantise(jnp.asarray(W), 4, 3),
    "pair on int4": lambda: LowRank(
        quantise(jnp.asarray(W), 4, 4), jnp.asarray(A), jnp.asarray(B), 2.0
    ),
    "pair on a pair": lambda: LowRank(
        LowRank(jnp.asarray(W), jnp.asarray(A), jnp.asarray(B), 0.5),
        jnp.asarray(A),
        jnp.asarray(B),
        -1.0,
    ),
}


def matrix64(w):
    """float64 [in, out], one entry at a time where it is quantised."""
    if isinstance(w, LowRank):
        a, b = (np.asarray(x, np.float64) for x in (w.a, w.b))
        return matrix64(w.base) + w.scale * a @ b
    if not isinstance(w, Quantised):
        return np.asarray(w, np.float64)
    values, scale = np.asarray(w.values), np.asarray(w.scale, np.float64)
    found = np.zeros(shape(w))
    group = len(found) // len(scale)
    for i, j in np.ndindex(*found.shape):
        if w.bits == 8:
            number = int(values[i, j])
        else:
            byte = int(values[i // 2, j])
            number = (byte // 16 if i % 2 else byte % 16) - 8
        found[i, j] = number * scale[i // group, j]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_products_equal_float64_ones(kind):
    w = KINDS[kind]()
    exact = matrix64(w)
    np.testing.assert_allclose(linear(X, w), X @ exact, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        linear_transposed(Y, w), Y @ exact.T, rtol=1e-4, atol=1e-4
    )
    ids = jnp.array([[0, 11], [5, 4]])
    np.testing.assert_allclose(rows(w, ids, jnp.float32), exact[ids], atol=1e-5)
    np.testing.assert_allclose(dense(w), exact, atol=1e-5)
    assert shape(w) == (12, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_scan_takes_layers_off_any_matrix(kind):
    w = KINDS[kind]()
    stacked = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), w)
    _, found = jax.lax.scan(lambda _, w: (None, linear(X, w)), None, stacked)
    np.testing.assert_allclose(found[0], linear(X, w), rtol=1e-5, atol=1e-5)
    assert shape(stacked) == (2, 12, 8)
    assert dense(stacked).shape == (2, 12, 8)


def test_quantising_by_hand():
    # A column's largest entry, 2.54, makes the scale 0.02: 1 / 0.02 = 50, -0.5 -> -25.
    w = quantise(jnp.array([[2.54], [1.0], [-0.5], [0.0]]))
    np.testing.assert_allclose(w.scale, [[0.02]], rtol=1e-6)
    assert w.values[:, 0].tolist() == [127, 50, -25, 0]
    # 4 bits: scale 0.7 / 7 = 0.1: 7 and -3 plus 8 are 15 and 5, 5 high in the byte.
    w = quantise(jnp.array([[0.7], [-0.3]]), 4)
    assert w.values.tolist() == [[15 + 16 * 5]]
    assert w.values.dtype == jnp.uint8


@pytest.mark.parametrize("bits, group", [(8, None), (8, 4), (4, None), (4, 6)])
def test_rounding_is_within_half_a_scale(bits, group):
    w = quantise(jnp.asarray(W), bits, group)
    half = np.repeat(np.asarray(w.scale) / 2, 12 // len(w.scale), 0)
    assert np.all(np.abs(matrix64(w) - W) <= half * 1.0001)
    zero = quantise(jnp.zeros((4, 2)), bits)
    assert not np.any(dense(zero))


def test_integers_are_what_is_kept():
    eight, four = quantise(jnp.asarray(W)), quantise(jnp.asarray(W), 4)
    assert eight.values.nbytes == 12 * 8
    assert four.values.nbytes == 12 * 8 / 2


@pytest.mark.parametrize("kind", ["array", "pair", "int8"])
def test_half_precision_accumulates_where_asked(kind):
    w = jax.tree.map(jnp.asarray, KINDS[kind]())
    x = jnp.asarray(X, jnp.bfloat16)
    assert linear(x, w).dtype == jnp.bfloat16
    wide = linear(x, w, out=jnp.float32)
    assert wide.dtype == jnp.float32
    assert linear_transposed(jnp.asarray(Y, jnp.bfloat16), w).dtype == jnp.bfloat16
    np.testing.assert_allclose(wide, X @ matrix64(w), atol=0.1)


def test_gradients_reach_the_pair_and_its_base():
    w = KINDS["pair"]()
    found = jax.grad(lambda w: jnp.sum(linear(X, w) * Y))(w)
    through = np.einsum("bti,bto->io", X.astype(np.float64), Y)  # d / d matrix
    np.testing.assert_allclose(found.base, through, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found.a, 0.5 * through @ B.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found.b, 0.5 * A.T @ through, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((jnp.ones((4, 2)), 5), "bits=8 or bits=4"),
        ((jnp.ones((4, 2)), 8, 3), "group=3 does not divide the 4 rows"),
        ((jnp.ones((3, 2)), 4), "3 rows are odd"),
    ],
)
def test_what_cannot_be_quantised(arguments, message):
    with pytest.raises(ValueError, match=message):
        quantise(*arguments)
