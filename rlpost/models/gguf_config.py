"""What the metadata of a GGUF file says of a model, as a `DecoderSpec`.

What it says and the decoder cannot honour is an error that names the field.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from rlpost.models.attention import Divided
from rlpost.models.decoder import DecoderSpec
from rlpost.models.families import NAMES, family_of

# Fields of a GGUF file, after its architecture's name, that a decoder rests on or that
# say nothing about the forward pass.
KNOWN = frozenset(
    {
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.layer_norm_rms_epsilon",
        "block_count",
        "context_length",
        "embedding_length",
        "expert_used_count",
        "feed_forward_length",
        "pooling_type",
        "rope.freq_base",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "tensor_data_layout",
        "vocab_size",
    }
)


def spec_of_gguf(
    fields: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    factors: Any,
    source: str,
    ignore: Collection[str] = (),
) -> DecoderSpec:
    """The decoder that the metadata of a GGUF file describes.

    Args:
        fields: its metadata.
        shapes: {name: shape} of its tensors.
        factors: the tensor `rope_freqs.weight`, or None.
        source: its path, for errors.
        ignore: fields to let pass although we do not know them, with or without the
            architecture's name.

    Raises:
        ValueError: naming the key that is missing, unknown, or beyond us.
    """
    family = family_of(fields.get("general.architecture"), source)
    arch = f"{family.model_type}."

    def get(key: str, default: Any = None) -> Any:
        value = fields.get(arch + key, default)
        if value is None:
            raise ValueError(f"{source}: no field {arch}{key}")
        return value

    def size(key: str, default: Any = None) -> int:
        value = get(key, default)
        if not isinstance(value, int) or value < 1:
            raise ValueError(
                f"{source}: {arch}{key} must be a whole number of at least 1, it is "
                f"{value!r}"
            )
        return value

    heads, width = size("attention.head_count"), size("embedding_length")
    head_size = size("attention.key_length", width // heads)
    fixed = {
        "attention.causal": True,
        "attention.sliding_window": 0,
        "attention.value_length": head_size,
        "expert_count": 0,
        "rope.dimension_count": head_size,
        "rope.scale_linear": 1.0,
        "rope.scaling.factor": 1.0,  # linear scaling, where no type is given
        "rope.scaling.type": "none",
    }
    for key, right in fixed.items():
        if get(key, right) != right:
            raise ValueError(
                f"{source}: {arch}{key} is {get(key)!r}, we can only read files where "
                f"it is {right!r}"
            )
    for name, value in fields.items():
        key = name.removeprefix(arch)
        known = key in KNOWN or key in fixed or {name, key} & set(ignore)
        if name.startswith(arch) and value and not known:
            raise ValueError(
                f"{source}: unknown field {name!r} ({value!r}): if it does not change "
                "the network, pass ignore=[...] with its name"
            )
    if factors is not None and np.shape(factors) != (head_size // 2,):
        raise ValueError(
            f"{source}: tensor 'rope_freqs.weight' should have shape "
            f"{[head_size // 2]} by the configuration, it has {list(np.shape(factors))}"
        )
    if NAMES["embed"][1] not in shapes:
        raise ValueError(f"{source}: no tensor {NAMES['embed'][1]!r}")
    return DecoderSpec(
        vocab=shapes[NAMES["embed"][1]][0],
        width=width,
        depth=size("block_count"),
        heads=heads,
        kv_heads=size("attention.head_count_kv", heads),
        head_size=head_size,
        ff=size("feed_forward_length"),
        tied=NAMES["head"][1] not in shapes,
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        # Kept as float32 in the file: 9.99999974e-06 is meant to be 1e-5.
        eps=float(str(np.float32(get("attention.layer_norm_rms_epsilon")))),
        rope_base=float(get("rope.freq_base", 10000.0)),
        rope_scaling=None if factors is None else Divided(tuple(map(float, factors))),
        context=get("context_length", 0),
    )
