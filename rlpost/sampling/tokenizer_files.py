"""Tokenizers as checkpoints carry them: tokenizer.json folders and GGUF metadata."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from rlpost.sampling import sentencepiece
from rlpost.sampling.tokenizer import Tokenizer

# How a checkpoint's text is split before merging. The digits of a number stand alone,
# or in threes; otherwise both follow GPT-4's way.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEMPLATE = "tokenizer.chat_template"  # or, with ".tool_use" say, one of several
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# What llama.cpp calls the kinds of tokens.
_UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE_TOKEN = 2, 3, 4, 5, 6


def from_folder(path: str | pathlib.Path) -> Tokenizer:
    """The tokenizer of a Hugging Face checkpoint folder.

    Reads tokenizer.json, and where they are there tokenizer_config.json,
    special_tokens_map.json, generation_config.json, config.json and
    chat_template.jinja. Stop ids are all of `eos_token_id` of the generation config (or
    the config) and the tokenizer's `eos_token`.

    Raises:
        FileNotFoundError: if there is no tokenizer.json.
        ValueError: if a file cannot be read, or decodes in a way not known here.
    """
    folder = pathlib.Path(path)
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder} has no tokenizer.json; a folder with only tokenizer.model must "
            "be converted first"
        )
    content = file.read_text("utf-8")
    try:
        backend = tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{file} is not a tokenizer: {error}") from error
    settings = _json(folder / "special_tokens_map.json")
    settings |= _json(folder / "tokenizer_config.json")
    # A generation config may leave out what the config says.
    generation = _json(folder / "config.json") | {
        key: value
        for key, value in _json(folder / "generation_config.json").items()
        if value is not None
    }
    names = {
        key: token if isinstance(token, str) else token["content"]
        for key, token in settings.items()
        if key.endswith("_token") and isinstance(token, str | Mapping)
    }
    stops = generation.get("eos_token_id")
    stops = [] if stops is None else [stops] if isinstance(stops, int) else list(stops)
    eos = backend.token_to_id(names.get("eos_token", ""))
    pad = backend.token_to_id(names.get("pad_token", ""))
    bos = backend.token_to_id(names.get("bos_token", ""))
    return _wrap(
        backend,
        stops=stops if eos is None else [*stops, eos],
        pad=generation.get("pad_token_id") if pad is None else pad,
        bos=bos,
        # What the file itself puts before a text; the settings may be older.
        add_bos=bos is not None and backend.encode("a").ids[:1] == [bos],
        names=names,
        templates=_templates(folder, settings),
        source=str(file),
    )


def from_gguf(path: str | pathlib.Path) -> Tokenizer:
    """The tokenizer in the metadata of a GGUF file.

    Knows byte-level BPE that splits text as GPT-2, SmolLM, Qwen2 or Llama 3 do, and
    SentencePiece BPE with scores (Llama 1 and 2, Gemma).

    Raises:
        ValueError: if the file has no tokenizer or one of another kind.
    """
    from rlpost.models.gguf import gguf_fields  # JAX: only for who reads such files

    return from_fields(gguf_fields(path), source=str(path))


def from_fields(fields: Mapping[str, Any], *, source: str = "GGUF") -> Tokenizer:
    """As `from_gguf`, from the file's metadata where that was read before.

    Args:
        fields: "tokenizer.ggml.model", "tokenizer.ggml.tokens" and so on.
        source: names the file in errors.
    """

    def need(name: str) -> Any:
        key = f"tokenizer.ggml.{name}"
        if key not in fields:
            raise ValueError(f"{source} has no field {key}")
        return fields[key]

    tokens: Sequence[str] = need("tokens")
    kinds: Sequence[int] = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise ValueError(f"{source}: {len(tokens)} tokens but {len(kinds)} token types")
    model = need("model")

    def named(name: str) -> int | None:
        token = fields.get(f"tokenizer.ggml.{name}_token_id")
        return None if token is None else int(token)

    called = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    names = {
        f"{short}_token": tokens[token]  # as templates know them
        for name, short in called.items()
        if (token := named(name)) is not None and token < len(tokens)
    }
    rest: dict[str, Any] = {
        "stops": [x for x in map(named, ("eos", "eot", "eom")) if x is not None],
        "pad": named("padding"),
        "bos": named("bos"),
        "names": names,
        "templates": {
            name.removeprefix(_TEMPLATE).lstrip(".") or "default": template
            for name, template in fields.items()
            if name.startswith(_TEMPLATE) and isinstance(template, str)
        },
    }
    if model == "gpt2":
        pre = fields.get("tokenizer.ggml.pre", "default")
        backend = _byte_level(tokens, kinds, need("merges"), pre, source)
        add_bos = fields.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")
        return _wrap(backend, add_bos=add_bos, source=source, **rest)
    if model == "llama":
        prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
        cut = sentencepiece.cutter(
            tokens,
            need("scores"),
            whole=[i for i, kind in enumerate(kinds) if kind == _USER],
            control=[i for i, kind in enumerate(kinds) if kind == _CONTROL],
            ordinary=[i for i, kind in enumerate(kinds) if kind == 1],
            unknown=next((i for i, k in enumerate(kinds) if k == _UNKNOWN), None),
            prefix=prefix,
        )
        pieces = [
            None if kind in (_UNKNOWN, _UNUSED) else _spaced(token, kind == _BYTE_TOKEN)
            for token, kind in zip(tokens, kinds, strict=True)
        ]
        control = frozenset(i for i, kind in enumerate(kinds) if kind == _CONTROL)
        add_bos = fields.get("tokenizer.ggml.add_bos_token", True)
        return _build(pieces, control, cut, prefix, add_bos=add_bos, **rest)
    raise ValueError(
        f"{source}: tokenizer of kind {model!r}; known are 'gpt2' (byte-level BPE) and "
        "'llama' (SentencePiece BPE)"
    )


def files_of(tokenizer: Tokenizer) -> dict[str, str]:
    """The tokenizer as the files of a Hugging Face folder, {name: content}.

    {} for one that has no tokenizer.json: of characters, or SentencePiece from a GGUF.
    """
    if tokenizer.definition is None:
        return {}
    named = [{"name": n, "template": t} for n, t in tokenizer.templates.items()]
    only = tokenizer.templates.get("default") if len(named) == 1 else named
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **tokenizer.names,
        **({"chat_template": only} if named else {}),
    }
    stops = list(tokenizer.stop_ids)
    generation = {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": stops[0] if len(stops) == 1 else stops,
        "pad_token_id": tokenizer.pad_id,
    }
    known = {key: value for key, value in generation.items() if value not in (None, [])}
    return {
        "tokenizer.json": tokenizer.definition,
        "tokenizer_config.json": json.dumps(settings, indent=1, ensure_ascii=False),
        "generation_config.json": json.dumps(known, indent=1),
    }


def _byte_level(
    tokens: Sequence[str],
    kinds: Sequence[int],
    merges: list[str],
    pre: str,
    source: str,
) -> tokenizers.Tokenizer:
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)

    def split(digits: str) -> pre_tokenizers.PreTokenizer:
        parts = pre_tokenizers.Split(Regex(_WORDS % digits), "isolated")
        return pre_tokenizers.Sequence([parts, bytes_only])

    single = pre_tokenizers.Digits(individual_digits=True)
    known: dict[str, pre_tokenizers.PreTokenizer] = {
        "gpt-2": words,
        "smollm": pre_tokenizers.Sequence([single, words]),
        "qwen2": split(""),
        "llama-bpe": split("{1,3}"),
    }
    if pre not in known:
        raise ValueError(
            f"{source} splits text by {pre!r}, which is not known here "
            f"(known: {sorted(known)}); the checkpoint's tokenizer.json would do"
        )
    pairs = [merge.partition(" ")[::2] for merge in merges]
    model = models.BPE(
        {token: i for i, token in enumerate(tokens)},
        pairs,
        ignore_merges=pre == "llama-bpe",
    )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = known[pre]
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    for kind, special in ((_CONTROL, True), (_USER, False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, own in zip(tokens, kinds, strict=True)
            if own == kind
        ]
        (backend.add_special_tokens if special else backend.add_tokens)(added)
    return backend


def _wrap(backend: tokenizers.Tokenizer, *, source: str, **rest: Any) -> Tokenizer:
    """Our tokenizer around one of the library."""
    backend.no_truncation()  # a file may ask for both, silently
    backend.no_padding()
    written = backend.to_str()
    plain = tokenizers.Tokenizer.from_str(written)
    plain.encode_special_tokens = True  # control tokens are then mere text

    def cut(text: str, special: bool) -> list[int]:
        chosen = backend if special else plain
        return chosen.encode(text, add_special_tokens=False).ids

    read, strip = _reader(json.loads(written).get("decoder"), source)
    added = backend.get_added_tokens_decoder()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    pieces: list[bytes | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for token, i in vocabulary.items():
        pieces[i] = token.encode() if i in added else read(token)
    control = frozenset(i for i, token in added.items() if token.special)
    return _build(pieces, control, cut, strip, definition=written, **rest)


def _build(
    pieces: Sequence[bytes | None],
    control: frozenset[int],
    cut: Callable[[str, bool], list[int]],
    strip: bool,
    *,
    stops: Sequence[int],
    pad: int | None,
    bos: int | None,
    add_bos: bool,
    names: Mapping[str, str],
    templates: Mapping[str, str],
    definition: str | None = None,
) -> Tokenizer:
    stops = tuple(dict.fromkeys(stops))  # each once, in their order
    if pad is None:
        pad = stops[0] if stops else 0
    return Tokenizer(
        pieces=tuple(pieces),
        control=control,
        stop_ids=stops,
        pad_id=pad,
        bos_id=bos,
        add_bos=bool(add_bos) and bos is not None,
        cut=cut,
        strip=strip,
        templates=templates,
        names=names,
        definition=definition,
    )


def _reader(decoder: Any, source: str) -> tuple[Callable[[str], bytes], bool]:
    """How a token is read as bytes, and whether a text loses its first space."""
    parts = decoder.get("decoders", [decoder]) if decoder else []
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        letters = _byte_letters()

        def bytes_of(token: str) -> bytes:
            if all(letter in letters for letter in token):
                return bytes(letters[letter] for letter in token)
            return token.encode()

        return bytes_of, False
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        strips = any(
            (part["type"] == "Strip" and part["start"] > 0)
            or (part["type"] == "Metaspace" and part["prepend_scheme"] != "never")
            for part in parts
        )
        return lambda token: _spaced(token, "ByteFallback" in kinds), strips
    raise ValueError(
        f"{source} decodes by {sorted(kinds) or 'nothing'}; known are byte-level BPE "
        "(ByteLevel) and SentencePiece (Metaspace, or ByteFallback)"
    )


def _spaced(token: str, bytes_too: bool) -> bytes:
    if bytes_too and (byte := _BYTE.fullmatch(token)):
        return bytes([int(byte[1], 16)])
    return token.replace(sentencepiece.SPACE, " ").encode()


def _byte_letters() -> dict[str, int]:
    """GPT-2's letters for bytes: themselves where they print, else from U+0100 on."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printing]
    letters = {chr(byte): byte for byte in printing}
    return letters | {chr(256 + i): byte for i, byte in enumerate(others)}


def _templates(folder: pathlib.Path, settings: Mapping[str, Any]) -> dict[str, str]:
    found = settings.get("chat_template") or {}
    if isinstance(found, str):
        found = {"default": found}
    elif not isinstance(found, Mapping):
        found = {entry["name"]: entry["template"] for entry in found}
    file = folder / "chat_template.jinja"
    if file.is_file():
        found = {**found, "default": file.read_text("utf-8")}
    for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found = {**found, extra.stem: extra.read_text("utf-8")}
    return dict(found)


def _json(file: pathlib.Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds a {type(values).__name__}, not an object")
    return values
