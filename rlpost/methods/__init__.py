"""Published methods, one file each: a factory from documented numbers to an Objective.

The file of a method is called like its experiment, its config, its test and its paper.
"""

from rlpost.methods.dpo import dpo
from rlpost.methods.dr_grpo import dr_grpo
from rlpost.methods.grpo import grpo
from rlpost.methods.ppo import ppo
from rlpost.methods.reinforce import reinforce
from rlpost.methods.rloo import rloo
from rlpost.methods.sft import sft

__all__ = ["dpo", "dr_grpo", "grpo", "ppo", "reinforce", "rloo", "sft"]
