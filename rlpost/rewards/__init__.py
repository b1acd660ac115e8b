"""Rewards: `(samples) -> {part: f32[B]}`, where nan marks what could not be scored."""

from rlpost.rewards.match import exact_match, last_number, number_match
from rlpost.rewards.types import Parts, Reward, Sample, each, reward_of

__all__ = [
    "Parts",
    "Reward",
    "Sample",
    "each",
    "exact_match",
    "last_number",
    "number_match",
    "reward_of",
]
