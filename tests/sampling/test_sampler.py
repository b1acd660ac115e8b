import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlpost.models import DecoderSpec, decoder
from rlpost.models.linear import LowRank
from rlpost.sampling.rollout import to_batch
from rlpost.sampling.sampler import Request, Sampler
from rlpost.scores import token_scores
from rlpost.training.sharding import shard_params
from rlpost.types import Finish
from tests.sampling.scripted import always, scripted

VOCAB, LENGTH = 24, 32
BASE = DecoderSpec(vocab=VOCAB, width=16, depth=2, heads=4, kv_heads=2, ff=24)
SPECS = {
    "llama": BASE,
    "qwen2": dataclasses.replace(BASE, qkv_bias=True, tied=False, rope_base=1e6),
    "qwen3": dataclasses.replace(BASE, qk_norm=True, head_size=6),
}


@functools.cache
def params_of(name):
    """Sharp laws, and a low-rank pair on every matrix of a layer."""
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(decoder(SPECS[name]).init, jax.random.key(0))

    def leaf(path, x):
        scale = 0.6 if path[-1].key in ("embed", "head") else 0.3
        value = jnp.asarray(rng.normal(size=x.shape) * scale, jnp.float32)
        if path[-1].key.endswith("norm"):
            return 1.0 + value / 3
        if path[-1].key.endswith("bias"):
            # Large ones sharpen attention until float32 itself is 4e-5 off.
            return value / 6
        if x.ndim < 3:
            return value
        a = jnp.asarray(rng.normal(size=(*x.shape[:-1], 2)) * 0.3, jnp.float32)
        b = jnp.asarray(rng.normal(size=(x.shape[0], 2, x.shape[2])), jnp.float32)
        return LowRank(value, a, b, 0.5)

    return jax.tree_util.tree_map_with_path(leaf, shapes)


@functools.cache
def sampler_of(name, slots, **options):
    return Sampler(decoder(SPECS[name]), slots=slots, length=LENGTH, **options)


def mixed_requests(count=11, **options):
    """Prompts of 1 to 12 tokens, budgets of 1 to 15, temperatures 0.5 to 1.5."""
    rng = np.random.default_rng(5)
    return [
        Request(
            prompt=rng.integers(0, VOCAB, rng.integers(1, 13)).tolist(),
            max_new_tokens=int(rng.integers(1, 16)),
            temperature=float(rng.uniform(0.5, 1.5)),
            seed=i,
            stop_ids=(3, 4),
            **options,
        )
        for i in range(count)
    ]


@functools.cache
def score_of(name):
    return jax.jit(token_scores(decoder(SPECS[name])))


def gap(name, rollout):
    """The largest difference between what the sampler and the trainer say."""
    batch = to_batch(rollout, multiple=LENGTH)
    rows = np.resize(np.arange(len(rollout.tokens)), 16)  # one shape for all tests
    scores = score_of(name)(params_of(name), {}, batch.select(rows))
    return float(jnp.max(jnp.abs(scores.logp - batch.behavior_logp[rows])))


@pytest.mark.parametrize("name", SPECS)
def test_sampler_and_trainer_agree(name):
    sampler = sampler_of(name, 4)  # fewer slots than requests
    rollout = sampler.sample(params_of(name), mixed_requests())
    assert sampler.stats.dispatches > 1
    assert gap(name, rollout) <= 1e-5
    spread = rollout.behavior_logp[rollout.mask]
    assert spread.min() < -1.0 < spread.max()  # not all tokens were certain


def test_sampler_and_trainer_agree_where_support_was_cut():
    filters = {"top_k": 9, "top_p": 0.8, "min_p": 0.02}
    sampler = sampler_of("llama", 4)
    rollout = sampler.sample(params_of("llama"), mixed_requests(**filters))
    assert gap("llama", rollout) <= 1e-5
    assert (rollout.kept[rollout.mask] < 0.99).any()
    assert (rollout.kept[rollout.mask] >= 0.8 * 0.1).all()
    assert (rollout.kept[~rollout.mask] == 1).all()


def responses(rollout):
    return [
        rollout.tokens[i, rollout.prompt_length[i] : rollout.length[i]].tolist()
        for i in range(len(rollout.tokens))
    ]


