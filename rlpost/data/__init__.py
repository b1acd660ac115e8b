"""Prompts: where they come from, and in which order.

What needs JAX or tensorflow-datasets is imported by its own name, since reward workers
import this package: `data.likelihood`, `data.builders`, `data.word_sums`.
"""

from rlpost.data.pipeline import Prompts
from rlpost.data.reasoning import reasoning
from rlpost.data.sources import jsonl, without
from rlpost.data.sums import ALPHABET, sums
from rlpost.data.task import Message, Source, Task

__all__ = [
    "ALPHABET",
    "Message",
    "Prompts",
    "Source",
    "Task",
    "jsonl",
    "reasoning",
    "sums",
    "without",
]
