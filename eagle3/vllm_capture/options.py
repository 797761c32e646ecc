"""What decides how an engine starts: our options, and the arguments of vLLM that follow."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from eagle3.config import EngineConfig
from eagle3.errors import ConfigError

CPU_KV_CACHE_BYTES = 1 << 30
"""Key-value cache of a CPU engine where `extra` names no `kv_cache_memory_bytes`."""

CPU_BATCHED_TOKENS, GPU_BATCHED_TOKENS = 2048, 8192
"""Tokens in one step, where `extra` names no `max_num_batched_tokens` and no prompt is longer."""

OF_A_USE = frozenset(
    {
        "speculative_config",
        "spec_method",
        "spec_model",
        "spec_tokens",
        "kv_transfer_config",
        "disable_log_stats",
        "per_request_spec_decode_metrics",
    }
)
"""Engine arguments that belong to what an engine is started for: capturing, or a draft's help."""

FREE = frozenset({"max_num_batched_tokens", "kv_cache_memory_bytes", "enforce_eager"})
"""Those that have a value of ours and that `extra` may set all the same."""


def _go_on() -> None:
    """Nobody asks to stop."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Everything that decides how an engine starts."""

    model: Path
    """Local folder of the verifier: config.json, safetensors, tokenizer."""
    max_model_len: int
    """Longest prompt and answer together, in tokens."""
    dtype: str = "bfloat16"
    """`bfloat16` or `float32`."""
    tensor_parallel_size: int = 1
    """GPUs."""
    max_num_seqs: int = 32
    """Sequences in one step."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory for the engine; without meaning on a CPU."""
    seed: int = 0
    """Random state at the start."""
    trust_remote_code: bool = False
    """Run Python files that the model's folder brings."""
    num_threads: int | None = None
    """Threads of a CPU engine; all CPUs that this process may use when left out."""
    separate_process: bool | None = None
    """Whether the engine runs in processes of its own. Left out: on GPUs yes, on CPUs no:
    each process imports torch and vLLM again, which takes most of the start there."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further engine arguments of vLLM, passed on as they are."""
    between_steps: Callable[[], None] = _go_on
    """Called before each step of the engine's; what it raises gives the requests up."""

    @classmethod
    def of(
        cls,
        engine: EngineConfig,
        *,
        model: Path,
        max_model_len: int,
        trust_remote_code: bool,
        between_steps: Callable[[], None],
    ) -> EngineOptions:
        """What a stage's `engine` section asks for; the rest as above."""
        return cls(
            model=model,
            max_model_len=max_model_len,
            dtype=engine.dtype,
            tensor_parallel_size=engine.tensor_parallel_size,
            max_num_seqs=engine.max_num_seqs,
            gpu_memory_utilization=engine.gpu_memory_utilization,
            trust_remote_code=trust_remote_code,
            extra=engine.extra,
            between_steps=between_steps,
        )


def engine_arguments(
    options: EngineOptions, config: Mapping[str, Any], of_the_use: Mapping[str, Any]
) -> dict[str, Any]:
    """Every argument of vLLM's engine.

    Args:
        config: the verifier's config.json.
        of_the_use: what the engine's use adds, some of `OF_A_USE`.

    Raises ConfigError where `extra` names what vLLM does not know, or what something else decides.
    """
    assert of_the_use.keys() <= OF_A_USE
    ours = {**_common_arguments(options), **_platform_arguments(config)}
    _check_extra(options.extra, decided=(ours.keys() | OF_A_USE) - FREE)
    return {**ours, **options.extra, **of_the_use}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the text model: nested in multimodal ones."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def uses_mla(config: Mapping[str, Any]) -> bool:
    """Whether the text model has multi-head latent attention (DeepSeek, Kimi)."""
    return bool(text_config(config).get("kv_lora_rank"))


def _common_arguments(options: EngineOptions) -> dict[str, Any]:
    """What every engine of ours has, whatever it is for.

    No prefix caching: a cached prefix has no states. No chunked prefill: a prompt in two pieces
    gives other states than in one, so a step must take the longest prompt whole.
    """
    usual = CPU_BATCHED_TOKENS if current_platform.is_cpu() else GPU_BATCHED_TOKENS
    batched = options.extra.get("max_num_batched_tokens", max(options.max_model_len, usual))
    if type(batched) is not int or batched < options.max_model_len:
        raise ConfigError(
            "engine.extra.max_num_batched_tokens",
            wanted=f"a number of tokens, at least max_model_len = {options.max_model_len}",
            found=repr(batched),
            remedy="raise it: prompts are prefilled in one step",
        )
    return {
        "model": str(options.model),
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
        "max_num_batched_tokens": batched,
        "max_num_seqs": options.max_num_seqs,
        "tensor_parallel_size": options.tensor_parallel_size,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "trust_remote_code": options.trust_remote_code,
        "enable_prefix_caching": False,
        "enable_chunked_prefill": False,
        "use_tqdm_on_load": False,
        "worker_extension_cls": "eagle3.vllm_capture.worker.TaughtWorker",
        "seed": options.seed,
    }


def _platform_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the kind of model and of machine asks for.

    A multimodal verifier is only ever sent text. On CPUs compiling costs more than it brings,
    and the inlined operators of an MLA model give wrong numbers, so it runs the custom ones; its
    attention runs vLLM's reference kernels, since those that it prefers where the processor has
    AMX take no float32.
    """
    arguments: dict[str, Any] = {}
    if "vision_config" in config:
        arguments["language_model_only"] = True
    if current_platform.is_cpu():
        arguments["enforce_eager"] = True
        arguments["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
        if uses_mla(config):
            arguments["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
            arguments["attention_backend"] = "CPU_MLA"
    return arguments


def _check_extra(extra: Mapping[str, Any], *, decided: Set[str]) -> None:
    """Raises ConfigError for an unknown argument and for one that is decided elsewhere."""
    known = {argument.name for argument in dataclasses.fields(EngineArgs)}
    for name, value in extra.items():
        if name not in known:
            near = next(iter(difflib.get_close_matches(name, known, n=1)), "")
            hint = f"; {near} is not for you to set" if near in decided else f", or write {near}"
            raise ConfigError(
                f"engine.extra.{name}",
                wanted="an engine argument of vLLM",
                found="an unknown one",
                remedy=f"leave it out{hint if near else ''}",
            )
        if name in decided:
            section = "engine." if name in EngineConfig.__struct_fields__ else ""
            section = "verifier." if name == "trust_remote_code" else section
            raise ConfigError(
                f"engine.extra.{name}",
                wanted="an engine argument that nothing else decides",
                found=value,
                remedy=f"leave it out, and set {section}{name}" if section else "leave it out",
            )
