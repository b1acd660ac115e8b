import time

import jax
import jax.numpy as jnp
import pytest

from rlpost.training.phases import Phases, peak_flops, throughput, train_flops


class Device:
    """What `throughput` asks of a device that this machine has not."""

    def __init__(self, kind):
        self.device_kind = kind


def test_seconds_add_up_by_phase_until_they_are_taken():
    phases = Phases()
    for _ in range(2):
        with phases("sample"):
            time.sleep(0.02)
    with phases("train") as ready:
        ready(jax.jit(lambda x: x + 1)(jnp.ones(3)))
    assert 0.04 <= phases.seconds("sample") < 0.5
    taken = phases.take()
    assert list(taken) == ["time/sample", "time/train"]
    assert taken["time/sample"] >= 0.04
    assert phases.take() == {}
    assert phases.seconds("sample") == 0.0


def test_a_phase_that_raises_counts_too():
    phases = Phases()
    with pytest.raises(ZeroDivisionError), phases("reward"):
        raise ZeroDivisionError
    assert "time/reward" in phases.take()


def test_flops_by_hand():
    # 10 tokens, 1000 parameters: 6 * 1000 each. With LoRA 50 train: 4 * 1000 + 2 * 50.
    assert train_flops(10, 1000) == 60_000
    assert train_flops(10, 1000, trained=50) == 41_000
    # 2 layers of width 8 that see 16 keys: forward 4 * 2 * 8 * 16 = 1024, thrice that.
    assert train_flops(1, 0, layers=2, width=8, context=16) == 3072


def test_a_dense_layer_costs_what_xla_counts():
    # Forward and both gradients of a product [T, D] x [D, F]: 6 T D F.
    t, d, f = 32, 64, 48
    step = jax.jit(jax.grad(lambda x, w: jnp.sum((x @ w) ** 2), argnums=(0, 1)))
    lowered = step.lower(jnp.ones((t, d)), jnp.ones((d, f)))
    counted = lowered.compile().cost_analysis()["flops"]
    assert counted == pytest.approx(train_flops(t, d * f), rel=0.05)


def test_throughput_and_the_share_of_the_peak():
    two = [Device("TPU v5p"), Device("TPU v5p")]
    speed = throughput(1000, 2.0, flops=459e12, devices=two)
    assert speed == {"speed/tokens_per_s": 500.0, "speed/mfu": 0.25}
    assert throughput(1000, 2.0) == {"speed/tokens_per_s": 500.0}
    assert "speed/mfu" not in throughput(1000, 2.0, flops=1e9)  # a CPU has no peak
    assert throughput(0, 0.0) == {}


def test_the_longest_name_of_a_kind_counts():
    assert peak_flops("TPU v5 lite") == 197e12
    assert peak_flops("TPU v5") == 459e12
    assert peak_flops("NVIDIA H200") == 989e12
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("cpu") is None
