"""Which key holds which of the three tensors, exactly, for each family of verifiers.

This table is the only place that knows how a checkpoint spells its tensors. Matching by suffix
would take `vision_tower.norm.weight` for the text model's final norm, and nobody would notice.

Every family here computes its logits alike: RMSNorm with the weight as it stands, then lm_head,
and nothing else. So does whatever learns from them. Others spell their keys the same and scale
or cap the logits, or add one to the norm's weight: they have no row, and a config of a known
family that says such a thing is refused too (vLLM's llama obeys `logit_scale`).

To add a family that computes so: give it a row here (its `model_type` and `architectures` as
config.json has them, the three keys as the weight index has them), its published keys and shapes
in tests/test_verifier_families.py, and a tiny model in tests/tiny_verifiers.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle3.errors import VerifierInvalid


@dataclass(frozen=True, kw_only=True)
class Family:
    """Checkpoints that spell their tensors alike.

    Attributes:
        model_type: `model_type` at the top of config.json.
        architectures: the `architectures` that may stand beside it.
        embed, norm, lm_head: the keys of the three tensors.
        text_model_type: the `model_type` that transformers loads the text config under.
        text_architecture: the architecture that goes with it.
        nested: the `model_type` that may stand in `text_config`, where the text model's config
            lies there; empty where it is the whole.
    """

    model_type: str
    architectures: tuple[str, ...]
    text_model_type: str
    text_architecture: str
    embed: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    lm_head: str = "lm_head.weight"
    nested: tuple[str, ...] = ()


def _plain(model_type: str, architecture: str, text_model_type: str | None = None) -> Family:
    return Family(
        model_type=model_type,
        architectures=(architecture,),
        text_model_type=text_model_type or model_type,
        text_architecture=architecture,
    )


FAMILIES: tuple[Family, ...] = (
    _plain("llama", "LlamaForCausalLM"),
    _plain("qwen2", "Qwen2ForCausalLM"),
    _plain("qwen3", "Qwen3ForCausalLM"),
    _plain("qwen3_moe", "Qwen3MoeForCausalLM"),
    _plain("deepseek_v3", "DeepseekV3ForCausalLM"),
    # Kimi-K2 is DeepSeek-V3 under a name that transformers does not know.
    _plain("kimi_k2", "DeepseekV3ForCausalLM", "deepseek_v3"),
    Family(
        model_type="kimi_k25",
        architectures=("KimiK25ForConditionalGeneration",),
        text_model_type="deepseek_v3",
        text_architecture="DeepseekV3ForCausalLM",
        embed="language_model.model.embed_tokens.weight",
        norm="language_model.model.norm.weight",
        lm_head="language_model.lm_head.weight",
        nested=("kimi_k2", "deepseek_v3"),
    ),
)

# Of the whole checkpoint, not of the three tensors: their plain copy is neither quantised nor
# does it bring code.
_NOT_OF_THE_THREE = ("quantization_config", "compression_config", "auto_map")
_NEEDED = ("num_hidden_layers", "hidden_size", "vocab_size")
# How configs say that embeddings, the last norm or the logits are not what the three tensors
# alone make them: Granite, Cohere, Gemma, MiniCPM, Grok, Falcon-H1, Nemotron and others.
_OTHER_ARITHMETIC = re.compile(
    r"logits?_(scal|soft|cap|mup|bias|mean)|soft_?cap|(^|_)mup(_|$)"
    r"|(embedding|lm_head|output|width)_multiplier|scale_emb|emb\w*_scal|dim_model_base"
    r"|norm\w*_1p|zero_centered|unit_offset|norm_head|lm_head_bias"
)


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family of a whole config.json. Raises VerifierInvalid for one that is not in the table.

    Args:
        config: config.json as read.
        where: names it in an error.
    """
    model_type, architectures = config.get("model_type"), config.get("architectures")
    named = [str(name) for name in architectures] if isinstance(architectures, list) else []
    for family in FAMILIES:
        if family.model_type == model_type:
            if any(name in family.architectures for name in named):
                return family
            raise VerifierInvalid(
                f"{where}: architectures",
                wanted=" or ".join(family.architectures),
                found=architectures,
                remedy="bring the model with its language head",
            )
    raise VerifierInvalid(
        f"{where}: model_type",
        wanted=" or ".join(family.model_type for family in FAMILIES),
        found=f"{model_type} ({', '.join(named) or 'no architectures'})",
        remedy="add its three keys to FAMILIES in eagle3/verifier/families.py, if its logits are "
        "lm_head of an RMSNorm and nothing more",
    )


def resolve_text_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The text model's config as plain values, of whatever nesting, as transformers can load it.

    `tie_word_embeddings` is always written out: from the text config, else from the top, else
    false. Raises VerifierInvalid for an unknown family or a missing field.
    """
    family = family_of(config, where)
    source: Any = config.get("text_config") if family.nested else config
    if not isinstance(source, dict):
        raise _misses(f"{where}: text_config", "the text model's config", type(source).__name__)
    inside = f"{where}: {'text_config.' if family.nested else ''}"
    if family.nested and source.get("model_type", family.nested[0]) not in family.nested:
        wanted = " or ".join(family.nested)
        raise _misses(f"{inside}model_type", wanted, source["model_type"])
    text = {key: value for key, value in source.items() if key not in _NOT_OF_THE_THREE}
    text["model_type"] = family.text_model_type
    text["architectures"] = [family.text_architecture]
    tied = source.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    if not isinstance(tied, bool):
        raise _misses(f"{where}: tie_word_embeddings", "true or false", repr(tied))
    text["tie_word_embeddings"] = tied
    for field in _NEEDED:
        if type(text.get(field)) is not int or text[field] < 1:
            raise _misses(f"{inside}{field}", "a positive number", repr(text.get(field)))
    if type(eps := text.get("rms_norm_eps")) is not float or not 0 < eps < 1:
        raise _misses(f"{inside}rms_norm_eps", "the final norm's epsilon, between 0 and 1", eps)
    _refuse_other_arithmetic(config, f"{where}: ")
    _refuse_other_arithmetic(source, inside)
    return text


def _refuse_other_arithmetic(config: Mapping[str, Any], where: str) -> None:
    """Raise VerifierInvalid for a field that changes what the three tensors come to."""
    for field, value in config.items():
        off = value is None or value is False or (value is not True and value in (0, 1))
        if not off and _OTHER_ARITHMETIC.search(field):
            raise VerifierInvalid(
                f"{where}{field}",
                wanted="embeddings and logits as the three tensors alone make them",
                found=value,
                remedy="train no draft for it with this version: it would learn other logits than "
                "the verifier's, while the engine obeys or ignores this field",
            )


def _misses(field: str, wanted: str, found: object) -> VerifierInvalid:
    return VerifierInvalid(
        field,
        wanted=wanted,
        found=found,
        remedy="bring the config.json that was published with the weights",
    )
