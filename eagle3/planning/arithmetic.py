"""What a run will take, by arithmetic on its configuration: bytes, hours, memory, network.

Everything here is an estimate that says where its numbers come from: tokens that prepare counted,
or the bytes of the files; rates that were given or measured, or those of `DEFAULT_RATES`.

Sources of the formulas: a hidden state is `hidden_size` bfloat16 numbers a layer (2 bytes each);
the draft is `Eagle3DraftModel` of speculators 0.9.0 (`models/eagle3/core.py`: fc over three
layers' states, a first decoder layer whose queries, keys and values take twice the hidden size,
embedding and both lm_heads frozen); weights are float32 in training, AdamW keeps two moments a
weight and Muon one (Jordan et al., 2024), FSDP shares all of these out over the processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from eagle3.config import RunConfig
from eagle3.manifest import VerifierFacts

FLOAT32_BYTES, BFLOAT16_BYTES = 4, 2
NUM_LAYERS_CAPTURED = 4
NUM_AUX_LAYERS = 3
# Ids and mask, int64 each; the header's line and checksum of a row, and its name.
BYTES_PER_TOKEN, BYTES_PER_ROW = 16, 350
# Chats in JSON: some four bytes of text a token of English, and the braces and names around it.
DATA_BYTES_PER_TOKEN = 4.5
# How much larger a packed file is inside, of chats.
UNPACKED = {".gz": 3.5, ".zst": 3.5, ".parquet": 2.5}

DEFAULT_RATES = {
    "prepare_tokens_per_second": 50_000.0,
    "regenerate_tokens_per_second": 3_000.0,
    "extract_tokens_per_second": 20_000.0,
    "train_tokens_per_second": 30_000.0,
    "evaluate_tokens_per_second": 500.0,
}
"""Tokens a second of one node of eight GPUs with a verifier of a trillion parameters, rounded down:
orders of magnitude to begin with, and no promise. Measure, and give yours."""


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """The draft's own sizes; see `train.geometry`."""

    num_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


def draft_shape(config: RunConfig, text_config: Mapping[str, Any]) -> DraftShape | None:
    """The shape that train will build, from `train.geometry` and a plain-attention verifier.

    None where something is neither said nor the verifier's to lend, as with latent attention.
    """
    geometry = config.train.geometry
    own: dict[str, Any] = {} if "kv_lora_rank" in text_config else dict(text_config)
    if own.get("num_attention_heads") and not own.get("head_dim"):
        own["head_dim"] = own["hidden_size"] // own["num_attention_heads"]
    own.setdefault("num_key_value_heads", own.get("num_attention_heads"))
    names = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes: dict[str, Any] = {name: getattr(geometry, name) or own.get(name) for name in names}
    if None in sizes.values():
        return None
    return DraftShape(num_layers=geometry.num_layers, **sizes)


def state_bytes(hidden_size: int, num_layers: int = NUM_LAYERS_CAPTURED) -> int:
    """Bytes of one token's hidden states: 57,344 for four layers of 7,168."""
    return num_layers * hidden_size * BFLOAT16_BYTES


def bytes_per_token(hidden_size: int) -> int:
    """What training reads of a token: its states, its id and its mask."""
    return state_bytes(hidden_size) + BYTES_PER_TOKEN


def extract_bytes(tokens: int, rows: int, hidden_size: int) -> int:
    """Bytes of all shards that extract writes, their ids, masks and headers included."""
    return tokens * bytes_per_token(hidden_size) + rows * BYTES_PER_ROW


def trained_parameters(shape: DraftShape, hidden_size: int, *, norm_before_fc: bool) -> int:
    """Parameters of the draft that training changes."""
    hidden, queries = hidden_size, shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    mlp = 3 * hidden * shape.intermediate_size
    output = queries * hidden
    first = 2 * hidden * (queries + 2 * keys) + output + mlp + 3 * hidden
    further = hidden * (queries + 2 * keys) + output + mlp + 2 * hidden
    around = NUM_AUX_LAYERS * hidden * hidden + hidden
    norm = NUM_AUX_LAYERS * hidden if norm_before_fc else 0
    return first + (shape.num_layers - 1) * further + around + norm


def frozen_parameters(hidden_size: int, vocab_size: int, draft_vocab_size: int) -> int:
    """Parameters that training only reads: the embedding, both lm_heads, the verifier's norm."""
    return (vocab_size + 2 * draft_vocab_size + 1) * hidden_size


class TrainingMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes on the accelerators of a training, all of them together.

    Attributes:
        trained_parameters, frozen_parameters: numbers of weights.
        states: weights, gradients and the optimizer's moments, shared out over the GPUs.
        activations: of one GPU, an estimate: for each step of training-time test the logits of
            draft and verifier with their gradient (3 x float32 x draft vocabulary a token), and
            in bfloat16 what the layer keeps for its gradient (20 hidden, 4 MLP, 4 query widths).
        per_gpu: the share of the states, and the activations.
    """

    trained_parameters: int
    frozen_parameters: int
    states: int
    activations: int
    per_gpu: int


def training_memory(
    config: RunConfig, verifier: VerifierFacts, shape: DraftShape, gpus: int
) -> TrainingMemory:
    """The memory of the training pod that holds `gpus` GPUs, or processes on CPUs."""
    train, hidden = config.train, verifier.hidden_size
    trained = trained_parameters(shape, hidden, norm_before_fc=train.norm_before_fc)
    draft_vocab = config.vocab.draft_vocab_size
    frozen = frozen_parameters(hidden, verifier.vocab_size, draft_vocab)
    moments = 1 if train.optimizer == "muon" else 2
    states = FLOAT32_BYTES * (trained * (2 + moments) + frozen)
    width = 20 * hidden + 4 * shape.intermediate_size
    width += 4 * shape.num_attention_heads * shape.head_dim
    each = 3 * FLOAT32_BYTES * draft_vocab + BFLOAT16_BYTES * width * shape.num_layers
    captured = state_bytes(hidden)
    activations = train.total_seq_len * (train.ttt_steps * each + captured)
    return TrainingMemory(
        trained_parameters=trained,
        frozen_parameters=frozen,
        states=states,
        activations=activations,
        per_gpu=-(-states // max(gpus, 1)) + activations,
    )


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens a second of one node, and who says so."""

    tokens_per_second: float
    source: str


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a plan.

    Attributes:
        state: `cached`, `to run`, or `refused` where the stage would end with 65.
        why: in a few words.
        tokens: that pass through it; 0 where the work does not grow with them.
        bytes: that it will have written in the end; `bytes_to_write` of them are still to come.
        gpus: held while it runs, over all nodes.
        hours: still to come: of a begun stage those of what no finished unit has done.
        rate: that the hours were taken from.
    """

    stage: str
    state: str
    why: str
    rows: int = 0
    tokens: int = 0
    bytes: int = 0
    bytes_to_write: int = 0
    gpus: int = 0
    hours: float = 0.0
    rate: Rate | None = None


class RunPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run.

    Attributes:
        counted: where rows and tokens come from.
        storage_bytes: of all artefacts; `bytes_to_write` of what does not stand yet.
        training_bytes_per_second: that the store must give for the GPUs not to wait.
        training_bytes: read in all epochs together.
        memory: None where the draft's shape is not known yet.
    """

    stages: tuple[StagePlan, ...]
    counted: str
    storage_bytes: int
    bytes_to_write: int
    gpu_hours: float
    training_bytes_per_second: float
    training_bytes: int
    memory: TrainingMemory | None
    warnings: tuple[str, ...]


def tokens_of(stage: str, config: RunConfig, tokens: int) -> int:
    """Tokens that a stage has to work through.

    Regenerate is taken to answer as much as was there. Export and vocab work through none.
    """
    evaluated = config.evaluate.num_prompts * config.evaluate.max_new_tokens
    return {
        "prepare": tokens,
        "regenerate": tokens,
        "extract": tokens,
        "train": tokens * config.train.epochs,
        # With the trained draft, with the untrained one, and the compared ones without any.
        "evaluate": evaluated * (2 + config.evaluate.compare_untrained),
    }.get(stage, 0)


def bytes_of(
    stage: str, config: RunConfig, verifier: VerifierFacts, drafts: int, counts: tuple[int, int]
) -> int:
    """Bytes that a stage writes, an estimate.

    Args:
        drafts: parameters of a draft as it is served, or 0 where they are not known.
        counts: rows and tokens.
    """
    rows, tokens = counts
    tensors = BFLOAT16_BYTES * (2 * verifier.vocab_size + 1) * verifier.hidden_size
    # Rows, and the messages beside them.
    prepared = tokens * BYTES_PER_TOKEN + rows * BYTES_PER_ROW + int(tokens * DATA_BYTES_PER_TOKEN)
    served = BFLOAT16_BYTES * drafts
    return {
        "prepare": tensors + prepared,
        "regenerate": prepared,
        "extract": extract_bytes(tokens, rows, verifier.hidden_size),
        "vocab": verifier.vocab_size + 8 * config.vocab.draft_vocab_size,
        # The draft and the untrained one; checkpoints beside them, with moments as large.
        "train": 2 * served + 3 * served,
        "export": served * (1 + config.export.include_untrained),
    }.get(stage, 0)


def served_parameters(shape: DraftShape, config: RunConfig, verifier: VerifierFacts) -> int:
    """Parameters of the exported draft: what was trained, the embedding and one lm_head."""
    hidden = verifier.hidden_size
    trained = trained_parameters(shape, hidden, norm_before_fc=config.train.norm_before_fc)
    return trained + (verifier.vocab_size + config.vocab.draft_vocab_size) * hidden
