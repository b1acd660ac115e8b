"""The families of models that are read and written, and what their tensors are called.

A family is a row of `FAMILIES`: the names it goes by, and the choices that its name
implies. `NAMES` maps parameter paths to the names of tensors in files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from rlpost.models.decoder import DecoderSpec, decoder
from rlpost.models.paths import path_name


class Family(NamedTuple):
    """Models of one architecture.

    Attributes:
        model_type: in config.json; `general.architecture` in GGUF.
        architecture: the class in transformers.
        qkv_bias, qk_norm: as of `DecoderSpec`.
        windows: whether its configuration can give layers a sliding window.
        interleaved: whether llama.cpp stores rotated heads as pairs of neighbours.
        head_size: what a configuration without `head_dim` means; 0: width / heads.
    """

    model_type: str
    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: bool = False
    interleaved: bool = False
    head_size: int = 0


FAMILIES = (
    Family("llama", "LlamaForCausalLM", interleaved=True),
    Family("qwen2", "Qwen2ForCausalLM", qkv_bias=True, windows=True),
    Family("qwen3", "Qwen3ForCausalLM", qk_norm=True, windows=True, head_size=128),
)

# Path of a parameter -> its name in Hugging Face's files, and in GGUF. {} is the layer.
NAMES = {
    "embed": ("model.embed_tokens.weight", "token_embd.weight"),
    "norm": ("model.norm.weight", "output_norm.weight"),
    "head": ("lm_head.weight", "output.weight"),
    **{
        f"layers/{ours}": (f"model.layers.{{}}.{theirs}", f"blk.{{}}.{short}")
        for ours, theirs, short in (
            ("attention_norm", "input_layernorm.weight", "attn_norm.weight"),
            ("mlp_norm", "post_attention_layernorm.weight", "ffn_norm.weight"),
            ("attention/q", "self_attn.q_proj.weight", "attn_q.weight"),
            ("attention/k", "self_attn.k_proj.weight", "attn_k.weight"),
            ("attention/v", "self_attn.v_proj.weight", "attn_v.weight"),
            ("attention/o", "self_attn.o_proj.weight", "attn_output.weight"),
            ("attention/q_bias", "self_attn.q_proj.bias", "attn_q.bias"),
            ("attention/k_bias", "self_attn.k_proj.bias", "attn_k.bias"),
            ("attention/v_bias", "self_attn.v_proj.bias", "attn_v.bias"),
            ("attention/q_norm", "self_attn.q_norm.weight", "attn_q_norm.weight"),
            ("attention/k_norm", "self_attn.k_norm.weight", "attn_k_norm.weight"),
            ("mlp/gate", "mlp.gate_proj.weight", "ffn_gate.weight"),
            ("mlp/up", "mlp.up_proj.weight", "ffn_up.weight"),
            ("mlp/down", "mlp.down_proj.weight", "ffn_down.weight"),
        )
    },
}


class Tensor(NamedTuple):
    """One tensor of a file.

    Attributes:
        name: in the file.
        shape: in the file.
        transposed: [out, in] there, [in, out] here.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool


def tensors(spec: DecoderSpec, *, gguf: bool = False) -> dict[str, list[Tensor]]:
    """The tensors that make up each parameter of a decoder, one for each layer."""
    plan = {}
    shapes = jax.eval_shape(decoder(spec).init, jax.random.key(0))
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        name = path_name(path)
        theirs = NAMES[name][gguf]
        layered = name.startswith("layers/")
        shape = leaf.shape[1:] if layered else leaf.shape
        transposed = len(shape) == 2 and name != "embed"
        one = Tensor(theirs, shape[::-1] if transposed else shape, transposed)
        layers = range(spec.depth) if layered else range(1)
        plan[name] = [one._replace(name=theirs.format(i)) for i in layers]
    return plan


def is_interleaved(fields: Mapping[str, Any]) -> bool:
    """Whether a GGUF file keeps the rotated heads of q and k as neighbouring pairs."""
    return family_of(fields.get("general.architecture"), "").interleaved


def family_of(model_type: Any, source: str) -> Family:
    """The family of a model_type, or an error that names the file `source`."""
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    known = ", ".join(family.model_type for family in FAMILIES)
    raise ValueError(
        f"{source}: the architecture {model_type!r} is not supported; these are: "
        f"{known}"
    )
