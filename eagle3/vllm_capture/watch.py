"""Whoever waits for an engine in processes of its own is told when those are no more."""

from __future__ import annotations

import threading
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

_EVERY_SECONDS = 0.5


class DeathWatch:
    """Wakes those who wait for an engine whose process was killed.

    Upstream notices such a death and refuses what is asked after it, but who waited already, for
    an output or for the answer to a call, would wait for ever.
    """

    def __init__(self, engine_core: Any) -> None:
        """Args: engine_core: vLLM's client of an engine in processes of its own."""
        self._core = engine_core
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="engine-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._closed.wait(_EVERY_SECONDS):
            if self._core.resources.engine_dead:
                self._core.outputs_queue.put_nowait(EngineDeadError())
                for future in list(self._core.utility_results.values()):
                    if not future.done():
                        future.set_exception(EngineDeadError())
                return
