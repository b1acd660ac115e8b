"""What a host structure keeps, as JSON and arrays: a data position, an archive.

A structure takes part in a checkpoint by two methods, as grain's iterators have them:
`get_state() -> value` and `set_state(value)`. The value is built of dict (keys are
strings), list, str, int, float, bool, None and NumPy arrays, and comes back as it was.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

ARRAY = "__array__"  # marks, in the JSON, an array of the .npz file beside it


class HostState(Protocol):
    """A host structure that a checkpoint saves and restores."""

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


def encode(value: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """The value as JSON and named arrays.

    Raises:
        ValueError: naming the place of whatever would not come back as it is.
    """
    arrays: dict[str, np.ndarray] = {}
    return _encode(value, "host", arrays), arrays


def write(path: Path, encoded: tuple[Any, Mapping[str, np.ndarray]]) -> None:
    """Write `<path>.json` and, if there are arrays, `<path>.npz`."""
    value, arrays = encoded
    path.with_name(path.name + ".json").write_text(json.dumps(value))
    if arrays:
        np.savez(path.with_name(path.name + ".npz"), **arrays)  # type: ignore[arg-type]


def read(path: Path) -> Any:
    """What `write` wrote."""
    encoded = json.loads(path.with_name(path.name + ".json").read_text())
    packed = path.with_name(path.name + ".npz")
    if not packed.exists():
        return encoded
    with np.load(packed, allow_pickle=False) as arrays:
        return _decode(encoded, arrays)


def _encode(value: Any, at: str, arrays: dict[str, np.ndarray]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        # Subclasses (an enum, a NumPy float) would come back as something else.
        if type(value) in (type(None), bool, int, float, str):
            return value
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biufcSU":
        name = f"a{len(arrays)}"
        arrays[name] = value
        return {ARRAY: name}
    elif type(value) is list:
        return [_encode(v, f"{at}[{i}]", arrays) for i, v in enumerate(value)]
    elif type(value) is dict and ARRAY not in value:
        for key in value:
            if type(key) is not str:
                raise ValueError(f"{at}: key {key!r} must be a string to be saved")
        return {k: _encode(v, f"{at}.{k}", arrays) for k, v in value.items()}
    raise ValueError(
        f"{at} is a {type(value).__name__} and would not come back as it is: keep it "
        "as dict, list, str, int, float, bool, None or a NumPy array of numbers"
    )


def _decode(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_decode(v, arrays) for v in value]
    if isinstance(value, dict):
        if ARRAY in value:
            return arrays[value[ARRAY]]
        return {k: _decode(v, arrays) for k, v in value.items()}
    return value
