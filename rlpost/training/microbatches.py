"""Cut a batch into microbatches of whole units and few shapes, on the host."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from rlpost.types import Batch


def length_buckets(longest: int, *, smallest: int = 32) -> tuple[int, ...]:
    """Lengths to pad to: two per octave (32, 48, 64, 96, ...), up to `longest`.

    Padding is then below a third, and a run compiles a handful of shapes.
    """
    sizes: list[int] = []
    size = smallest
    while size < longest:
        sizes.append(size)
        if size * 3 // 2 < longest:
            sizes.append(size * 3 // 2)
        size *= 2
    return (*sizes, longest)


def split(
    batch: Batch,
    *,
    rows: int,
    buckets: Sequence[int] | None = None,
) -> list[Batch]:
    """Cut a prepared batch into microbatches of `rows` rows each.

    Units (rows that share `batch.unit`; else single rows) are sorted by length and
    filled in order, so that long rows share a microbatch. Rows that nothing is learned
    from (no True in the mask) are left out when they are whole units. The last
    microbatch of a length is filled up with empty rows, which no loss counts.

    Args:
        batch: leaves [B, ...], on the host or gathered to it.
        rows: rows of a microbatch; at least the largest unit.
        buckets: lengths to cut T to; None takes `length_buckets`.

    Returns:
        A list of Batches [rows, t, ...], t from the buckets; at least one.

    Raises:
        ValueError: if a unit has more rows than a microbatch.
    """
    batch = jax.tree.map(np.asarray, batch)
    mask = batch.mask
    count, longest = mask.shape
    if rows < 1:
        raise ValueError(f"a microbatch needs at least one row, got {rows}")
    slots = np.arange(longest) + 1
    used = np.max(np.where(mask, slots, 0), axis=1) if count else np.zeros(0, int)
    length = used  # nothing after the last learned token is ever read
    unit = np.arange(count) if batch.unit is None else batch.unit
    members: dict[int, list[int]] = {}
    for row, name in enumerate(unit.tolist()):
        members.setdefault(name, []).append(row)
    units = [np.array(m) for m in members.values() if used[m].any()]
    largest = max((len(u) for u in units), default=1)
    if largest > rows:
        raise ValueError(
            f"a unit of {largest} rows does not fit into microbatches of {rows}: "
            f"raise the rows of a microbatch to at least {largest}"
        )
    sizes = sorted(set(buckets or length_buckets(longest)) | {longest})
    bucket = [next(s for s in sizes if s >= max(1, length[u].max())) for u in units]
    order = sorted(range(len(units)), key=lambda i: (bucket[i], i))
    parts: list[tuple[int, list[int]]] = []
    for i in order:
        fits = parts and len(parts[-1][1]) + len(units[i]) <= rows
        if not fits or parts[-1][0] != bucket[i]:
            parts.append((bucket[i], []))
        parts[-1][1].extend(units[i].tolist())
    if not parts:
        parts = [(sizes[0], [])]
    return [_take(batch, chosen, rows, size) for size, chosen in parts]


def stack(batches: Sequence[Batch]) -> Batch:
    """Microbatches of one shape as one Batch with leaves [n, b, ...]."""
    return jax.tree.map(lambda *x: np.stack(x), *batches)


def _take(batch: Batch, chosen: list[int], rows: int, size: int) -> Batch:
    filler = rows - len(chosen)
    index = np.array(chosen + [0] * filler, int)
    real = np.arange(rows) < len(chosen)
    longest = batch.mask.shape[1]

    def cut(x: np.ndarray) -> np.ndarray:
        x = x[index]
        return x[:, :size] if x.ndim >= 2 and x.shape[1] == longest else x

    part = jax.tree.map(cut, batch)
    empty = {"mask": part.mask & real[:, None]}
    if part.unit is not None:  # a filler row belongs to no unit of the batch
        empty["unit"] = np.where(real, part.unit, -1)
    if part.group is not None:
        empty["group"] = np.where(real, part.group, -1)
    return part.replace(**empty)
