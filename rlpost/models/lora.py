"""LoRA: a Policy whose matrices each carry a low-rank pair that trains."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp

from rlpost.models.linear import LowRank, dense, is_matrix, shape
from rlpost.models.paths import path_name
from rlpost.types import Array, Params, Policy, check_range

# The matrices of a decoder's layers.
MATRICES = r"layers/(.*/)?(q|k|v|o|gate|up|down)$"
# The rule for `partition` under which the pairs train and nothing else.
PAIRS = r"/(a|b)$"


def lora(
    policy: Policy, rank: int, *, alpha: float | None = None, targets: str = MATRICES
) -> Policy:
    """The same policy with a low-rank pair on each matrix that `targets` matches.

    Its `init` gives the parameters of `policy`, matrices wrapped as `LowRank`; the pair
    starts at zero (b = 0), so the law is at first that of `policy`. Train with
    `partition(params, PAIRS)`. For weights that are loaded, see `add_lora`.

    Args:
        policy: a decoder, or a module of `from_linen` or `from_nnx`.
        rank: r, of the pair.
        alpha: the pair counts alpha / rank times; None means alpha = rank.
        targets: a pattern searched in parameter paths.

    Raises:
        ValueError: as `add_lora`, from `init`.

    References:
        Hu et al., LoRA, arXiv:2106.09685, section 4.1.
    """
    check_range("rank", rank, 1)

    def init(key: Array) -> Params:
        base, pairs = jax.random.split(key)
        return add_lora(policy.init(base), pairs, rank, alpha=alpha, targets=targets)

    return policy._replace(init=init)


def add_lora(
    params: Params,
    key: Array,
    rank: int,
    *,
    alpha: float | None = None,
    targets: str = MATRICES,
) -> Params:
    """Wrap each matrix whose path matches as `LowRank`, with b = 0.

    The pair is float32 whatever the base is, so that small steps are not lost.

    Args:
        params: parameters; matrices may be quantised, or carry a pair already.
        key: for a, normal with variance 1 / in.
        rank, alpha, targets: see `lora`.

    Raises:
        ValueError: if nothing matches, or something that matches is no matrix.
    """
    check_range("rank", rank, 1)
    scale = (rank if alpha is None else alpha) / rank
    count = 0

    def wrap(path: Any, w: Any) -> Any:
        nonlocal count
        name = path_name(path)
        if not re.search(targets, name):
            return w
        size = shape(w)
        if len(size) < 2:
            raise ValueError(
                f"a low-rank pair needs a matrix, but {name!r}, which matches "
                f"targets={targets!r}, is {list(size)}"
            )
        *lead, rows, columns = size
        # Each pair from its own key: another matrix more or less changes no other.
        draw = jax.random.normal(jax.random.fold_in(key, count), (*lead, rows, rank))
        count += 1
        b = jnp.zeros((*lead, rank, columns))
        return LowRank(w, draw * rows**-0.5, b, scale)

    wrapped = jax.tree_util.tree_map_with_path(wrap, params, is_leaf=is_matrix)
    if not count:
        names = [
            path_name(path)
            for path, _ in jax.tree_util.tree_leaves_with_path(
                params, is_leaf=is_matrix
            )
        ]
        raise ValueError(
            f"no parameter matches targets={targets!r}; the paths are "
            f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
        )
    return wrapped


def merge(params: Params, dtype: Any = None) -> Params:
    """Parameters with every pair added into its matrix, for export.

    The sum is formed in float32 and rounded once.

    Args:
        params: as of `lora`.
        dtype: of the matrices that had a pair; None means that of their base (float32
            if that is quantised).
    """

    def plain(w: Any) -> Any:
        return dense(w, dtype) if isinstance(w, LowRank) else w

    return jax.tree.map(plain, params, is_leaf=is_matrix)
