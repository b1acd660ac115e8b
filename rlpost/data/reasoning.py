"""Tasks of reasoning-gym: over a hundred procedural families with their verifiers."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
import warnings
from collections.abc import Iterable
from typing import Any

from rlpost.data.task import Task

# Found by making tasks twice, with version 0.1.25.
_HASHED = (
    *("isomorphic_strings", "knight_swap", "polynomial_multiplication"),
    *("ransom_note", "word_ladder"),
)
_UNREPEATABLE = ("list_functions",)


@dataclasses.dataclass(frozen=True)
class _Reasoning:
    """Tasks made on demand by a family's generator."""

    family: str
    parameters: str  # JSON
    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.family} has {len(self)} tasks, asked for {index}")
        entry = self.dataset[index]
        answer = entry["answer"]
        metadata = _frozen(entry["metadata"])
        return Task(
            prompt=entry["question"],
            answer=None if answer is None else str(answer),
            data={
                "family": self.family,
                "parameters": self.parameters,
                "metadata": metadata,
            },
            id=f"{self.family}/{index}",
        )


def reasoning(
    family: str, *, size: int = 500, seed: int = 0, **parameters: Any
) -> _Reasoning:
    """A `Source` of tasks of one reasoning-gym family.

    Task i depends on family, seed, i and parameters. Equal tasks may come up under
    several i; another seed makes other tasks, though in a small family not all new
    ones: for a test split free of training tasks see `without`. A few families break
    the rule, because they go by how Python hashes strings or by a global generator;
    then this warns.

    Args:
        family: such as "chain_sum" or "countdown"; see reasoning-gym for all.
        size: how many tasks.
        seed: of the generator.
        parameters: the family's own, such as min_terms; JSON values.

    Raises:
        ValueError: on an unknown family or parameter (naming those that are near), or a
            value that the family refuses.
    """
    parameters = {"size": size, "seed": seed, **parameters}
    try:
        key = json.dumps(parameters, sort_keys=True)
    except TypeError as error:
        raise ValueError(f"parameters of {family!r} must be JSON: {error}") from error
    dataset = _dataset(family, key)
    if family in _UNREPEATABLE or (
        family in _HASHED and os.environ.get("PYTHONHASHSEED", "random") == "random"
    ):
        mend = "start with PYTHONHASHSEED=0" if family in _HASHED else "take another"
        warnings.warn(
            f"reasoning-gym's {family!r} makes other tasks in every process, so a run "
            f"over it cannot be repeated or resumed exactly: {mend}",
            stacklevel=2,
        )
    return _Reasoning(family, key, dataset)


def score_answer(task: Task, answer: str | None) -> float:
    """What the family's scorer gives an answer to this task, usually in [0, 1].

    The task carries its entry, so nothing is generated again.

    Raises:
        ValueError: if the task is not of reasoning-gym.
    """
    if "family" not in task.data:
        raise ValueError(f"task {task.id!r} does not come from reasoning-gym")
    dataset = _dataset(task.data["family"], task.data["parameters"])
    entry = {
        "question": task.prompt,
        "answer": task.answer,
        "metadata": _thawed(task.data["metadata"]),
    }
    return float(dataset.score_answer(answer, entry))


def load() -> Any:
    """reasoning-gym's factory; the first call takes seconds."""
    with warnings.catch_warnings():
        # A dependency of the package has invalid escapes in its strings.
        warnings.simplefilter("ignore", SyntaxWarning)
        from reasoning_gym import factory
    return factory


@functools.lru_cache(maxsize=64)
def _dataset(family: str, parameters: str) -> Any:
    factory = load()
    if family not in factory.DATASETS:
        raise ValueError(
            f"reasoning-gym has no family {family!r}{_near(family, factory.DATASETS)}"
        )
    known = [field.name for field in dataclasses.fields(factory.DATASETS[family][1])]
    values = json.loads(parameters)
    for name in values:
        if name not in known:
            raise ValueError(
                f"family {family!r} has no parameter {name!r}{_near(name, known)} "
                f"(it has {known})"
            )
    try:
        if "datasets" in values:  # the family "composite" is made of others
            from reasoning_gym.composite import DatasetSpec

            values["datasets"] = [DatasetSpec(**spec) for spec in values["datasets"]]
        return factory.create_dataset(family, **values)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"family {family!r} refuses {values}: {error}") from error


def _near(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _frozen(value: Any) -> Any:
    """As JSON that keeps what JSON loses: tuples, and keys that are not text."""
    if isinstance(value, tuple):
        return {"tuple": [_frozen(item) for item in value]}
    if isinstance(value, dict):
        pairs = [[_frozen(key), _frozen(item)] for key, item in value.items()]
        return {"dict": pairs}
    if isinstance(value, list):
        return [_frozen(item) for item in value]
    return value


def _thawed(value: Any) -> Any:
    if isinstance(value, list):
        return [_thawed(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(_thawed(item) for item in value["tuple"])
    return {_thawed(key): _thawed(item) for key, item in value["dict"]}
