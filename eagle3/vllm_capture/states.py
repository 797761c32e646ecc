"""`VllmCapture`: hidden states out of vLLM's `extract_hidden_states`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    cleanup_hidden_states,
    load_hidden_states,
)
from vllm.outputs import RequestOutput

from eagle3.capture import CapturedRow
from eagle3.errors import ConfigError, ServiceUnavailable
from eagle3.vllm_capture.engine import Engine
from eagle3.vllm_capture.options import EngineOptions

_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
"""The engine must answer something. One token, thrown away: from the second on, upstream reads
the wrong column."""

_WITH_PROMPT_LOGPROBS = SamplingParams(
    max_tokens=1, temperature=0.0, detokenize=False, prompt_logprobs=0
)
"""The same, with the log-probability of each prompt token (and of no others)."""


class VllmCapture:
    """A `Capture` (see `eagle3.capture`) on a running vLLM.

    The engine writes one file per row into `scratch` and this class takes it away again, so
    `scratch` holds at most one unit of work: rows * tokens * layers * hidden_size * bytes. A
    directory in memory (/dev/shm) is quickest.

    Args:
        options: `max_model_len` must be one more than the longest row, for the thrown-away token.
        layer_ids: ascending; the last is the verifier's num_hidden_layers.
        scratch: where the engine's files pass through; a fresh directory is made inside.
    """

    def __init__(
        self, options: EngineOptions, *, layer_ids: Sequence[int], scratch: Path | None = None
    ) -> None:
        if list(layer_ids) != sorted(set(layer_ids)) or not layer_ids:
            raise ConfigError(
                "extract.layer_ids",
                wanted="ascending ids, each once",
                found=list(layer_ids),
                remedy="sort them: the engine returns states in ascending order whatever is asked",
            )
        self._longest = options.max_model_len - 1
        with ExitStack() as started:
            self._directory = tempfile.mkdtemp(prefix="eagle3-states-", dir=scratch)
            started.callback(shutil.rmtree, self._directory, ignore_errors=True)
            self._engine = Engine(options, _extracting(layer_ids, self._directory))
            started.callback(self._engine.close)
            self._running = started.pop_all()

    def capture(self, rows: Sequence[Sequence[int]]) -> Iterator[CapturedRow]:
        """See `Capture.capture`. Raises ConfigError for an empty row or one that is too long."""
        for ids in rows:
            if not 0 < len(ids) <= self._longest:
                raise ConfigError(
                    "max_seq_len",
                    wanted=f"rows of 1 to {self._longest} tokens",
                    found=f"a row of {len(ids)}",
                    remedy="raise max_model_len above the longest row",
                )
        return self._run(rows)

    def layer_ids(self) -> tuple[int, ...]:
        """See `Capture.layer_ids`; every worker of the engine must say the same."""
        with self._engine.alive():
            named = {tuple(ids) for ids in self._engine.llm.collective_rpc("layers_captured")}
        return named.pop() if len(named) == 1 else ()

    def _run(self, rows: Sequence[Sequence[int]]) -> Iterator[CapturedRow]:
        """Step the engine; yield each row as soon as it and those before it are written.

        States are written in the step after the one that finished their request. An engine in
        a process of its own takes that step by itself, and the file's lock tells when.
        """
        waiting = self._engine.enqueue(rows, _ONE_TOKEN)
        finished: dict[str, str] = {}
        try:
            while waiting:
                written = set(finished)
                for output in self._engine.step():
                    assert output.request_id in waiting
                    finished[output.request_id] = _path(output)
                while waiting and waiting[0] in written:
                    yield _take(finished.pop(waiting.pop(0)))
        finally:
            if waiting:
                self._give_up(waiting)

    def _give_up(self, waiting: Sequence[str]) -> None:
        """Forget a unit after an error, or when the caller stopped asking, and its files.

        A file that an engine of its own process writes later goes with the directory.
        """
        self._engine.give_up(waiting)
        for path in Path(self._directory).glob("*"):
            path.unlink(missing_ok=True)

    def prompt_logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        """See `Capture.prompt_logprobs`."""
        (output,) = self._engine.run([ids], _WITH_PROMPT_LOGPROBS)
        self._engine.step()
        _take(_path(output))
        assert output.prompt_logprobs is not None
        chosen = [
            position[token].logprob
            for token, position in zip(ids, output.prompt_logprobs, strict=True)
            if position is not None
        ]
        return torch.tensor(chosen, dtype=torch.float32)

    def close(self) -> None:
        """See `Capture.close`."""
        self._running.close()


def _extracting(layer_ids: Sequence[int], directory: str) -> dict[str, Any]:
    """The arguments that make an engine an extracting one."""
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": list(layer_ids)}
            },
        },
        "kv_transfer_config": {
            "kv_connector": "CaptureConnector",
            "kv_connector_module_path": "eagle3.vllm_capture.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "shared_storage_path": directory,
                "use_synchronization_lock": True,
            },
        },
    }


def _path(output: RequestOutput) -> str:
    """Where the engine put this request's states."""
    parameters = output.kv_transfer_params or {}
    return str(parameters["hidden_states_path"])


def _take(path: str) -> CapturedRow:
    """Read a file of the engine's and delete it; waits until the engine is done writing it.

    The engine only logs a failed write: here it shows as a file that is missing or torn.
    """
    try:
        tensors = load_hidden_states(path)
    except (OSError, SafetensorError) as error:
        raise ServiceUnavailable(
            path,
            wanted="the hidden states that the engine said it wrote",
            found=str(error),
            remedy="see the engine's log, and the free space of the scratch directory",
        ) from error
    cleanup_hidden_states(path)
    return CapturedRow(tensors["token_ids"].to(torch.int64), tensors["hidden_states"])
