"""The peer cases: small inputs on which public libraries failed, with right values."""

import json
import pathlib
from typing import Any

_CASES = {
    case["name"]: case
    for case in json.loads(
        pathlib.Path(__file__).with_suffix(".json").read_text("utf-8")
    )["cases"]
}


def case(name: str) -> dict[str, Any]:
    """One case: its `inputs`, `expected` values, `tolerance` and `explanation`."""
    return _CASES[name]
