"""Rewards: `(samples) -> {part: f32[B]}`, where nan marks what could not be scored."""

from rlpost.rewards.combine import gate, weighted
from rlpost.rewards.match import (
    exact_match,
    final_number,
    last_number,
    number_match,
)
from rlpost.rewards.pool import Failure, RewardError, RewardPool, Scored, score_here
from rlpost.rewards.shape import finished, format_match, overlong
from rlpost.rewards.types import Parts, Reward, Sample, each, reward_of
from rlpost.rewards.verifiers import math_equal, reasoning_score

__all__ = [
    "Failure",
    "Parts",
    "Reward",
    "RewardError",
    "RewardPool",
    "Sample",
    "Scored",
    "each",
    "exact_match",
    "final_number",
    "finished",
    "format_match",
    "gate",
    "last_number",
    "math_equal",
    "number_match",
    "overlong",
    "reasoning_score",
    "reward_of",
    "score_here",
    "weighted",
]
