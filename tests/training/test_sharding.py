"""Rules on paths: what lies where, and what is refused."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from rlpost.models import DecoderSpec, decoder
from rlpost.training.sharding import make_mesh, shard_params, shard_rows, shardings

SPEC = DecoderSpec(vocab=32, width=16, depth=2, heads=4, kv_heads=2, tied=False)


def test_a_decoder_is_split_over_fsdp_and_tensor(mesh):
    params = decoder(SPEC).init(jax.random.key(0))
    placed = shardings(params, mesh)
    attention, mlp = placed["layers"]["attention"], placed["layers"]["mlp"]
    assert attention["q"].spec == P(None, "fsdp", "tensor")
    assert attention["o"].spec == P(None, "tensor", "fsdp")
    assert mlp["down"].spec == P(None, "tensor", "fsdp")
    assert placed["embed"].spec == P("tensor", "fsdp")
    assert placed["head"].spec == P("fsdp", "tensor")
    assert placed["norm"].spec == P()
    on_mesh = shard_params(params, mesh)
    shard = on_mesh["layers"]["attention"]["q"].addressable_shards[0].data
    assert shard.shape == (2, 8, 8)  # 16 x 16 halved both ways


def test_optimiser_moments_lie_where_their_parameters_do(mesh):
    params = decoder(SPEC).init(jax.random.key(0))
    moments = shardings(optax.adam(1e-3).init(params), mesh)[0]
    assert moments.mu["layers"]["mlp"]["up"].spec == P(None, "fsdp", "tensor")
    assert moments.count.spec == P()


def test_what_does_not_divide_is_named(mesh):
    with pytest.raises(ValueError, match=r"layers/mlp/up.*7 does not divide over 2"):
        shardings({"layers": {"mlp": {"up": jnp.zeros((2, 7, 8))}}}, mesh)
    with pytest.raises(ValueError, match="6 does not divide over 4 devices"):
        shard_rows({"x": jnp.zeros((6, 2))}, mesh)


def test_mesh_sizes(devices):
    assert dict(make_mesh(tensor=2, devices=devices).shape) == {
        "data": 1,
        "fsdp": 4,
        "tensor": 2,
    }
    with pytest.raises(ValueError, match="needs 6 devices, there are 8"):
        make_mesh(data=3, fsdp=2, devices=devices)
    with pytest.raises(ValueError, match="at most one"):
        make_mesh(data=-1, fsdp=-1, devices=devices)


def test_qwen3_8b_is_split_over_all_chips_of_a_pod():
    # Sizes of Qwen3-8B's config.json; shapes alone, no memory is used.
    spec = DecoderSpec(
        vocab=151936,
        width=4096,
        depth=36,
        heads=32,
        kv_heads=8,
        head_size=128,
        ff=12288,
        tied=False,
        qk_norm=True,
    )
    pod = jax.sharding.AbstractMesh((1, 64, 1), ("data", "fsdp", "tensor"))
    shapes = jax.eval_shape(decoder(spec).init, jax.random.key(0))
    placed = shardings(shapes, pod)
    count = 0
    for leaf, sharding in zip(
        jax.tree.leaves(shapes), jax.tree.leaves(placed), strict=True
    ):
        count += leaf.size
        if leaf.size > 10**6:  # all but the norms
            assert sharding.shard_shape(leaf.shape) != leaf.shape
    assert count == 8_190_735_360  # the published count of parameters
