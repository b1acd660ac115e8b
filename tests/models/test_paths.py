import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlpost.models.linear import LowRank, quantise
from rlpost.models.paths import join, partition, paths

TREE = {
    "embed": jnp.ones((3, 2)),
    "layers": {"q": LowRank(quantise(jnp.ones((4, 2))), jnp.ones((4, 1)), jnp.ones(2))},
    "list": [jnp.zeros(2), jnp.zeros(3, jnp.int32)],
}


def test_paths_name_keys_fields_and_indices():
    assert paths(TREE) == [
        "embed",
        "layers/q/base/values",
        "layers/q/base/scale",
        "layers/q/a",
        "layers/q/b",
        "list/0",
        "list/1",
    ]


@pytest.mark.parametrize(
    "rule, expected",
    [
        (r"/(a|b)$", ["layers/q/a", "layers/q/b"]),
        (lambda path, leaf: leaf.ndim == 1, ["layers/q/b", "list/0"]),
        ("", ["embed", "layers/q/base/scale", "layers/q/a", "layers/q/b", "list/0"]),
    ],
)
def test_partition_and_join(rule, expected):
    trained, held = partition(TREE, rule)
    assert paths(trained) == expected
    assert sorted(paths(trained) + paths(held)) == sorted(paths(TREE))
    again = join(trained, held)
    assert jax.tree.structure(again) == jax.tree.structure(TREE)
    jax.tree.map(np.testing.assert_array_equal, again, TREE)


def test_nothing_to_train_is_an_error_that_lists_paths():
    with pytest.raises(ValueError, match=r"'lora'.*embed, layers/q/base/values"):
        partition(TREE, "lora")
    with pytest.raises(ValueError, match="no parameter that could train"):
        partition(TREE, "values$")  # integers


def test_trees_that_do_not_belong_together():
    trained, held = partition(TREE, "embed")
    with pytest.raises(ValueError, match="overlap or leave a gap"):
        join(held, held)
    with pytest.raises(ValueError, match="not of one tree"):
        join({"embed": trained["embed"]}, held)