@pytest.mark.slow
def test_what_is_drawn_depends_on_the_request_alone():
    requests, params = mixed_requests(), params_of("llama")
    whole = responses(sampler_of("llama", 4).sample(params, requests))
    order = np.random.default_rng(0).permutation(len(requests))
    shuffled = [requests[i] for i in order]
    again = responses(sampler_of("llama", 4).sample(params, shuffled))
    assert again == [whole[i] for i in order]
    # All in slots of their own, and one alone.
    assert responses(sampler_of("llama", 16).sample(params, requests)) == whole
    assert responses(sampler_of("llama", 4).sample(params, requests[7:8])) == whole[7:8]
    # A neighbour that asks for filters or greed compiles another program.
    rich = Request(prompt=[1], max_new_tokens=3, temperature=0, top_k=2, top_p=0.5)
    mixed = sampler_of("llama", 4).sample(params, [rich, *requests])
    assert responses(mixed)[1:] == whole


def test_seeds_of_a_group_differ_and_long_seeds_count():
    def first(seed):
        request = Request(prompt=[1, 2], max_new_tokens=12, seed=seed)
        return responses(sampler_of("llama", 4).sample(params_of("llama"), [request]))

    assert first(1) == first(1)
    assert len({str(first(s)) for s in (0, 1, 2**32, 2**64 - 1)}) == 4


def test_a_prompt_is_read_once_for_all_its_responses():
    prompts = [[5, 6, 7, 8], [9, 10], [1]]
    requests = [
        Request(prompt=p, max_new_tokens=4 + i, seed=i)
        for p in prompts
        for i in range(5)
    ]
    sampler = sampler_of("llama", 4)  # so that a group enters at several times
    rollout = sampler.sample(params_of("llama"), requests)
    assert sampler.stats.prefilled == 3 + 1  # without the last token, read by decoding
    assert gap("llama", rollout) <= 1e-5


def test_steady_state_compiles_nothing():
    sampler = Sampler(decoder(BASE), slots=4, length=LENGTH)
    sampler.sample(params_of("llama"), mixed_requests())
    programs = (sampler._decode, sampler._extend, sampler._copy)
    sizes = [program._cache_size() for program in programs]
    for seed in range(3):
        requests = [dataclasses.replace(r, seed=seed) for r in mixed_requests()]
        sampler.sample(params_of("llama"), requests)
    assert [program._cache_size() for program in programs] == sizes
    assert sizes[0] == 1


def test_the_cache_grows_with_the_rows():
    requests, params = mixed_requests(), params_of("llama")
    grows = sampler_of("llama", 4, columns=1, steps=3)
    rollout = grows.sample(params, requests)
    assert grows._grow._cache_size() == 1  # 16 columns, then all
    whole = sampler_of("llama", 4).sample(params, requests)
    assert responses(rollout) == responses(whole)
    assert gap("llama", rollout) <= 1e-5


def test_small_jobs_take_one_dispatch_and_stop_early():
    sampler = sampler_of("llama", 4)
    requests = [Request(prompt=[i], max_new_tokens=3 + i) for i in range(3)]
    sampler.sample(params_of("llama"), requests)
    assert sampler.stats.dispatches == 1
    assert sampler.stats.slot_steps == 4 * 5
    assert sampler.stats.drawn == 3 + 4 + 5
    assert sampler.stats.utilisation == 12 / 20


def test_finish_reasons_and_masks():
    # After position p comes p + 1, so the row counts upwards from its prompt's length.
    table = always(range(1, 17), 20)
    sampler = Sampler(scripted(), slots=2, length=16, steps=3)
    rollout = sampler.sample(
        table,
        [
            Request(prompt=[0, 1], max_new_tokens=9, stop_ids=(18, 5)),
            Request(prompt=[0], max_new_tokens=4, stop_ids=(5,)),
            Request(prompt=[0, 1, 2], max_new_tokens=99),
            Request(prompt=[0], max_new_tokens=5, stop_ids=(5,)),
        ],
        version=7,
    )
    # A stop token that comes with the last of the budget is a stop.
    expected = [Finish.STOP, Finish.LENGTH, Finish.LENGTH, Finish.STOP]
    assert rollout.finish.tolist() == expected
    assert rollout.truncated.tolist() == [False, True, True, False]
    assert rollout.length.tolist() == [6, 5, 16, 6]
    assert rollout.prompt_length.tolist() == [2, 1, 3, 1]
    assert rollout.version.tolist() == [7] * 4
    slots = np.arange(16)
    start, end = rollout.prompt_length[:, None], rollout.length[:, None]
    np.testing.assert_array_equal(rollout.mask, (slots >= start) & (slots < end))
    np.testing.assert_array_equal(rollout.tokens, np.where(slots < end, slots, 0))


