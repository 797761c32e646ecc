"""How vLLM is started, on GPUs and on CPUs, and what its refusals mean to a person."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.v1.engine.exceptions import EngineDeadError

from eagle3.config import EngineConfig
from eagle3.errors import ConfigError
from eagle3.vllm_capture.environment import (
    environment_of,
    expected_lines_left_out,
    expected_warnings,
    set_for_now,
)
from eagle3.vllm_capture.refusals import died, explain, read_errors, write_logging_config
from eagle3.vllm_capture.watch import DeathWatch

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
        "use_tqdm_on_load",
        "worker_extension_cls",
        "disable_log_stats",
        "per_request_spec_decode_metrics",
        "seed",
    }
)
"""Engine arguments that follow from our own options: `extra` may not carry them."""


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


class Engine:
    """A running vLLM, with what every use of it needs.

    Args:
        options: see there.
        arguments: what the use itself adds (speculative_config, ...).
        mla_off: keep an MLA verifier from its latent attention kernels: on CPUs they cannot
            stand beside a draft's ordinary attention.

    Raises ConfigError, VerifierInvalid or EnvironmentMisconfigured where it does not start.
    """

    def __init__(
        self, options: EngineOptions, arguments: Mapping[str, Any], *, mla_off: bool = False
    ) -> None:
        config = _read_config(options.model)
        self.separate_process = _separate_process(options)
        self._between_steps = options.between_steps
        everything = {
            **_common_arguments(options),
            **_platform_arguments(config),
            **_checked_extra(options),
            **arguments,
        }
        environment = environment_of(
            self.separate_process, num_threads=options.num_threads, mla_off=mla_off
        )
        # Kept as long as the engine: its processes log their errors into it to the end.
        self._folder = tempfile.TemporaryDirectory(prefix="eagle3-engine-")
        log = write_logging_config(Path(self._folder.name), environment["VLLM_LOGGING_LEVEL"])
        environment["VLLM_LOGGING_CONFIG_PATH"] = str(log)
        self.llm = self._started(options, everything, environment)
        self._watch: DeathWatch | None = None
        if self.separate_process:
            self._watch = DeathWatch(self.llm.llm_engine.engine_core)

    def _started(
        self, options: EngineOptions, arguments: Mapping[str, Any], environment: Mapping[str, str]
    ) -> LLM:
        # Processes of its own keep this one's standard error, and are told not to write there.
        quiet = nullcontext() if self.separate_process else expected_lines_left_out()
        llm: LLM | None = None
        try:
            with set_for_now(environment), expected_warnings(), quiet:
                llm = LLM(**arguments)
        except (RuntimeError, ValueError) as error:
            if not self.separate_process:
                cleanup_dist_env_and_memory()
            said = f"{error}\n{read_errors(Path(self._folder.name))}"
            explained = explain(said, options.model, options.max_model_len)
            if explained is None:
                raise
            raise explained from error
        finally:
            if llm is None:
                self._folder.cleanup()
        return llm

    def enqueue(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[str]:
        """Hand over all prompts before the first step; returns the requests' ids, in order.

        An engine of its own process would otherwise start on the first prompt while the others
        are still on their way, and which prompts share a step would depend on the clock.
        """
        tokens = [{"prompt_token_ids": list(ids)} for ids in prompts]
        with self.alive():
            if self.separate_process:
                self.llm.sleep(level=0, mode="keep")
            internal_names = self.llm.enqueue(tokens, params, use_tqdm=False)
            if self.separate_process:
                self.llm.wake_up(tags=["scheduling"])
        # Outputs come back under the name without the random ending that vLLM adds.
        return [name.rpartition("-")[0] for name in internal_names]

    def step(self) -> list[RequestOutput]:
        """One step of the engine; returns the requests that it finished.

        An engine in a process of its own steps by itself, and is asked only while it has work.
        """
        llm_engine = self.llm.llm_engine
        if self.separate_process and not llm_engine.has_unfinished_requests():
            return []
        with self.alive():
            return [output for output in llm_engine.step() if output.finished]

    def run(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[RequestOutput]:
        """Hand over all prompts, run to the end, and return the outputs in order."""
        names = self.enqueue(prompts, params)
        finished: dict[str, RequestOutput] = {}
        try:
            while len(finished) < len(names):
                self._between_steps()
                finished.update((output.request_id, output) for output in self.step())
        finally:
            if waiting := [name for name in names if name not in finished]:
                self.give_up(waiting)
        return [finished[name] for name in names]

    def give_up(self, names: Sequence[str]) -> None:
        """Forget requests, after an error or when nobody waits for them; closed, there are none."""
        if hasattr(self, "llm"):
            self.llm.llm_engine.abort_request(list(names))
            self.step()

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Around whatever is asked of it: raises ServiceUnavailable where its processes died."""
        try:
            yield
        except EngineDeadError as error:
            raise died(read_errors(Path(self._folder.name))) from error

    def close(self) -> None:
        """Stop the engine; the process can start another."""
        if self._watch is not None:
            self._watch.close()
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        if self.separate_process:
            gc.collect()
        else:
            cleanup_dist_env_and_memory()
        self._folder.cleanup()


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the text model: nested in multimodal ones."""
    nested = config.get("text_config")
    return nested if isinstance(nested, Mapping) else config


def uses_mla(config: Mapping[str, Any]) -> bool:
    """Whether the text model has multi-head latent attention (DeepSeek, Kimi)."""
    return bool(text_config(config).get("kv_lora_rank"))


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
        "use_tqdm_on_load": False,
        "worker_extension_cls": "eagle3.vllm_capture.worker.TaughtWorker",
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
