"""Where the time of a step goes, and how fast that is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

# Dense bfloat16 peak of one device, FLOP/s, from the makers' data sheets; the keys are
# how `device_kind` begins. A kind that is not listed has no MFU.
PEAK_FLOPS = {
    "TPU v3": 61.5e12,  # a core, two to a chip
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA B200": 2250e12,
}


class Phases:
    """Seconds by phase, summed until they are taken.

        with phases("train") as ready:
            state, metrics = ready(step(state, batch))

    JAX returns before a result is there: `ready` waits for it, so that its time counts
    for the phase that caused it.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[Any]:
        start = time.perf_counter()
        try:
            yield jax.block_until_ready
        finally:
            spent = time.perf_counter() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + spent

    def seconds(self, name: str) -> float:
        """What the phase took since the last `take`; 0 if it did not run."""
        return self._seconds.get(name, 0.0)

    def take(self) -> dict[str, float]:
        """{"time/<phase>": seconds} since the last call, and start anew."""
        taken = {f"time/{k}": round(v, 4) for k, v in self._seconds.items()}
        self._seconds = {}
        return taken


def train_flops(
    tokens: int,
    parameters: int,
    *,
    trained: int | None = None,
    layers: int = 0,
    width: int = 0,
    context: float = 0.0,
) -> float:
    """Model FLOPs of a forward and backward pass; recomputation does not count.

    A token costs 2 FLOPs per parameter forward, 2 for the gradient of the activations,
    and 2 per trained parameter for its own; attention adds 4 * layers * width * context
    forward and twice that backward.

    Args:
        tokens: how many, padding left out.
        parameters: that a token meets (of a mixture, the active ones), with the output
            matrix and without the embedding table.
        trained: parameters that get a gradient; None means all.
        layers, width: of the attention, width = heads * head size; 0 leaves it out.
        context: keys that a query sees on average, half the length if causal.

    References:
        Kaplan et al., Scaling Laws for Neural Language Models, arXiv:2001.08361, 2.1.
    """
    trained = parameters if trained is None else trained
    attention = 3 * 4 * layers * width * context
    return tokens * (4.0 * parameters + 2.0 * trained + attention)


def throughput(
    tokens: int,
    seconds: float,
    *,
    flops: float | None = None,
    devices: list[Any] | None = None,
) -> dict[str, float]:
    """Metrics of speed: "speed/tokens_per_s" and, where the peak is known, "speed/mfu".

    Args:
        tokens: done by all devices together in `seconds`.
        seconds: of wall time.
        flops: model FLOPs of those tokens; None leaves MFU out.
        devices: that worked; None means all. MFU, a share in [0, 1], is of their
            bfloat16 peak; on a CPU there is none and it is left out.
    """
    if seconds <= 0:
        return {}
    speed = {"speed/tokens_per_s": tokens / seconds}
    devices = jax.devices() if devices is None else devices
    peak = peak_flops(devices[0].device_kind)
    if flops is not None and peak is not None:
        speed["speed/mfu"] = flops / seconds / (peak * len(devices))
    return speed


def peak_flops(kind: str) -> float | None:
    """bfloat16 FLOP/s of a device of this `device_kind`; None where not known."""
    names = [name for name in PEAK_FLOPS if kind.startswith(name)]
    return PEAK_FLOPS[max(names, key=len)] if names else None
