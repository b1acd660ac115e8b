"""A tensorflow-datasets builder of GSM8K's shape that is generated, not downloaded."""

from __future__ import annotations

import dataclasses
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import tensorflow_datasets as tfds

_NAMES = ("Ann", "Ben", "Eve", "Max", "Mia", "Tom")
_THINGS = ("apples", "books", "coins", "pens", "stamps")


@dataclasses.dataclass
class WordSumsConfig(tfds.core.BuilderConfig):
    """How many records to make: `size` to train on, a fifth as many to test."""

    size: int = 1000
    seed: int = 0


class WordSums(tfds.core.GeneratorBasedBuilder):
    """Sums told as one-sentence stories, answered step by step."""

    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [WordSumsConfig(name="default")]  # noqa: RUF012 (as tfds has it)
    code_path = None  # no checksums lie beside this file: nothing is downloaded

    def _info(self) -> Any:
        text = {"question": tfds.features.Text(), "answer": tfds.features.Text()}
        features = tfds.features.FeaturesDict(text)
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        size = self.builder_config.size
        return {
            "train": self._generate_examples(size, False),
            "test": self._generate_examples(size // 5, True),
        }

    def _generate_examples(
        self, count: int, test: bool
    ) -> Iterator[tuple[int, dict[str, str]]]:
        rng = random.Random(f"{self.builder_config.seed} {test}")
        for index in range(count):
            yield index, _word_sum(rng, test)


def word_sums(
    data_dir: str | pathlib.Path, *, size: int = 1000, seed: int = 0
) -> WordSums:
    """The builder, prepared: for `builders.from_builder`.

    Args:
        data_dir: where the records go, or went; a folder for each size and seed.
        size: records in "train", at least 5; "test" has a fifth as many, about other
            numbers of things.
        seed: of the generator.
    """
    if size < 5:
        raise ValueError(f"size must be at least 5, got {size}")
    config = WordSumsConfig(name=f"size_{size}_seed_{seed}", size=size, seed=seed)
    builder = WordSums(
        data_dir=str(data_dir), config=config, file_format="array_record"
    )
    builder.download_and_prepare()
    return builder


def _word_sum(rng: random.Random, test: bool) -> dict[str, str]:
    # The first number tells the splits apart: a multiple of 5 is for testing.
    first = rng.choice([n for n in range(2, 100) if (n % 5 == 0) == test])
    second = rng.randrange(2, 100)
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    return {
        "question": f"{name} has {first} {thing} and gets {second} more. "
        f"How many {thing} does {name} have now?",
        "answer": f"{name} has {first} + {second} = {first + second} {thing} now.\n"
        f"#### {first + second}",
    }
