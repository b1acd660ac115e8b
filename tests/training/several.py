"""A tiny run of several processes; its arguments are those of `main`."""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from rlpost.training.loop import Every, Interrupted, Report, run
from rlpost.training.workdir import Workdir, WorkdirError
from tests.training.tiny import Rows


def main(address, count, index, folder, steps, pause):
    jax.distributed.initialize(address, int(count), int(index))
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    split = NamedSharding(mesh, PartitionSpec("data"))
    whole = NamedSharding(mesh, PartitionSpec())
    local = np.arange(4 * jax.local_device_count(), dtype=np.float32) + 100 * int(index)
    state = {
        "x": jax.make_array_from_process_local_data(split, local),
        "mean": jax.device_put(jnp.zeros(()), whole),
        "key": jax.random.key(0),  # of each process, and the same on all
    }
    data = Rows()
    data.position = 10 * int(index)  # each process reads its own rows

    @jax.jit
    def update(state, rows):
        x = 0.9 * state["x"] + jnp.sum(rows) * 0.01
        x = x + jax.random.normal(state["key"], x.shape)
        key = jax.random.split(state["key"])[0]
        return {"x": x, "mean": jnp.mean(x), "key": key}

    def iterate(state, step):
        rows = jax.make_array_from_process_local_data(split, next(data) * 1.0)
        state = update(state, rows)
        time.sleep(float(pause))
        return state, Report({"mean": state["mean"]})

    try:
        with Workdir(folder) as workdir:
            print("started", flush=True)
            every = Every(save=3)
            state = run(
                iterate,
                state,
                steps=int(steps),
                workdir=workdir,
                every=every,
                host={"data": data},
            )
            print("ended at", float(state["mean"]), flush=True)
    except WorkdirError as error:
        print(f"refused: {error}", flush=True)
        sys.exit(1)
    except Interrupted as message:
        print(message, flush=True)
        sys.exit(75)


if __name__ == "__main__":
    main(*sys.argv[1:])
