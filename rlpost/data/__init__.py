"""Prompts: where they come from, and in which order."""

from rlpost.data.reasoning import reasoning
from rlpost.data.sources import jsonl, without
from rlpost.data.sums import ALPHABET, sums
from rlpost.data.task import Message, Source, Task

__all__ = [
    "ALPHABET",
    "Message",
    "Source",
    "Task",
    "jsonl",
    "reasoning",
    "sums",
    "without",
]
