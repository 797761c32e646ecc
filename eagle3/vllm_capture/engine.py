"""How vLLM is started, on GPUs and on CPUs, and what its refusals mean to a person."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.v1.engine.exceptions import EngineDeadError

from eagle3.capture import Told, nobody
from eagle3.errors import ConfigError
from eagle3.vllm_capture.environment import environment_of, expected_warnings, set_for_now
from eagle3.vllm_capture.options import EngineOptions, engine_arguments
from eagle3.vllm_capture.refusals import (
    died,
    explain,
    explain_extra,
    read_errors,
    write_logging_config,
)
from eagle3.vllm_capture.watch import DeathWatch


class Engine:
    """A running vLLM, with what every use of it needs.

    Args:
        options: see there.
        arguments: what the use itself adds, some of `options.OF_A_USE`.
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
        self._broken = False
        everything = engine_arguments(options, config, arguments)
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
        llm: LLM | None = None
        try:
            with set_for_now(environment), expected_warnings():
                llm = LLM(**arguments)
        except (RuntimeError, ValueError, TypeError) as error:
            if not self.separate_process:
                cleanup_dist_env_and_memory()
            said = f"{error}\n{read_errors(Path(self._folder.name))}"
            explained = explain(said, options.model, options.max_model_len)
            if explained is None and not isinstance(error, RuntimeError):
                explained = explain_extra(str(error), options.extra)
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

        Raises ServiceUnavailable where the engine fails, and what `between_steps` raises.
        """
        self._between_steps()
        return self._step()

    def _step(self) -> list[RequestOutput]:
        llm_engine = self.llm.llm_engine
        if self.separate_process and not llm_engine.has_unfinished_requests():
            return []
        with self.alive(), self._told():
            return [output for output in llm_engine.step() if output.finished]

    def run(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, told: Told = nobody
    ) -> list[RequestOutput]:
        """Hand over all prompts, run to the end, and return the outputs in order.

        `told` hears after each step that finished some how many are.
        """
        names = self.enqueue(prompts, params)
        finished: dict[str, RequestOutput] = {}
        try:
            while len(finished) < len(names):
                if outputs := self.step():
                    finished.update((output.request_id, output) for output in outputs)
                    told(len(finished))
        finally:
            if waiting := [name for name in names if name not in finished]:
                self.give_up(waiting)
        return [finished[name] for name in names]

    def give_up(self, names: Sequence[str]) -> None:
        """Forget requests that nobody waits for any more; closed or broken, there are none."""
        if hasattr(self, "llm") and not self._broken:
            self.llm.llm_engine.abort_request(list(names))
            self._step()

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Around whatever is asked of it: raises ServiceUnavailable where its processes died."""
        try:
            yield
        except EngineDeadError as error:
            raise died(read_errors(Path(self._folder.name))) from error

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Around a step: where the engine runs in this process, it dies of the same errors."""
        try:
            yield
        except (RuntimeError, ValueError, OSError, SafetensorError) as error:
            if self.separate_process:
                raise
            self._broken = True
            raise died(f"{type(error).__name__}: {error}") from error

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
