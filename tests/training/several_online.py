"""An online run over the devices of several processes; arguments as of `main`."""

import json
import sys

import jax
import numpy as np
import optax

from rlpost.training.online import online
from rlpost.training.sharding import make_mesh
from tests.training import test_online

NAMES = ("reward/mean", "reward/unscored", "response/tokens", "kl", "gradient/norm")


def reward(samples):
    """What only the first process can score in full; the others would know less."""
    scored = test_online.share_of_digits(samples)
    if jax.process_index() > 0:
        scored["reward"] = np.where(scored["reward"] > 0.3, np.nan, 0.0)
    return scored


def tell(devices):
    """Some metrics of the last of two iterations over a mesh of these devices."""
    run = test_online.run_of(
        reward=reward,
        mesh=make_mesh(data=2, fsdp=2, devices=devices),
        optimizer=optax.sgd(0.1),
        rows=8,
    )
    program = online(run)
    state = program.state
    for step in range(2):
        state, report = program.iterate(state, step)
    return {name: float(report.metrics[name]) for name in NAMES}


def main(address, count, index):
    jax.distributed.initialize(address, int(count), int(index))
    print("told", json.dumps(tell(jax.devices())), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