LETTERS = "abcdefghijklmnopqrst"


def spell(ids):
    return "".join(LETTERS[i] for i in ids)


@pytest.mark.parametrize("steps", [1, 3, 99])
def test_stop_texts_cut_after_the_token_that_completes_one(steps):
    sampler = Sampler(
        scripted(), slots=3, length=16, decode=spell, steps=steps, text_steps=steps
    )
    more = {"prompt": [0, 1], "max_new_tokens": 9}
    rollout = sampler.sample(
        always(range(1, 17), 20),
        [
            Request(**more, stop_texts=("zz", "def")),
            Request(**more, stop_texts=("bcd",)),  # begins in the prompt: not drawn
            Request(**more, stop_texts=("ef",), stop_ids=(5,)),  # both with one token
            Request(**more, stop_texts=("f", "cd"), stop_ids=(5,)),
        ],
    )
    assert rollout.finish.tolist() == [
        *(Finish.TEXT, Finish.LENGTH, Finish.STOP, Finish.TEXT)
    ]
    assert responses(rollout) == [
        [2, 3, 4, 5],
        list(range(2, 11)),
        [2, 3, 4, 5],
        [2, 3],
    ]
    assert (rollout.mask.sum(axis=1) == rollout.length - 2).all()
    assert (rollout.tokens[0, 6:] == 0).all()


def test_greedy_rows_take_the_likeliest_and_are_certain():
    request = Request(prompt=[1, 2, 3], max_new_tokens=8, temperature=0)
    rollout = sampler_of("llama", 4).sample(params_of("llama"), [request])
    apply = jax.jit(decoder(BASE).apply)
    law, _ = apply(params_of("llama"), jnp.asarray(rollout.tokens))
    best = np.argmax(law.all_logits(), axis=-1)
    np.testing.assert_array_equal(rollout.tokens[0, 3:], best[0, 2:-1])
    assert (rollout.behavior_logp == 0).all()


def test_draws_follow_the_law_through_the_slots():
    logits = np.random.default_rng(3).normal(size=8)
    table = jnp.asarray(np.tile(logits, (4, 1)), jnp.float32)
    requests = [Request(prompt=[0], max_new_tokens=2, seed=i) for i in range(2000)]
    rollout = Sampler(scripted(), slots=128, length=4).sample(table, requests)
    probs = np.exp(logits) / np.exp(logits).sum()
    expected = probs * 2000
    for position in (1, 2):
        counts = np.bincount(rollout.tokens[:, position], minlength=8)
        statistic = ((counts - expected) ** 2 / expected).sum()
        assert statistic <= 7 + 5 * np.sqrt(14)  # mean n - 1, variance 2 (n - 1)
    pairs = np.bincount(rollout.tokens[:, 1] * 8 + rollout.tokens[:, 2], minlength=64)
    expected = np.outer(probs, probs).ravel() * 2000
    statistic = ((pairs - expected) ** 2 / expected).sum()
    assert statistic <= 63 + 5 * np.sqrt(126)  # successive draws are independent


def test_long_tailed_lengths_keep_the_slots_busy():
    # Pareto lengths from 8 to 256; on the way, an eighth of the slots may wait.
    rng = np.random.default_rng(0)
    budget = np.minimum(8 * (1 + rng.pareto(1.2, 512)), 256).astype(int)
    requests = [Request(prompt=[0], max_new_tokens=int(n)) for n in budget]
    sampler = Sampler(scripted(), slots=16, length=300)
    rollout = sampler.sample(jnp.zeros((300, 3)), requests)
    assert (rollout.length == budget + 1).all()
    # In fixed batches of 16, each as long as its longest row:
    fixed = budget.sum() / (16 * budget.reshape(-1, 16).max(axis=1)).sum()
    assert fixed < 0.35
    assert sampler.stats.utilisation > 0.85


