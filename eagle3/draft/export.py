"""The folder that vLLM serves, and the lint that it must pass.

vLLM loads a draft leniently: a lost tensor, another name, ids that it has to guess, or four of
them, all give a server that runs and accepts nothing. So every key, shape, type and value that
serving depends on is compared with what the artefacts upstream of the export say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

from eagle3.draft.checkpoints import CONFIG_NAME, MODEL_NAME
from eagle3.draft.geometry import check_rope
from eagle3.errors import DraftInvalid
from eagle3.verifier import ThreeTensors
from eagle3.vocab import Mapping as VocabMapping

# Of no use to a server; `auto_map` would have it run code.
_NOT_SERVED = ("auto_map",)
_PROBE_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What an exported draft must be, from the artefacts upstream of it.

    Attributes:
        layer: the decoder config, as the train manifest has it.
        aux_layer_ids: the three auxiliary layers, without the last one.
        mapping: of the `vocab/` artefact.
        tensors: the verifier's three.
        norm_before_fc, norm_output: as it was trained.
        serving_name: the verifier's name or path where the draft is served.
        num_speculative_tokens: tokens proposed a step, as default.
    """

    layer: Mapping[str, Any]
    aux_layer_ids: tuple[int, ...]
    mapping: VocabMapping
    tensors: ThreeTensors
    norm_before_fc: bool
    norm_output: bool
    serving_name: str
    num_speculative_tokens: int

    @property
    def prunes(self) -> bool:
        """Whether the draft's vocabulary is smaller: only then it carries a mapping."""
        return self.mapping.draft_vocab_size != int(self.layer["vocab_size"])


def write_config(source: Path, target: Path, wanted: Wanted) -> None:
    """Write a checkpoint's config.json as it is served: for this verifier, and without code."""
    config = json.loads((source / CONFIG_NAME).read_text(encoding="utf-8"))
    for key in _NOT_SERVED:
        config.pop(key, None)
    algorithm = config["speculators_config"]
    algorithm["verifier"]["name_or_path"] = wanted.serving_name
    algorithm["proposal_methods"][0]["speculative_tokens"] = wanted.num_speculative_tokens
    text = json.dumps(config, indent=2, sort_keys=True)
    (target / CONFIG_NAME).write_text(text + "\n", encoding="utf-8")


def check_export(folder: Path, wanted: Wanted) -> None:
    """Everything that serving depends on. Raises DraftInvalid naming the first field that differs.

    The config field by field, the rotary frequencies as numbers, the tensors by key, shape, type
    and, where they are not trained, value; then one drafting step on a few tokens.
    """
    where = folder.name
    config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    _check_config(config, wanted, where)
    check_rope(config["transformer_layer_config"], wanted.layer)
    check_weights(folder / MODEL_NAME, wanted, where)
    _draft_once(folder, wanted, where)


def check_weights(path: Path, wanted: Wanted, where: str) -> None:
    """Every tensor by key, shape, type and, where it is not trained, value. Raises DraftInvalid."""
    _check_tensors(path, wanted, where)
    _check_values(path, wanted, where)


def served_tensors(wanted: Wanted) -> dict[str, tuple[str, list[int]]]:
    """Tensor name -> (safetensors type, shape) of a draft, exactly."""
    layer = wanted.layer
    hidden, inner = int(layer["hidden_size"]), int(layer["intermediate_size"])
    vocab, draft_vocab = int(layer["vocab_size"]), wanted.mapping.draft_vocab_size
    queries = int(layer["num_attention_heads"]) * int(layer["head_dim"])
    keys = int(layer["num_key_value_heads"]) * int(layer["head_dim"])
    shapes: dict[str, list[int]] = {
        "embed_tokens.weight": [vocab, hidden],
        "fc.weight": [hidden, len(wanted.aux_layer_ids) * hidden],
        "lm_head.weight": [draft_vocab, hidden],
        "norm.weight": [hidden],
    }
    if wanted.norm_before_fc:
        shapes["input_norm.weight"] = [len(wanted.aux_layer_ids) * hidden]
    for number in range(int(layer["num_hidden_layers"])):
        # The first layer reads the token's embedding beside the hidden state.
        width = 2 * hidden if number == 0 else hidden
        parts = {
            "input_layernorm": [hidden],
            "post_attention_layernorm": [hidden],
            "self_attn.q_proj": [queries, width],
            "self_attn.k_proj": [keys, width],
            "self_attn.v_proj": [keys, width],
            "self_attn.o_proj": [hidden, queries],
            "mlp.gate_proj": [inner, hidden],
            "mlp.up_proj": [inner, hidden],
            "mlp.down_proj": [hidden, inner],
        }
        if number == 0:
            parts["hidden_norm"] = [hidden]
        if layer["model_type"] == "qwen3":
            parts["self_attn.q_norm"] = parts["self_attn.k_norm"] = [int(layer["head_dim"])]
        shapes |= {f"layers.{number}.{name}.weight": shape for name, shape in parts.items()}
    tensors = {name: ("BF16", shape) for name, shape in shapes.items()}
    if wanted.prunes:
        tensors |= {"d2t": ("I64", [draft_vocab]), "t2d": ("BOOL", [vocab])}
    return tensors


