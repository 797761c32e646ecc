"""Where captured states leave the engine: vLLM's own connector, made to run without CUDA.

vLLM loads this class by name in its worker and its scheduler. On CUDA it *is* the stock
connector. The stock one copies through a CUDA stream; on a CPU there is none, and nothing to
gain from writing in the background, so there the file is written before the step ends.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class _Written:
    """Answers as the CUDA event that the stock connector polls: the copy is done."""

    def query(self) -> bool:
        return True


class CaptureConnector(ExampleHiddenStatesConnector):  # type: ignore[misc]  # types not followed
    """The stock connector, with a synchronous write when the cache lies in main memory."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        """Write one finished request's states; a failure stops the engine instead of a log line.

        The file appears under its name only when it is whole, and its lock opens after that.
        """
        cache = self._kv_cache
        if cache is None or cache.is_cuda or not self._is_tp_rank_zero:
            super()._submit_async_write(pending)
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.int64)
        offsets = torch.arange(self._block_size, dtype=torch.int64)
        slots = (blocks[:, None] * self._block_size + offsets).flatten()
        states = extract_from_kv_cache(cache, slots, len(pending.token_ids)).contiguous()
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        unfinished = f"{pending.filename}.part"
        save_file({"hidden_states": states, "token_ids": pending.token_ids}, unfinished)
        Path(unfinished).replace(pending.filename)
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is not None:
            os.close(lock)
        self._req_copy_events[pending.req_id] = cast("torch.cuda.Event", _Written())
