import jax.numpy as jnp
import numpy as np
import pytest

from rlpost.sampling.agent import Turn, text_environment
from rlpost.sampling.sampler import Request, Sampler
from rlpost.types import Finish
from tests.conformance import case
from tests.sampling.scripted import always, scripted
from tests.sampling.test_sampler import LENGTH, VOCAB, gap, params_of, sampler_of

COUNTING = always(range(1, 17), 20)  # the token at position p is p


def counting(environment, requests, length=16, **options):
    sampler = Sampler(scripted(), slots=2, length=length)
    return sampler.sample(COUNTING, requests, environment=environment, **options)


def test_token_in_token_out_conformance():
    peer = case("token_in_token_out_multi_turn")
    given, expected = peer["inputs"], peer["expected"]
    vocab = given["toy_vocab"]
    names = {i: text for text, i in vocab.items()}
    he, llo, said, tool = *given["turn1_sampled_ids"], *given["turn2_sampled_ids"], 4

    # The laws after the prompt, of which the example's tokens have these log-probs.
    law = np.full((8, 5), -np.inf)
    steps = [
        (0, he, given["turn1_sampler_logps"][0]),
        (1, llo, given["turn1_sampler_logps"][1]),
        (3, said, given["turn2_sampler_logps"][0]),
    ]
    for position, token, logp in steps:
        rest = [i for i in range(4) if i != token]
        law[position, rest] = np.log((1 - np.exp(logp)) / 3)
        law[position, token] = logp

    def step(index, text):
        return (given["tool_result_text"], False) if "!" not in text else None

    def decode(ids):
        return "".join(names[i] for i in ids)

    # Two tokens a turn; the five slots then leave the second turn one.
    environment = text_environment(step, decode=decode, encode=lambda t: [vocab[t]])
    requests = [Request(prompt=[2], max_new_tokens=2, seed=i) for i in range(64)]
    rollout = Sampler(scripted(), slots=16, length=5).sample(
        jnp.asarray(law, jnp.float32), requests, environment=environment
    )
    wanted = [2, *expected["training_ids"]]
    found = [i for i in range(64) if rollout.tokens[i].tolist() == wanted]
    assert found  # about one in five
    row = found[0]
    assert rollout.mask[row, 1:].tolist() == [bool(x) for x in expected["loss_mask"]]
    drawn = rollout.behavior_logp[row][rollout.mask[row]]
    np.testing.assert_allclose(drawn, expected["old_logps_at_mask1"], atol=1e-6)
    assert rollout.behavior_logp[row, 3] == 0
    assert rollout.tokens[row, 3] == tool


@pytest.mark.slow
def test_turns_keep_the_cache_and_agree_with_the_trainer():
    # Turns of different lengths, tokens of the environment from none to nine.
    asked = []

    def environment(index, tokens, new):
        asked.append(index)
        turns = asked.count(index)
        if turns == 3:
            return Turn((), done=True)
        return Turn([(index + 7 * i) % VOCAB for i in range(index * turns)])

    requests = [
        Request(prompt=[i + 1] * (5 - i), max_new_tokens=2 + i, seed=i, stop_ids=(2,))
        for i in range(5)
    ]
    sampler = sampler_of("qwen3", 2)
    rollout = sampler.sample(params_of("qwen3"), requests, environment=environment)
    assert gap("qwen3", rollout) <= 1e-5
    assert rollout.tokens.shape[1] <= LENGTH
    assert (rollout.mask.sum(axis=1) > 2).all()
    drawn = rollout.mask.sum(axis=1)
    appended = rollout.length - rollout.prompt_length - drawn
    # Index times (1 + 2) tokens, unless the row was full before.
    whole = rollout.finish == Finish.ENVIRONMENT
    assert whole[:3].all()
    np.testing.assert_array_equal(appended[whole], 3 * np.arange(5)[whole])
    # Each turn reads the last token drawn and what was appended but for its last.
    again = sampler.stats.prefilled - sum(len(r.prompt) - 1 for r in requests)
    turns = {i: asked.count(i) - 1 for i in range(1, 5)}
    assert again <= appended.sum() + sum(turns.values())


def test_an_environment_sees_its_row_and_ends_it():
    seen = []

    def environment(index, tokens, new):
        seen.append((index, tokens, new))
        return Turn([0, 0]) if len(seen) == 1 else Turn([9], done=True)

    rollout = counting(environment, [Request(prompt=[0, 1], max_new_tokens=3)])
    # Slots 2 to 4 are drawn, 5 and 6 appended, 7 to 9 drawn, 10 a last observation.
    assert rollout.tokens[0].tolist() == [0, 1, 2, 3, 4, 0, 0, 7, 8, 9, 9]
    assert np.flatnonzero(rollout.mask[0]).tolist() == [2, 3, 4, 7, 8, 9]
    assert rollout.finish.tolist() == [Finish.ENVIRONMENT]
    assert seen[0] == (0, [0, 1, 2, 3, 4], [2, 3, 4])
    assert seen[1] == (0, rollout.tokens[0, :10].tolist(), [7, 8, 9])


def test_none_leaves_the_row_with_its_own_reason():
    requests = [
        Request(prompt=[0], max_new_tokens=3),
        Request(prompt=[0], max_new_tokens=3, stop_ids=(2,)),
    ]
    rollout = counting(lambda *_: None, requests)
    assert rollout.finish.tolist() == [Finish.LENGTH, Finish.STOP]


def test_a_turn_without_tokens_goes_on_drawing():
    def environment(index, tokens, new):
        return Turn() if len(tokens) < 8 else None

    request = Request(prompt=[0], max_new_tokens=3)
    rollout = counting(environment, [request])
    assert rollout.tokens[0].tolist() == list(range(10))
    assert rollout.mask[0].tolist() == [False] + [True] * 9


def test_a_row_without_room_for_an_answer_ends():
    def environment(index, tokens, new):
        return Turn([0] * 12)

    # 16 slots: 4 are used, 12 more leave none to draw in; 11 leave one.
    rollout = counting(environment, [Request(prompt=[0, 1], max_new_tokens=2)])
    assert rollout.length.tolist() == [4]
    assert rollout.finish.tolist() == [Finish.LENGTH]
    rollout = counting(
        lambda *_: Turn([0] * 11), [Request(prompt=[0, 1], max_new_tokens=2)]
    )
    assert rollout.length.tolist() == [16]
    assert rollout.finish.tolist() == [Finish.LENGTH]
    assert np.flatnonzero(rollout.mask[0]).tolist() == [2, 3, 15]


@pytest.mark.parametrize(
    "answer, kind", [(None, KeyError), (Turn([20]), ValueError), ([1], TypeError)]
)
def test_an_environment_that_fails_ends_its_row_alone(answer, kind):
    def environment(index, tokens, new):
        if index != 1:
            return None
        if answer is None:
            raise KeyError("tool is down")
        return answer

    errors = {}
    requests = [Request(prompt=[0], max_new_tokens=3) for _ in range(4)]
    rollout = counting(environment, requests, on_error=errors.__setitem__)
    assert rollout.finish.tolist() == [
        *(Finish.LENGTH, Finish.ERROR, Finish.LENGTH, Finish.LENGTH)
    ]
    assert rollout.length.tolist() == [4] * 4
    assert list(errors) == [1]
    assert isinstance(errors[1], kind)


def test_failures_are_logged_where_nobody_listens(caplog):
    def environment(index, tokens, new):
        raise RuntimeError("tool is down")

    counting(environment, [Request(prompt=[0], max_new_tokens=3)])
    assert "request 0" in caplog.text
    assert "tool is down" in caplog.text