def _check_config(config: Mapping[str, Any], wanted: Wanted, where: str) -> None:
    algorithm = config.get("speculators_config") or {}
    method = (algorithm.get("proposal_methods") or [{}])[0]
    layer = config.get("transformer_layer_config") or {}
    fields: dict[str, tuple[object, object]] = {
        "speculators_model_type": ("eagle3", config.get("speculators_model_type")),
        "dtype": ("bfloat16", config.get("dtype")),
        "auto_map": (None, config.get("auto_map")),
        "draft_vocab_size": (wanted.mapping.draft_vocab_size, config.get("draft_vocab_size")),
        "eagle_aux_hidden_state_layer_ids": (
            list(wanted.aux_layer_ids),
            config.get("eagle_aux_hidden_state_layer_ids"),
        ),
        "norm_before_residual": (True, config.get("norm_before_residual")),
        "norm_before_fc": (wanted.norm_before_fc, config.get("norm_before_fc")),
        "fc_norm": (False, config.get("fc_norm")),
        "norm_output": (wanted.norm_output, config.get("norm_output")),
        "verifier.name_or_path": (
            wanted.serving_name,
            (algorithm.get("verifier") or {}).get("name_or_path"),
        ),
        "speculative_tokens": (wanted.num_speculative_tokens, method.get("speculative_tokens")),
    }
    for name, value in wanted.layer.items():
        fields[f"transformer_layer_config.{name}"] = (value, layer.get(name))
    for name, (right, found) in fields.items():
        if found != right:
            raise _differs(f"{where}/{CONFIG_NAME}: {name}", right, found)
    # A window of nought is none; any other would cut the draft's context.
    if window := layer.get("sliding_window"):
        raise _differs(f"{where}/{CONFIG_NAME}: sliding_window", None, window)
    if "sliding_attention" in (kinds := layer.get("layer_types") or ()):
        raise _differs(f"{where}/{CONFIG_NAME}: layer_types", "full_attention", kinds)


def _check_tensors(path: Path, wanted: Wanted, where: str) -> None:
    with safe_open(path, "pt") as weights:
        slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
        found = {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    right = served_tensors(wanted)
    for name in sorted(right.keys() | found.keys()):
        if found.get(name) != right.get(name):
            raise _differs(
                f"{where}/{MODEL_NAME}: {name}",
                right.get(name, "no such tensor"),
                found.get(name, "no such tensor"),
            )


def _check_values(path: Path, wanted: Wanted, where: str) -> None:
    """The tensors that training leaves alone are the verifier's; every number is finite."""
    found = load_file(path)
    three = wanted.tensors
    t2d = wanted.mapping.t2d
    fixed = {
        "embed_tokens.weight": three.embed.to(torch.bfloat16),
        "lm_head.weight": three.lm_head.to(torch.bfloat16)[t2d],
    }
    if wanted.prunes:
        fixed |= {"d2t": wanted.mapping.d2t, "t2d": t2d}
    for name, right in fixed.items():
        if not torch.equal(found[name], right):
            differing = int((found[name] != right).sum())
            raise _differs(
                f"{where}/{MODEL_NAME}: {name}",
                "the values of the verifier and the vocab artefact",
                f"{differing} of {right.numel()} others",
            )
    for name, tensor in found.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise _differs(f"{where}/{MODEL_NAME}: {name}", "finite weights", "NaN or infinity")


def _draft_once(folder: Path, wanted: Wanted, where: str) -> None:
    """Upstream's model, with these weights and no others, proposes tokens. Raises DraftInvalid."""
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = Eagle3DraftModel(config).to(torch.bfloat16).eval()
    missing, unexpected = model.load_state_dict(load_file(folder / MODEL_NAME), strict=False)
    # Only the trainer has these two, to compute its targets.
    lost = sorted(set(missing) - {"verifier_norm.weight", "verifier_lm_head.weight"})
    if lost or unexpected:
        raise _differs(f"{where}/{MODEL_NAME}", "the tensors of a draft", [*lost, *unexpected])
    generator = torch.Generator().manual_seed(0)
    width = len(wanted.aux_layer_ids) * int(wanted.layer["hidden_size"])
    states = torch.randn(1, _PROBE_TOKENS, width, generator=generator).to(torch.bfloat16)
    ids = wanted.mapping.draft_ids[torch.arange(_PROBE_TOKENS) % wanted.mapping.draft_vocab_size]
    with torch.no_grad():
        proposed = model(
            hidden_states=states,
            input_ids=ids.unsqueeze(0),
            document_ids=torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64),
            ttt_steps=2,
        )
    largest = max(int(tokens.max()) for tokens in proposed)
    if len(proposed) != 2 or largest >= wanted.mapping.draft_vocab_size:
        raise _differs(where, f"draft ids below {wanted.mapping.draft_vocab_size}", largest)


def _differs(field: str, wanted: object, found: object) -> DraftInvalid:
    return DraftInvalid(
        field, wanted=wanted, found=found, remedy="train and export again; do not serve this draft"
    )
