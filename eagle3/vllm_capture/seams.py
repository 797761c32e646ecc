"""What a third library must be told so that vLLM's CPU worker can start in this process."""

from __future__ import annotations

import importlib


def let_llvmlite_be_looked_at() -> None:
    """Give llvmlite's library object a `__dict__` that is one.

    To replace its kernels, vLLM's CPU worker reads `vars()` of everything in every loaded
    module. llvmlite (which vLLM itself loads for the images of multimodal models) has an object
    that takes any attribute for the name of a C function, `__dict__` too, and the worker stops.

    Loaded here and not with this module: a worker in a process of its own imports this package
    too, and starts because it has no llvmlite yet.
    """
    ffi = importlib.import_module("llvmlite.binding.ffi")
    ffi.lib._fntab.setdefault("__dict__", {})
