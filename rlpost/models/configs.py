"""What a config.json says of a model, as a `DecoderSpec`, and back.

What it says and the decoder cannot honour is an error that names the key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rlpost.models.attention import Divided, Llama3Scaling
from rlpost.models.decoder import DecoderSpec
from rlpost.models.families import FAMILIES, Family, family_of

Config = Mapping[str, Any]

# Keys of config.json that say nothing about the forward pass.
INERT = frozenset(
    {
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "cls_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_llama_config",
        "label2id",
        "max_position_embeddings",
        "model_type",
        "name_or_path",
        "pad_token_id",
        "pretraining_tp",
        "sep_token_id",
        "tokenizer_class",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unk_token_id",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)


def spec_of_config(
    config: Config, source: str, ignore: Collection[str] = ()
) -> DecoderSpec:
    """The decoder that a Hugging Face config.json describes.

    Args:
        config: its contents.
        source: its path, for errors.
        ignore: keys to let pass although we do not know them.

    Raises:
        ValueError: naming the key that is missing, unknown, or beyond us.
    """
    read = _Reader(config, source, ignore)
    family = family_of(read.need("model_type"), source)
    read.must("hidden_act", "silu")
    for key in ("attention_bias", "mlp_bias"):
        read.must(key, False)
    read.must("partial_rotary_factor", 1.0)
    read.must("is_causal", True)
    heads, width = read.size("num_attention_heads"), read.size("hidden_size")
    depth = read.size("num_hidden_layers")
    base, scaling = _rotation(read)
    eps = read.get("rms_norm_eps")
    spec = DecoderSpec(
        vocab=read.size("vocab_size"),
        width=width,
        depth=depth,
        heads=heads,
        kv_heads=read.get("num_key_value_heads") or heads,
        head_size=read.get("head_dim") or family.head_size or width // heads,
        ff=read.size("intermediate_size"),
        tied=bool(read.get("tie_word_embeddings")),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        eps=1e-6 if eps is None else eps,
        rope_base=base,
        rope_scaling=scaling,
        window=_window(read, family, depth),
        context=config.get("max_position_embeddings") or 0,
    )
    read.finish()
    return spec


def config_of_spec(spec: DecoderSpec) -> dict[str, Any]:
    """The config.json of a decoder, as transformers 4 and 5 read it.

    Raises:
        ValueError: if no family has such a decoder.
    """
    plain = DecoderSpec(vocab=1, width=2, depth=1, heads=1)
    for part in ("norm", "attention", "mlp", "block"):
        if getattr(spec, part) != getattr(plain, part):
            raise ValueError(f"no family in Hugging Face's format has this {part} part")
    found = [
        family
        for family in FAMILIES
        if (family.qkv_bias, family.qk_norm) == (spec.qkv_bias, spec.qk_norm)
        and (family.windows or not any(spec.windows))
    ]
    if not found:
        raise ValueError(
            f"no family in Hugging Face's format has qkv_bias={spec.qkv_bias}, "
            f"qk_norm={spec.qk_norm} and window={spec.window}: the families are "
            f"{', '.join(family.model_type for family in FAMILIES)}"
        )
    if len(set(spec.rope_bases)) > 1 or isinstance(spec.rope_scaling, Divided):
        raise ValueError(
            "Hugging Face's format has no place for a rope_base by layer, or for the "
            "listed rotary factors of a GGUF file"
        )
    family = found[0]
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": spec.vocab,
        "hidden_size": spec.width,
        "num_hidden_layers": spec.depth,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_size,
        "intermediate_size": spec.ff,
        "hidden_act": "silu",
        "tie_word_embeddings": spec.tied,
        "rms_norm_eps": spec.eps,
        "rope_theta": spec.rope_bases[0],
        "max_position_embeddings": spec.context or 2048,
    }
    if spec.rope_scaling is not None:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": spec.rope_scaling.factor,
            "low_freq_factor": spec.rope_scaling.low,
            "high_freq_factor": spec.rope_scaling.high,
            "original_max_position_embeddings": spec.rope_scaling.context,
        }
    sizes = set(spec.windows) - {0}
    if len(sizes) > 1:
        raise ValueError(f"Hugging Face's format has one window, not {sorted(sizes)}")
    if sizes:
        config |= {
            "use_sliding_window": True,
            "sliding_window": sizes.pop(),
            # Read where layer_types is not known yet: the first layers that see all.
            "max_window_layers": [*map(bool, spec.windows)].index(True),
            "layer_types": [
                "sliding_attention" if size else "full_attention"
                for size in spec.windows
            ],
        }
    return config


class _Reader:
    """Reads the keys of a configuration, and minds those that nobody read."""

    def __init__(self, config: Config, source: str, ignore: Collection[str]) -> None:
        self.config, self.source, self.ignore = config, source, ignore
        self.known = {*INERT, *ignore}

    def get(self, key: str) -> Any:
        self.known.add(key)
        return self.config.get(key)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(f"{self.source}: no key {key!r}")
        return value

    def size(self, key: str) -> int:
        value = self.need(key)
        if not isinstance(value, int) or value < 1:
            raise ValueError(
                f"{self.source}: {key} must be a whole number of at least 1, it is "
                f"{value!r}"
            )
        return value

    def must(self, key: str, right: Any) -> None:
        value = self.get(key)
        if value is not None and value != right:
            raise ValueError(
                f"{self.source}: {key} is {value!r}, we can only read models where it "
                f"is {right!r}"
            )

    def finish(self) -> None:
        # A key that is off (None, False, 0, empty) asks for nothing.
        for key, value in self.config.items():
            if key not in self.known and not key.startswith("_") and value:
                raise ValueError(
                    f"{self.source}: unknown key {key!r} ({value!r}): if it does not "
                    "change the network, pass ignore=[...] with its name"
                )


# What the parts of a rotary setting are called, beside the type of scaling.
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor")
CONTEXT = "original_max_position_embeddings"


def _rotation(read: _Reader) -> tuple[float, Llama3Scaling | None]:
    """Base and scaling of the rotary positions."""
    # transformers 5 writes rope_parameters, earlier ones rope_theta and rope_scaling.
    settings = {key: read.get(key) or {} for key in ("rope_parameters", "rope_scaling")}
    kinds = {}
    for key, rope in settings.items():
        where = f"{read.source}: {key}"
        if not isinstance(rope, Mapping):
            raise ValueError(f"{where} must be an object, it is {rope!r}")
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in ("default", "llama3"):
            raise ValueError(
                f"{where} of type {kind!r} is not supported, only 'llama3'"
            )
        known = {"rope_type", "type", "rope_theta", CONTEXT, *read.ignore}
        known |= set(LLAMA3) if kind == "llama3" else set()
        for name, value in rope.items():
            # One setting for each kind of layer would be here too.
            right = 1.0 if name == "partial_rotary_factor" else None
            if name not in known and value not in (None, right):
                raise ValueError(
                    f"{where} has the key {name!r} ({value!r}), which type {kind!r} "
                    "does not have here: if it does not change the network, pass "
                    "ignore=[...] with its name"
                )
        if kind == "llama3":
            kinds[key] = _llama3(rope, where)
    bases = {
        float(value)
        for value in (
            read.get("rope_theta"),
            *(rope.get("rope_theta") for rope in settings.values()),
        )
        if value is not None
    }
    if len(bases) > 1 or len(set(kinds.values())) > 1:
        raise ValueError(
            f"{read.source}: rope_theta, rope_parameters and rope_scaling contradict "
            f"each other: bases {sorted(bases)}, scalings {list(kinds.values())}"
        )
    return (*bases, 10000.0)[0], next(iter(kinds.values()), None)


def _llama3(rope: Config, where: str) -> Llama3Scaling:
    try:
        factor, low, high = (float(rope[name]) for name in LLAMA3)
        return Llama3Scaling(factor, low, high, context=int(rope[CONTEXT]))
    except KeyError as error:
        raise ValueError(f"{where} has no key {error}") from None


def _window(read: _Reader, family: Family, depth: int) -> int | tuple[int, ...]:
    keys = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
    used, size, first, kinds = (read.get(key) for key in keys)
    used = used and family.windows
    if used:
        size = read.need("sliding_window")
    if kinds is None:
        first = read.need("max_window_layers") if used else depth
        kinds = ["full_attention"] * first + ["sliding_attention"] * (depth - first)
    wrong = set(kinds) - {"sliding_attention", "full_attention"}
    if wrong or len(kinds) < depth or (not used and "sliding_attention" in kinds):
        raise ValueError(
            f"{read.source}: layer_types must give full_attention (or, with "
            f"use_sliding_window, sliding_attention) for each of {depth} layers, "
            f"it is {kinds!r}"
        )
    windows = tuple(size if kind == "sliding_attention" else 0 for kind in kinds)
    return windows[:depth] if any(windows[:depth]) else 0
