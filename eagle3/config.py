"""One YAML file configures a run: a section per stage, strict, with defaults and units.

Sections are frozen structs whose fields carry their meaning, unit and bounds, so that
`eagle3 config`, the schema of the chart and the checks have one source. An unknown key is an
error that offers the nearest name. Fields marked as not affecting the result (batch sizes,
worker counts, time limits) stay out of an artefact's identity.
"""

from __future__ import annotations

import difflib
import re
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml

from eagle3 import strict_yaml
from eagle3.config_fields import refuse_unknown
from eagle3.errors import ConfigError
from eagle3.stages import STAGES

# `organisation/name`, or one word; anything else is a path or a URL.
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
DType = Literal["bfloat16", "float32"]
# Helm reads every number as one of 64 bits with a point; past this two of them are the same.
_MOST = 2**53
Count = Annotated[int, msgspec.Meta(ge=1, le=_MOST)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
Length = Annotated[int, msgspec.Meta(ge=2, le=_MOST)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
# Bounded above, since YAML has a number that is none: .inf.
PositiveShare = Annotated[float, msgspec.Meta(gt=0, le=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0, le=1e30)]
NearTie = Annotated[float, msgspec.Meta(ge=0, le=0.5)]
NaturalFloat = Annotated[float, msgspec.Meta(ge=0, le=1e30)]


def _doc(
    text: str, *, unit: str = "", affects: bool = True, but: tuple[str, ...] = ()
) -> msgspec.Meta:
    """A field's meaning and unit, and whether it can change what is written.

    `but` names the keys of a mapping that cannot.
    """
    return msgspec.Meta(description=text, extra={"unit": unit, "affects": affects, "but": but})


class VerifierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model that drafts are trained for."""

    source: Annotated[
        Text, _doc("folder, hub id or fsspec URL of the verifier's files", affects=False)
    ]
    revision: Annotated[str | None, _doc("pinned revision, for a hub id")] = None
    serving_name: Annotated[
        str | None, _doc("name or path of the verifier where the draft will be served")
    ] = None
    trust_remote_code: Annotated[
        bool, _doc("run the Python files that the verifier's tokenizer brings")
    ] = False


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How vLLM is started."""

    dtype: Annotated[DType, _doc("type of the verifier's weights and activations")] = "bfloat16"
    tensor_parallel_size: Annotated[Count, _doc("GPUs per engine", affects=False)] = 1
    max_num_seqs: Annotated[
        Count,
        _doc("sequences in one step; part of the result where regenerate samples", affects=False),
    ] = 32
    gpu_memory_utilization: Annotated[
        PositiveShare, _doc("share of a GPU's memory for the engine", affects=False)
    ] = 0.9
    extra: Annotated[
        dict[str, Any],
        _doc(
            "further engine arguments of vLLM, passed on as they are",
            but=("kv_cache_memory_bytes",),
        ),
    ] = {}


class PrepareConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conversations to token rows with loss masks."""

    data: Annotated[
        tuple[str, ...],
        _doc("JSONL or Parquet files: paths, fsspec URLs, patterns of names", affects=False),
    ]
    max_seq_len: Annotated[Length, _doc("longest row kept", unit="tokens")] = 2048
    max_conversations: Annotated[
        Count | None, _doc("read only the first so many", unit="conversations")
    ] = None
    heldout_share: Annotated[
        Share, _doc("share of conversations, by hash, kept away from training")
    ] = 0.05
    max_heldout: Annotated[
        Count, _doc("held-out prompts recorded; the rest is dropped", unit="prompts")
    ] = 512
    min_supervised_tokens: Annotated[
        Count, _doc("rows with fewer supervised tokens are rejected", unit="tokens")
    ] = 2
    max_rejected_share: Annotated[
        Share, _doc("the stage fails when more rows than this are rejected", affects=False)
    ] = 0.2
    roles: Annotated[
        dict[str, str], _doc("role in the data -> system, user, assistant or tool")
    ] = {}
    template_date: Annotated[
        date | None,
        _doc("today, to a chat template that asks for it, as 2026-01-31; such a one needs it"),
    ] = None
    shard_rows: Annotated[Count, _doc("rows per object", unit="rows")] = 256
    num_workers: Annotated[
        Natural, _doc("processes that tokenise; 0 is the stage's own", affects=False)
    ] = 0


class RegenerateConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """On-policy answers: the verifier answers the prompts itself."""

    enabled: Annotated[bool, _doc("whether the run has this stage", affects=False)] = True
    max_new_tokens: Annotated[Count, _doc("longest answer", unit="tokens")] = 512
    max_turns: Annotated[Count, _doc("turns answered in each conversation")] = 4
    temperature: Annotated[NaturalFloat, _doc("0 is greedy")] = 0.0
    top_k: Annotated[Natural, _doc("sample from the k most probable; 0 is all")] = 50
    seed: Annotated[Natural, _doc("seed of the engine")] = 0
    unit_rows: Annotated[Count, _doc("conversations per work unit", unit="rows")] = 64
    engine: Annotated[EngineConfig, _doc("how vLLM is started")] = EngineConfig()


class ExtractConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hidden states of every row, captured by vLLM."""

    layer_ids: Annotated[
        tuple[int, ...] | None,
        _doc("three auxiliary ids and num_hidden_layers; default [2, n//2, n-3, n]"),
    ] = None
    unit_rows: Annotated[Count, _doc("rows per work unit and object", unit="rows")] = 64
    unit_bytes: Annotated[
        Count,
        _doc("most bytes of hidden states in them; a longer row stands alone", unit="bytes"),
    ] = 2 << 30
    max_rejected_share: Annotated[
        Share, _doc("the stage fails when more rows than this are rejected", affects=False)
    ] = 0.001
    engine: Annotated[EngineConfig, _doc("how vLLM is started")] = EngineConfig()


class VocabConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The draft's smaller vocabulary."""

    draft_vocab_size: Annotated[Count, _doc("tokens that the draft can propose")] = 32000


class GeometryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The draft's shape. Nothing is derived from an MLA verifier: say it, or be refused.

    Where a field is null, a llama- or qwen3-style verifier's own value is taken.
    """

    style: Annotated[Literal["llama", "qwen3"], _doc("model_type that vLLM serves")] = "llama"
    num_layers: Annotated[Count, _doc("decoder layers")] = 1
    intermediate_size: Annotated[Count | None, _doc("width of the MLP")] = None
    num_attention_heads: Annotated[Count | None, _doc("query heads")] = None
    num_key_value_heads: Annotated[Count | None, _doc("key and value heads")] = None
    head_dim: Annotated[Length | None, _doc("width of a head")] = None
    rms_norm_eps: Annotated[PositiveFloat | None, _doc("epsilon of the norms")] = None
    max_position_embeddings: Annotated[
        Count | None, _doc("longest context that the draft serves", unit="tokens")
    ] = None
    rope: Annotated[
        dict[str, Any] | None, _doc("rope_parameters as transformers 5 writes them")
    ] = None


class TrainConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The training by speculators."""

    total_seq_len: Annotated[Length, _doc("tokens packed into a step", unit="tokens")] = 8192
    epochs: Annotated[Count, _doc("passes over the rows")] = 3
    max_steps: Annotated[Count | None, _doc("stop after so many steps")] = None
    learning_rate: Annotated[PositiveFloat, _doc("peak learning rate")] = 1e-4
    optimizer: Annotated[Literal["adamw", "muon"], _doc("optimizer of speculators")] = "muon"
    scheduler: Annotated[
        Literal["linear", "cosine", "none"], _doc("learning-rate schedule of speculators")
    ] = "cosine"
    warmup_share: Annotated[Share, _doc("share of the steps that warm up")] = 0.05
    ttt_steps: Annotated[Count, _doc("training-time-test steps")] = 3
    norm_before_fc: Annotated[bool, _doc("norm the auxiliary states before they are mixed")] = True
    norm_output: Annotated[bool, _doc("norm the state that a step hands to the next")] = True
    validation_share: Annotated[Share, _doc("share of the rows used for validation loss")] = 0.02
    dtype: Annotated[
        DType, _doc("type of the activations; weights are float32, checkpoints bfloat16")
    ] = "bfloat16"
    seed: Annotated[Natural, _doc("seed of weights, order and noise")] = 0
    checkpoints_per_epoch: Annotated[Count, _doc("checkpoints stored", affects=False)] = 1
    num_workers: Annotated[Natural, _doc("loader processes", affects=False)] = 0
    processes: Annotated[
        Count | None,
        _doc("training processes on this node; null is one per GPU", affects=False),
    ] = None
    geometry: Annotated[GeometryConfig, _doc("the draft's shape")] = GeometryConfig()


class ExportConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The folder that vLLM serves."""

    num_speculative_tokens: Annotated[Count, _doc("tokens proposed a step, as default")] = 3
    include_untrained: Annotated[
        bool, _doc("also export the draft before its first step, as evaluate's baseline")
    ] = True


class EvaluateConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Acceptance in a real vLLM, and whether the output stayed the verifier's own."""

    num_prompts: Annotated[Count, _doc("held-out prompts", unit="prompts")] = 200
    max_new_tokens: Annotated[Length, _doc("tokens per prompt", unit="tokens")] = 128
    num_speculative_tokens: Annotated[Count, _doc("tokens proposed a step")] = 3
    concurrency: Annotated[Count, _doc("prompts answered together", affects=False)] = 16
    speed_prompts: Annotated[
        Count, _doc("prompts timed one at a time and together", unit="prompts")
    ] = 16
    lossless_prompts: Annotated[
        Count, _doc("prompts whose outputs are compared token by token", unit="prompts")
    ] = 64
    near_tie: Annotated[
        NearTie,
        _doc("in bfloat16 a divergence is allowed below this gap", unit="nats"),
    ] = 0.1
    compare_untrained: Annotated[bool, _doc("measure the untrained draft too")] = True
    engine: Annotated[EngineConfig, _doc("how vLLM is started")] = EngineConfig()


class RunConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole run."""

    verifier: Annotated[VerifierConfig, _doc("the model that drafts are trained for")]
    prepare: Annotated[PrepareConfig, _doc("conversations to token rows")]
    store: Annotated[
        str | None, _doc("prefix of the run in object storage, any fsspec URL", affects=False)
    ] = None
    inputs: Annotated[
        dict[str, str],
        _doc("'stage.input' -> URL of another run's artefact to read instead", affects=False),
    ] = {}
    regenerate: Annotated[RegenerateConfig, _doc("on-policy answers")] = RegenerateConfig()
    extract: Annotated[ExtractConfig, _doc("hidden states")] = ExtractConfig()
    vocab: Annotated[VocabConfig, _doc("draft vocabulary")] = VocabConfig()
    train: Annotated[TrainConfig, _doc("training")] = TrainConfig()
    export: Annotated[ExportConfig, _doc("serving folder")] = ExportConfig()
    evaluate: Annotated[EvaluateConfig, _doc("acceptance")] = EvaluateConfig()


def load_config(path: Path) -> RunConfig:
    """Read a run's YAML file. Raises ConfigError in one sentence for anything wrong in it."""
    try:
        raw = strict_yaml.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            str(path),
            wanted="a readable YAML file",
            found=strict_yaml.problem(error),
            remedy="name the run's configuration with --config",
        ) from error
    return parse_config(raw)


def parse_config(raw: object) -> RunConfig:
    """Check a configuration that has been read into plain values. Raises ConfigError."""
    if not isinstance(raw, dict):
        raise ConfigError(
            "config",
            wanted="a mapping of sections",
            found=strict_yaml.kind(raw),
            remedy="see README",
        )
    refuse_unknown(raw, RunConfig)
    try:
        config = msgspec.convert(raw, RunConfig)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        field = where.strip("`.") or "config"
        raise ConfigError(
            field,
            wanted="a value of its type and range",
            found=strict_yaml.in_words(message),
            remedy="correct it",
        ) from error
    _cross_check(config)
    return config


def name_when_served(config: VerifierConfig) -> str:
    """The verifier's name where the draft is served: a training pod's own path never is.

    Raises ConfigError where none is given and the source is no hub id.
    """
    if config.serving_name:
        return config.serving_name
    if HUB_ID.fullmatch(config.source) and not Path(config.source).exists():
        return config.source
    raise ConfigError(
        "verifier.serving_name",
        wanted="the verifier's hub id, or its path in the pods that serve it",
        found=f"none, and the source is {config.source}",
        remedy="write it, since the exported draft carries it",
    )


def _cross_check(config: RunConfig) -> None:
    name_when_served(config.verifier)
    if not config.prepare.data:
        raise ConfigError("prepare.data", wanted="a file", found="an empty list", remedy="name one")
    if config.prepare.max_seq_len > config.train.total_seq_len:
        raise ConfigError(
            "prepare.max_seq_len",
            wanted=f"at most train.total_seq_len, {config.train.total_seq_len}",
            found=config.prepare.max_seq_len,
            remedy="raise train.total_seq_len, since longer rows would be cut without a word",
        )
    known = {f"{stage.name}.{name}" for stage in STAGES for name in stage.reads}
    for key in config.inputs:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0)[0]
            raise ConfigError(
                f"inputs.{key}", wanted="'stage.input'", found=key, remedy=f"write {near}"
            )
    ids = config.extract.layer_ids
    if ids is not None and (len(ids) != 4 or list(ids) != sorted(set(ids))):
        raise ConfigError(
            "extract.layer_ids",
            wanted="three auxiliary ids and num_hidden_layers, ascending",
            found=list(ids),
            remedy="write four different ids",
        )
