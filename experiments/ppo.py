"""PPO with a learned value baseline, on the tasks of experiments/grpo.py.

Schulman et al., arXiv:1707.06347. The advantage of a token is the reward less what a
value head expected before it (generalised advantage estimation at lambda = gamma = 1).
The head is linear on the policy's last hidden states and is a train state of its own:
"policy" and "critic" learn, are saved and resume side by side.

Variants (configs/ppo.py): smoke, in seconds; small, in minutes.

Command:
    python -m experiments.ppo --config=configs/ppo.py:small
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import jax.numpy as jnp
import optax

from experiments import grpo
from rlpost.advantages import value_baseline
from rlpost.compose import regression
from rlpost.losses import value_error
from rlpost.methods.ppo import ppo
from rlpost.sampling.language_model import LanguageModel
from rlpost.scores import value_scores
from rlpost.training.command import main as command
from rlpost.training.config import Config
from rlpost.training.run import Critic, Run
from rlpost.training.workdir import Workdir


def build(config: Config, model: LanguageModel | None = None) -> Run:
    """The parts of a run as values; see `experiments.grpo.build`."""
    model = grpo.model_of(config) if model is None else model
    method = functools.partial(ppo, advantage=value_baseline)
    critic = Critic(
        score=value_scores(model.policy),
        params={"w": jnp.zeros((model.spec.width, 1)), "b": jnp.zeros(1)},
        objective=regression(value_error),
        optimizer=optax.adam(config.critic.learning_rate),
        updates=config.critic.updates,
    )
    return dataclasses.replace(grpo.build(config, model, method), critic=critic)


def restored(config: Config, folder: Path) -> LanguageModel:
    """The policy of a run of this experiment, for `rlpost sample` and `export`."""
    return grpo.newest(config, folder, build)


def _entry(config: Config, workdir: Workdir) -> None:
    grpo.train(config, workdir, build, "ppo")


main = command(_entry, __doc__, default="configs/ppo.py:small")

if __name__ == "__main__":
    main()
