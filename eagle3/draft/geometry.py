"""The draft's shape: what its one decoder layer looks like, said explicitly and checked.

Upstream can derive a shape from the verifier, but for a verifier with multi-head latent attention
it derives a wrong one (head_dim 112 or 64, a sliding window of 2048, the rotary embedding of the
latent heads) and trains it without a word. Here a plain-attention verifier's own values are taken
field by field, a latent-attention one must be spelled out, and the rotary embedding is compared
as numbers, not as keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3.config import GeometryConfig
from eagle3.errors import ConfigError, DraftInvalid, VerifierInvalid

# Of these transformers (in training) and vLLM (in serving) compute the same table. They differ
# for `dynamic` and `longrope`, whose frequencies depend on the length of the sequence.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# What a latent-attention verifier cannot be asked for.
_SHAPE_FIELDS = (
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope",
)


def layer_config(geometry: GeometryConfig, text_config: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder config that upstream builds the draft from, and vLLM serves it by.

    Args:
        geometry: `train.geometry`; a null field takes the verifier's value.
        text_config: the verifier's plain text config, of either rope schema.

    Returns plain values with every field that decides a shape or a number. Raises ConfigError,
    VerifierInvalid.
    """
    verifier = _as_config(text_config)
    shape = _shape(geometry, verifier, latent="kv_lora_rank" in text_config)
    eps = _same_epsilon(geometry, verifier)
    config: dict[str, Any] = {
        "model_type": geometry.style,
        "vocab_size": verifier.vocab_size,
        "hidden_size": verifier.hidden_size,
        "num_hidden_layers": geometry.num_layers,
        "rms_norm_eps": eps,
        "max_position_embeddings": geometry.max_position_embeddings
        or verifier.max_position_embeddings,
        "initializer_range": verifier.initializer_range,
        # The only activation of vLLM's draft layers.
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": _rope(shape.pop("rope")),
        **shape,
    }
    if geometry.style == "llama":
        config["mlp_bias"] = False
    else:
        config |= {"use_sliding_window": False, "sliding_window": None}
    if geometry.rope is None:
        check_rope(config, text_config)
    return config


def rope_table(config: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """(inverse frequencies [head_dim / 2], factor on cos and sin) of a decoder config."""
    rotary = LlamaRotaryEmbedding(cast(Any, _as_config(config)))
    return rotary.inv_freq, float(rotary.attention_scaling)


def check_rope(draft: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """The two configs rotate alike, number by number. Raises DraftInvalid.

    Applies where the head widths are equal; another width has other frequencies by design.
    """
    frequencies, factor = rope_table(draft)
    wanted_frequencies, wanted_factor = rope_table(wanted)
    if len(frequencies) != len(wanted_frequencies):
        return
    if factor != wanted_factor or not torch.equal(frequencies, wanted_frequencies):
        differing = int((frequencies != wanted_frequencies).sum())
        raise DraftInvalid(
            "transformer_layer_config.rope_parameters",
            wanted=f"the verifier's frequencies, factor {wanted_factor:.6g}",
            found=f"{differing} other frequencies, factor {factor:.6g}",
            remedy="state train.geometry.rope as the verifier's config.json has it",
        )


def _as_config(values: Mapping[str, Any]) -> PreTrainedConfig:
    """The transformers config of plain values, whose rope it writes in one schema."""
    kind = type(AutoConfig.for_model(values["model_type"]))
    config: PreTrainedConfig = kind.from_dict(dict(values))
    return config


def _shape(geometry: GeometryConfig, verifier: PreTrainedConfig, *, latent: bool) -> dict[str, Any]:
    """The fields that decide the layer's tensors and rotation, from geometry or the verifier."""
    said = {name: getattr(geometry, name) for name in _SHAPE_FIELDS}
    missing = [name for name, value in said.items() if value is None]
    if latent and missing:
        raise ConfigError(
            f"train.geometry.{missing[0]}",
            wanted="a value, for nothing of a latent-attention verifier's shape suits a draft",
            found="none",
            remedy=f"state {', '.join(missing)}",
        )
    own = {} if latent else _plain_shape(verifier)
    shape: dict[str, Any] = {
        name: own.get(name) if value is None else value for name, value in said.items()
    }
    for name, value in shape.items():
        if value is None:
            raise ConfigError(
                f"train.geometry.{name}",
                wanted="a value, since the verifier's config has none",
                found="none",
                remedy="state it",
            )
    heads, groups = shape["num_attention_heads"], shape["num_key_value_heads"]
    if heads % groups or shape["head_dim"] % 2:
        raise ConfigError(
            "train.geometry",
            wanted="query heads a multiple of the key-value heads, and an even head_dim",
            found=f"{heads} and {groups} heads of {shape['head_dim']}",
            remedy="correct them",
        )
    return shape


def _plain_shape(verifier: PreTrainedConfig) -> dict[str, Any]:
    heads = verifier.num_attention_heads
    return {
        "intermediate_size": getattr(verifier, "intermediate_size", None),
        "num_attention_heads": heads,
        "num_key_value_heads": verifier.num_key_value_heads,
        "head_dim": getattr(verifier, "head_dim", None) or verifier.hidden_size // heads,
        "rope": verifier.rope_parameters,
    }


def _same_epsilon(geometry: GeometryConfig, verifier: PreTrainedConfig) -> float:
    """The one epsilon: upstream applies the draft's to the verifier's final norm as well."""
    eps = float(verifier.rms_norm_eps)
    if geometry.rms_norm_eps is not None and geometry.rms_norm_eps != eps:
        raise ConfigError(
            "train.geometry.rms_norm_eps",
            wanted=f"{eps}, the verifier's, for its final norm is computed with it",
            found=geometry.rms_norm_eps,
            remedy="leave it out",
        )
    return eps


def _rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Rope parameters that training and serving compute alike. Raises VerifierInvalid."""
    # `type` is the older spelling of rope_type, which transformers leaves standing beside it.
    rope = {key: value for key, value in parameters.items() if key != "type"}
    rope.setdefault("rope_type", parameters.get("type", "default"))
    unusual = {"mrope_section"} & rope.keys()
    partial = rope.pop("partial_rotary_factor", 1.0) != 1.0
    if rope["rope_type"] not in ROPE_TYPES or unusual or partial or "rope_theta" not in rope:
        raise VerifierInvalid(
            "rope_parameters",
            wanted=f"rope_theta and a rope_type among {', '.join(ROPE_TYPES)}, of whole heads",
            found=dict(parameters),
            remedy="state train.geometry.rope: the draft's rotation may differ from the verifier's",
        )
    return rope
