"""Train step, loop, checkpoints, guards, metrics, configs: what turns parts into a run.

An experiment needs `main`, `check_read`, `run` and what these take and give; the train
step and the online iteration are in `rlpost.training.step` and `.online`.
"""

from rlpost.training.command import main
from rlpost.training.config import Config, check_read
from rlpost.training.guards import Guards
from rlpost.training.loop import Every, Report, run
from rlpost.training.phases import Phases, throughput, train_flops
from rlpost.training.workdir import Workdir

__all__ = [
    "Config",
    "Every",
    "Guards",
    "Phases",
    "Report",
    "Workdir",
    "check_read",
    "main",
    "run",
    "throughput",
    "train_flops",
]
