"""Reading a run folder, whatever state the run left it in."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Run:
    """What a run folder holds, apart from its samples.

    Attributes:
        folder: the folder.
        config, choices: nested mappings; empty where the file is missing.
        metrics: {"train" | "eval": records in order of step, one a step}.
        claims, errors: lists of mappings.
        notes: what is missing or broken, a sentence each.
    """

    folder: Path
    config: dict[str, Any]
    choices: dict[str, Any]
    metrics: dict[str, list[dict[str, Any]]]
    claims: list[dict[str, Any]]
    errors: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)


def read_run(folder: str | Path) -> Run:
    """Read all but the samples.

    Raises:
        FileNotFoundError: if the folder does not exist; all else becomes a note.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: give the folder of a run")
    notes: list[str] = []
    config = _json(folder / "config.json", dict, notes, required=True)
    choices = _json(folder / "choices.json", dict, notes, required=True)
    claims = _json(folder / "claims.json", list, notes, required=False)
    if not (folder / "metrics.jsonl").exists():
        notes.append("There is no metrics.jsonl: nothing was measured.")
    metrics: dict[str, dict[float, dict[str, Any]]] = {}
    for record in json_lines(folder / "metrics.jsonl", notes):
        step = number(record.get("step"))
        if step is None or not math.isfinite(step):
            continue
        # A resumed run repeats the steps after its checkpoint: the last one counts.
        of_kind = metrics.setdefault(str(record.get("kind", "train")), {})
        of_kind[step] = {**record, "step": int(step)}
    return Run(
        folder=folder,
        config=config,
        choices=choices,
        metrics={k: [v[s] for s in sorted(v)] for k, v in metrics.items()},
        claims=[c for c in claims if isinstance(c, dict)],
        errors=list(json_lines(folder / "errors.jsonl", notes)),
        notes=notes,
    )


def json_lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file; lines that are none are counted in a note."""
    if not path.exists():
        return
    broken, last = 0, False
    with open(path, "rb") as file:
        for line in file:
            if not line.strip():
                continue
            value = _parse(line)
            last = value is None
            broken += last
            if value is not None:
                yield value
    if broken:
        what = "1 line" if broken == 1 else f"{broken} lines"
        where = ", the last one among them" if last and broken > 1 else ""
        cut = " (the last one: the run was cut off while it wrote)"
        cut = cut if last and broken == 1 else where
        notes.append(f"{what} of {path.name} could not be read{cut}.")


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def number(value: Any) -> float | None:
    """A float of what a JSON file may hold for one ("nan" included); else None."""
    if isinstance(value, str) and value.lower() not in ("nan", "inf", "-inf"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _json(path: Path, kind: type, notes: list[str], *, required: bool) -> Any:
    if not path.exists():
        if required:
            notes.append(f"There is no {path.name}.")
        return kind()
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        notes.append(f"{path.name} could not be read: {error}.")
        return kind()
    if not isinstance(value, kind):
        notes.append(f"{path.name} holds no {kind.__name__}, and is left out.")
        return kind()
    return value
