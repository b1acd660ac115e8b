"""A small checkpoint as Hugging Face has them: random weights, bytes as tokens."""

import json

import jax
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from rlpost.models import DecoderSpec, decoder, save_hf

STOP = "<end>"
# As much of a chat template as there has to be.
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


def byte_letters():
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def write_model(folder, *, vocab=257, context=4096):
    """Write it; a `vocab` below 257 leaves tokens without a row of the embedding."""
    spec = DecoderSpec(vocab=vocab, width=8, depth=1, heads=2, context=context)
    save_hf(folder, spec, decoder(spec).init(jax.random.key(0)))
    letters = {letter: i for i, letter in enumerate(byte_letters())}
    backend = tokenizers.Tokenizer(models.BPE(letters, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(STOP, special=True, normalized=False)])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": STOP, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
