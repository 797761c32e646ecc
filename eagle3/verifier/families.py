"""Which key holds which of the three tensors, exactly, for each family of verifiers.

This table is the only place that knows how a checkpoint spells its tensors. Matching by suffix
would take `vision_tower.norm.weight` for the text model's final norm, and nobody would notice.

To add a family: give it a row here (its `model_type` and `architectures` as config.json has
them, the three keys as the weight index has them), and a tiny model in tests/test_verifier.py.
"""

from __future__ import annotations

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
        nested: whether the text model's config lies under `text_config`.
    """

    model_type: str
    architectures: tuple[str, ...]
    text_model_type: str
    text_architecture: str
    embed: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    lm_head: str = "lm_head.weight"
    nested: bool = False


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
        nested=True,
    ),
)

# Of the whole checkpoint, not of the three tensors: their plain copy is neither quantised nor
# does it bring code.
_NOT_OF_THE_THREE = ("quantization_config", "compression_config", "auto_map")
_NEEDED = ("num_hidden_layers", "hidden_size", "vocab_size")


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family of a whole config.json. Raises VerifierInvalid for one that is not in the table.

    Args:
        config: config.json as read.
        where: names it in an error.
    """
    model_type = config.get("model_type")
    architectures = config.get("architectures") or []
    for family in FAMILIES:
        if family.model_type == model_type:
            if any(name in family.architectures for name in architectures):
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
        found=f"{model_type} ({', '.join(architectures) or 'no architectures'})",
        remedy="add its three keys to FAMILIES in eagle3/verifier/families.py",
    )


def resolve_text_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The text model's config as plain values, of whatever nesting, as transformers can load it.

    `tie_word_embeddings` is always written out: from the text config, else from the top, else
    false. Raises VerifierInvalid for an unknown family or a missing field.
    """
    family = family_of(config, where)
    source: Any = config.get("text_config") if family.nested else config
    if not isinstance(source, dict):
        raise VerifierInvalid(
            f"{where}: text_config",
            wanted="the text model's config",
            found=type(source).__name__,
            remedy="bring the config.json that was published with the weights",
        )
    text = {key: value for key, value in source.items() if key not in _NOT_OF_THE_THREE}
    text["model_type"] = family.text_model_type
    text["architectures"] = [family.text_architecture]
    tied = source.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    if not isinstance(tied, bool):
        raise VerifierInvalid(
            f"{where}: tie_word_embeddings",
            wanted="true or false",
            found=repr(tied),
            remedy="bring the config.json that was published with the weights",
        )
    text["tie_word_embeddings"] = tied
    for field in _NEEDED:
        if not isinstance(text.get(field), int) or text[field] < 1:
            raise VerifierInvalid(
                f"{where}: {'text_config.' if family.nested else ''}{field}",
                wanted="a positive number",
                found=text.get(field),
                remedy="bring the config.json that was published with the weights",
            )
    return text