def test_progress_is_told():
    seen = []
    requests = mixed_requests()
    sampler_of("llama", 4).sample(
        params_of("llama"), requests, progress=lambda *numbers: seen.append(numbers)
    )
    assert [total for _, total, _ in seen] == [11] * len(seen)
    finished = [done for done, _, _ in seen]
    assert finished == sorted(finished)
    assert finished[-1] == 11
    assert seen[-1][2] == sampler_of("llama", 4).stats.drawn


@pytest.mark.slow
def test_half_precision_weights_sample_their_own_law():
    policy = decoder(BASE, dtype=jnp.bfloat16)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params_of("llama"))
    rollout = Sampler(policy, slots=4, length=LENGTH).sample(params, mixed_requests())
    assert rollout.behavior_logp.dtype == np.float32
    batch = to_batch(rollout)
    scores = jax.jit(token_scores(policy))(params, {}, batch)
    difference = np.abs(scores.logp - batch.behavior_logp)[rollout.mask]
    assert difference.mean() < 0.05  # the order of sums differs, 8 bits of precision


@pytest.mark.slow
def test_a_mesh_draws_the_same_tokens(mesh):
    requests, params = mixed_requests(), params_of("qwen2")
    axes = jax.sharding.PartitionSpec(None, ("data", "fsdp"), None, "tensor")
    sharded = Sampler(
        decoder(SPECS["qwen2"]),
        slots=4,
        length=LENGTH,
        cache_sharding=jax.sharding.NamedSharding(mesh, axes),
    )
    plain = jax.tree.map(
        lambda w: w.base if isinstance(w, LowRank) else w,
        params,
        is_leaf=lambda w: isinstance(w, LowRank),
    )
    whole = sampler_of("qwen2", 4).sample(plain, requests)
    rollout = sharded.sample(shard_params(plain, mesh), requests)
    assert responses(rollout) == responses(whole)
    np.testing.assert_allclose(rollout.behavior_logp, whole.behavior_logp, atol=1e-5)


GOOD = Request(prompt=[1, 2], max_new_tokens=3)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"prompt": []}, "request 1: the prompt is empty"),
        ({"prompt": [1] * 32}, r"has 32 tokens, at most 31 .* length of 32"),
        ({"prompt": [1, 24]}, r"token id 24 at index 1 .* ids 0 to 23"),
        ({"prompt": [-1]}, "token id -1"),
        ({"prompt": "ab"}, "encode texts first"),
        ({"prompt": [1.5]}, "float64"),
        ({"prompt": [[1]]}, r"shape \[1, 1\]"),
        ({"temperature": -0.1}, r"temperature must be in \[0.0, .*got -0.1"),
        ({"temperature": float("nan")}, "temperature must be in"),
        ({"temperature": 1e-39}, r"must be 0 .* or at least 0.001, got 1e-39"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, r"top_p must be in \[0.0, 1.0\], got 1.1"),
        ({"min_p": 1.5}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"max_new_tokens": 0}, "max_new_tokens must be in"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop_ids": (99,)}, "stop_ids: token id 99"),
        ({"stop_texts": ("x",)}, "needs a sampler with decode"),
        ({"stop_texts": ("",)}, "not empty"),
        ({"stop_texts": "x"}, "a tuple of texts"),
    ],
)
def test_wrong_requests_are_named_before_anything_is_sampled(change, message):
    wrong = dataclasses.replace(GOOD, **change)
    sampler = sampler_of("llama", 4)
    with pytest.raises(ValueError, match=message) as error:
        sampler.sample(params_of("llama"), [GOOD, wrong])
    assert "request 1" in str(error.value)


def test_no_requests_and_impossible_sizes_are_errors():
    with pytest.raises(ValueError, match="no requests"):
        sampler_of("llama", 4).sample(params_of("llama"), [])
    with pytest.raises(ValueError, match="slots must be at least 1, got 0"):
        Sampler(decoder(BASE), slots=0, length=8)
    with pytest.raises(ValueError, match="length - 1 must be at least 1, got 0"):
        Sampler(decoder(BASE), slots=1, length=1)
