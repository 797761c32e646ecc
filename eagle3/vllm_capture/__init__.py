"""vLLM, and nothing else in the project imports it.

`VllmCapture` shows the verifier's hidden states, `VllmGenerator` its answers, with a draft's
help or without. Both start from `EngineOptions`.

The names are looked up when they are first used (PEP 562), as `vllm_capture.VllmCapture`:
importing vLLM takes ten seconds and more, which a stage whose work is done need not wait for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eagle3.vllm_capture.answers import VllmGenerator
    from eagle3.vllm_capture.engine import EngineOptions
    from eagle3.vllm_capture.states import VllmCapture

__all__ = ["EngineOptions", "VllmCapture", "VllmGenerator"]

_HOMES = {"EngineOptions": "engine", "VllmCapture": "states", "VllmGenerator": "answers"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
