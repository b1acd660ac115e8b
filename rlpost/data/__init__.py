"""Prompts: where they come from, and in which order."""

from rlpost.data.sums import ALPHABET, sums
from rlpost.data.task import Message, Source, Task

__all__ = ["ALPHABET", "Message", "Source", "Task", "sums"]
