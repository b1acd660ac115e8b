"""Two train states in one run: both learn, both are saved, both resume."""

import jax
import numpy as np
import pytest

from experiments import grpo, ppo
from rlpost.training import config as configs
from rlpost.training.checkpoints import Checkpoints
from rlpost.training.metrics import read, without_clock
from rlpost.training.online import online
from rlpost.training.workdir import Workdir


def run(folder, *changes):
    # Enough lessons for some answers to be right: a run without any has no gradient.
    lessons = ("config.pretrain.steps=60", "config.average=0.5")
    config = configs.load("configs/ppo.py:smoke", [*lessons, *changes])
    with Workdir(folder, change_config=True) as workdir:
        grpo.train(config, workdir, ppo.build, "ppo")
    return config


@pytest.mark.slow
def test_policy_and_critic_learn_and_resume_side_by_side(tmp_path):
    config = run(tmp_path / "whole")
    run(tmp_path / "halves", "config.steps=2")
    run(tmp_path / "halves")
    like = online(ppo.build(config)).state
    assert set(like) == {"policy", "critic", "average"}
    whole, halves = (
        Checkpoints(tmp_path / name / "checkpoints").restore(like).state
        for name in ("whole", "halves")
    )
    jax.tree.map(np.testing.assert_array_equal, whole, halves)
    assert np.abs(whole["critic"].params["w"]).max() > 0
    assert int(whole["critic"].step) == 3 * config.critic.updates
    embed = [whole["policy"].params["embed"], whole["average"]["embed"]]
    assert np.abs(embed[0] - embed[1]).max() > 0
    lines = [read(tmp_path / name / "metrics.jsonl") for name in ("whole", "halves")]
    final = [without_clock(line[-1]) for line in lines]
    assert final[0] == final[1]
    trained = [line for line in lines[0] if line["kind"] == "train"]
    assert all(np.isfinite(line["critic/loss/error"]) for line in trained)
    assert all(line["guard/signal"] >= 0 for line in trained)


def test_a_group_of_one_is_enough_for_a_critic():
    config = configs.load("configs/ppo.py:smoke", ["config.group_size=1"])
    assert ppo.build(config).group_size == 1
