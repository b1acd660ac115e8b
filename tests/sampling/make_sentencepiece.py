"""Makes sentencepiece.json: what the SentencePiece library says of some texts.

Run with `python tests/sampling/make_sentencepiece.py`; needs the library. The file in
the repository was made with sentencepiece 0.2.3.
"""

import io
import json
import pathlib
import random

import sentencepiece

UNUSUAL = "aé中🙂 \n\t12½'sL\u0301\r?!<\u2581"


def words(rng: random.Random, count: int) -> str:
    syllables = ["ka", "to", "mi", "sen", "ra", "lu", "Po", "e", "12", "é", "-", "()"]
    made = ["".join(rng.choices(syllables, k=rng.randint(1, 3))) for _ in range(60)]
    gaps = [" ", " ", " ", "  ", "\n", "\n\n", ", ", ".\n    "]
    return "".join(rng.choice(made) + rng.choice(gaps) for _ in range(count))


def main() -> None:
    rng = random.Random(0)
    corpus = words(rng, 3000)
    texts = [corpus[i : i + rng.randint(1, 60)] for i in range(0, 2000, 80)]
    texts += ["".join(rng.choices(UNUSUAL, k=rng.randint(1, 20))) for _ in range(40)]
    texts += ["", " ", "  a", "a  ", "<tool>", " <tool> x", "\n\nka"]
    out = {}
    for name, prefix, user in (
        ("llama", True, ["\n\n", "<tool>"]),
        ("gemma", False, ["\n", "\n\n", "\u2581\u2581"]),
    ):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(corpus.split("\n")),
            model_writer=model,
            model_type="bpe",
            vocab_size=420,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=prefix,
            user_defined_symbols=user,
            control_symbols=["<end>"],
        )
        library = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        tokens = [library.id_to_piece(i) for i in range(library.get_piece_size())]

        def kind(i: int, library=library, tokens=tokens, user=user) -> int:
            if tokens[i] in user:
                return 4
            if library.is_control(i):
                return 3
            return 2 if library.is_unknown(i) else 6 if library.is_byte(i) else 1

        out[name] = {
            "fields": {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.tokens": tokens,
                "tokenizer.ggml.scores": [
                    library.get_score(i) for i in range(len(tokens))
                ],
                "tokenizer.ggml.token_type": [kind(i) for i in range(len(tokens))],
                "tokenizer.ggml.add_space_prefix": prefix,
                "tokenizer.ggml.bos_token_id": library.bos_id(),
                "tokenizer.ggml.eos_token_id": library.eos_id(),
            },
            "texts": texts,
            "ids": [library.encode(text) for text in texts],
        }
    file = pathlib.Path(__file__).with_name("sentencepiece.json")
    file.write_text(json.dumps(out, separators=(",", ":")) + "\n", "utf-8")


if __name__ == "__main__":
    main()
