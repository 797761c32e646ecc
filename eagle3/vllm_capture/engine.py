"""How vLLM is started, on GPUs and on CPUs, and what its refusals mean to a person."""

from __future__ import annotations

import gc
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams, envs
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform

from eagle3.errors import ConfigError
from eagle3.vllm_capture.refusals import explain, read_errors, write_logging_config
from eagle3.vllm_capture.seams import let_llvmlite_be_looked_at

CPU_KV_CACHE_BYTES = 1 << 30
"""Key-value cache of a CPU engine where `extra` names no `kv_cache_memory_bytes`."""

CPU_BATCHED_TOKENS, GPU_BATCHED_TOKENS = 2048, 8192
"""Tokens in one step, where `extra` names no `max_num_batched_tokens` and no prompt is longer."""

OWN_ARGUMENTS = frozenset(
    {
        "model",
        "dtype",
        "max_model_len",
        "max_num_seqs",
        "tensor_parallel_size",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "speculative_config",
        "kv_transfer_config",
        "worker_extension_cls",
        "disable_log_stats",
        "per_request_spec_decode_metrics",
        "seed",
    }
)
"""Engine arguments that follow from our own options: `extra` may not carry them."""


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


class Engine:
    """A running vLLM, with the two things that every use of it needs.

    Args:
        options: see there.
        arguments: what the use itself adds (speculative_config, ...).
        mla_off: keep an MLA verifier from its latent attention kernels: on CPUs they cannot
            stand beside a draft's ordinary attention.
    """

    def __init__(
        self, options: EngineOptions, arguments: Mapping[str, Any], *, mla_off: bool = False
    ) -> None:
        config = _read_config(options.model)
        self.separate_process = _separate_process(options)
        everything = {
            **_common_arguments(options),
            **_platform_arguments(config),
            **_checked_extra(options),
            **arguments,
        }
        environment = _environment(options, self.separate_process, mla_off=mla_off)
        with tempfile.TemporaryDirectory(prefix="eagle3-engine-") as folder:
            log = write_logging_config(Path(folder), environment["VLLM_LOGGING_LEVEL"])
            environment["VLLM_LOGGING_CONFIG_PATH"] = str(log)
            try:
                with _set_for_now(environment), _expected_warnings():
                    self.llm = LLM(**everything)
            except (RuntimeError, ValueError) as error:
                if not self.separate_process:
                    cleanup_dist_env_and_memory()
                said = f"{error}\n{read_errors(Path(folder))}"
                explained = explain(said, options.model, options.max_model_len)
                if explained is None:
                    raise
                raise explained from error

    def enqueue(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[str]:
        """Hand over all prompts before the first step; returns the requests' ids, in order.

        An engine of its own process would otherwise start on the first prompt while the others
        are still on their way, and which prompts share a step would depend on the clock.
        """
        tokens = [{"prompt_token_ids": list(ids)} for ids in prompts]
        if self.separate_process:
            self.llm.sleep(level=0, mode="keep")
        internal_names = self.llm.enqueue(tokens, params, use_tqdm=False)
        if self.separate_process:
            self.llm.wake_up(tags=["scheduling"])
        # Outputs come back under the name without the random ending that vLLM adds.
        return [name.rpartition("-")[0] for name in internal_names]

    def run(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[RequestOutput]:
        """Hand over all prompts, run to the end, and return the outputs in order."""
        names = self.enqueue(prompts, params)
        outputs = self.llm.wait_for_completion(RequestOutput, use_tqdm=False)
        by_name = {output.request_id: output for output in outputs}
        return [by_name[name] for name in names]

    def close(self) -> None:
        """Stop the engine; the process can start another."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        if self.separate_process:
            gc.collect()
        else:
            cleanup_dist_env_and_memory()


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the text model: nested in multimodal ones."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def uses_mla(config: Mapping[str, Any]) -> bool:
    """Whether the text model has multi-head latent attention (DeepSeek, Kimi)."""
    return bool(text_config(config).get("kv_lora_rank"))


@contextmanager
def _expected_warnings() -> Iterator[None]:
    """Upstream's own: a CPU worker looks at everything in every module, torch's deprecated
    objects too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated")
        yield


def _read_config(model: Path) -> dict[str, Any]:
    path = model / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            "verifier",
            wanted=f"a folder with a readable config.json at {model}",
            found="none" if not path.exists() else str(error),
            remedy="name the verifier's local folder",
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(
            str(path), wanted="a JSON object", found=type(config).__name__, remedy="correct it"
        )
    return config


def _separate_process(options: EngineOptions) -> bool:
    if options.separate_process is not None:
        return options.separate_process
    return not current_platform.is_cpu()


def _environment(
    options: EngineOptions, separate_process: bool, *, mla_off: bool
) -> dict[str, str]:
    """What vLLM reads at its start from the environment only, and its processes inherit.

    Threads: left alone, vLLM keeps one core free for its scheduler process, or two where
    states are captured, unless that would leave none: on two cores a plain engine then computes
    on one and a capturing one on both. It also pins to cores, so that two engines share the
    same. Here every engine gets the threads that were asked for, and is not pinned.
    """
    wanted = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if separate_process else "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if current_platform.is_cpu():
        threads = options.num_threads or len(os.sched_getaffinity(0))
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        wanted["OMP_NUM_THREADS"] = str(threads)
        wanted["VLLM_MLA_DISABLE"] = "1" if mla_off else "0"
    return wanted


@contextmanager
def _set_for_now(wanted: Mapping[str, str]) -> Iterator[None]:
    """Set the environment, and what this process already took from it; put it back at the end."""
    before = {name: os.environ.get(name) for name in wanted}
    envs.disable_envs_cache()
    os.environ.update(wanted)
    logging.getLogger("vllm").setLevel(wanted["VLLM_LOGGING_LEVEL"])
    if "OMP_NUM_THREADS" in wanted:
        torch.set_num_threads(int(wanted["OMP_NUM_THREADS"]))
    if wanted["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
        let_llvmlite_be_looked_at()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _common_arguments(options: EngineOptions) -> dict[str, Any]:
    """What every engine of ours has, whatever it is for.

    No prefix caching: a cached prefix has no states. No chunked prefill: a prompt in two pieces
    gives other states than in one, so a step must take the longest prompt whole.
    """
    usual = CPU_BATCHED_TOKENS if current_platform.is_cpu() else GPU_BATCHED_TOKENS
    batched = options.extra.get("max_num_batched_tokens", max(options.max_model_len, usual))
    if batched < options.max_model_len:
        raise ConfigError(
            "engine.extra.max_num_batched_tokens",
            wanted=f"at least max_model_len = {options.max_model_len}",
            found=batched,
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
        "worker_extension_cls": "eagle3.vllm_capture.worker.SeedableWorker",
        "seed": options.seed,
    }


def _platform_arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the kind of model and of machine asks for.

    A multimodal verifier is only ever sent text. On CPUs compiling costs more than it brings,
    and the inlined operators of an MLA model give wrong numbers, so it runs the custom ones.
    """
    arguments: dict[str, Any] = {}
    if "vision_config" in config:
        arguments["language_model_only"] = True
    if current_platform.is_cpu():
        arguments["enforce_eager"] = True
        arguments["kv_cache_memory_bytes"] = CPU_KV_CACHE_BYTES
        if uses_mla(config):
            arguments["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    return arguments


def _checked_extra(options: EngineOptions) -> Mapping[str, Any]:
    taken = sorted(OWN_ARGUMENTS & options.extra.keys())
    if taken:
        raise ConfigError(
            f"engine.extra.{taken[0]}",
            wanted="an engine argument that nothing else decides",
            found=options.extra[taken[0]],
            remedy="leave it out",
        )
    return options.extra
