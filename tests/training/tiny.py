"""A tiny real run: regression by Adam, its data read by position, its noise by key.

As a program (`python -m tests.training.tiny WORKDIR STEPS PAUSE`) it is what the tests
start, signal and kill.
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlpost.training.loop import Every, Interrupted, Report, run
from rlpost.training.phases import Phases
from rlpost.training.progress import Progress
from rlpost.training.workdir import Workdir


class Stop(Exception):
    """What ends a run at a chosen step."""


class Rows:
    """Batches of rows 0, 1, 2, ... of an endless data set; its state is a position."""

    def __init__(self, batch=2):
        self.batch = batch
        self.position = 0

    def __next__(self):
        rows = np.arange(self.position, self.position + self.batch)
        self.position += self.batch
        return rows

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


optimiser = optax.adam(0.05)


def initial():
    params = {"w": jnp.zeros((3, 2)), "b": jnp.zeros(2, jnp.bfloat16)}
    return {
        "policy": {"params": params, "opt": optimiser.init(params)},
        "key": jax.random.key(3),
        "baseline": jnp.zeros(()),
    }


@jax.jit
def update(state, rows):
    key, noise = jax.random.split(state["key"])
    x = jnp.sin(rows[:, None] * jnp.array([1.0, 2.0, 3.0]))
    x = x + 0.1 * jax.random.normal(noise, x.shape)

    def loss(params):
        return jnp.mean((x @ params["w"] + params["b"] - x[:, :2] - 1.0) ** 2)

    params, opt = state["policy"]["params"], state["policy"]["opt"]
    value, grad = jax.value_and_grad(loss)(params)
    updates, opt = optimiser.update(grad, opt, params)
    policy = {"params": optax.apply_updates(params, updates), "opt": opt}
    baseline = 0.9 * state["baseline"] + 0.1 * value
    return {"policy": policy, "key": key, "baseline": baseline}, value


def iteration(data, phases, seen=None, pause=0.0, stop=None):
    def iterate(state, step):
        if step == stop:
            raise Stop
        rows = next(data)
        if seen is not None:
            seen.append(rows.tolist())
        with phases("train") as ready:
            state, loss = ready(update(state, rows))
        time.sleep(pause)
        sample = {"prompt": f"rows {rows.tolist()}", "response": "x", "reward": 1.0}
        metrics = {"loss": loss, "baseline": state["baseline"], "row": rows[0]}
        return state, Report(metrics, [sample])

    return iterate


def evaluate(state, step):
    return Report({"norm": jnp.sum(state["policy"]["params"]["w"] ** 2)})


def train(workdir, steps, *, seen=None, pause=0.0, stop=None, **options):
    data, phases = Rows(), Phases()
    options.setdefault("progress", Progress(steps, live=False))
    return run(
        iteration(data, phases, seen, pause, stop),
        initial(),
        steps=steps,
        workdir=workdir,
        evaluate=evaluate,
        every=Every(evaluate=4, save=3),
        host={"data": data},
        phases=phases,
        **options,
    )


if __name__ == "__main__":
    try:
        with Workdir(sys.argv[1]) as folder:
            print("started", flush=True)
            train(folder, int(sys.argv[2]), pause=float(sys.argv[3]))
    except Interrupted as message:
        print(message)
        sys.exit(75)
