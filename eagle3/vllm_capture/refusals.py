"""What an engine that will not start, or dies, means to the person who asked for it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3.errors import (
    ConfigError,
    Eagle3Error,
    EnvironmentMisconfigured,
    ServiceUnavailable,
    VerifierInvalid,
)

_TOO_LITTLE_MEMORY = (
    "larger than the available KV cache memory",
    "No available memory for the cache blocks",
    "Free memory on device",
    "Available memory on node",
    "CUDA out of memory",
)

_RAISED = re.compile(r"[\w.]*(Error|Exception): ")

_NO_COMPILER = ("InvalidCxxCompiler", "Failed to find C compiler")

_UNKNOWN_ARCHITECTURE = (
    "are not supported for now",
    "does not recognize this architecture",
    "has no vLLM implementation",
)


def explain(text: str, model: Path, max_model_len: int) -> Eagle3Error | None:
    """One sentence for what a person can put right; None for everything else.

    Args:
        text: the exception, and what the engine's own processes logged as errors.
    """
    if line := _line_with(_TOO_LITTLE_MEMORY, text):
        return ConfigError(
            "engine memory",
            wanted="room for the weights and at least one longest row",
            found=line,
            remedy="lower max_seq_len or engine.max_num_seqs, raise"
            " engine.gpu_memory_utilization, or use more GPUs (engine.tensor_parallel_size);"
            " on a CPU raise engine.extra.kv_cache_memory_bytes",
        )
    if line := _line_with(_UNKNOWN_ARCHITECTURE, text):
        return VerifierInvalid(
            f"{model}/config.json",
            wanted="an architecture that this vLLM serves",
            found=line,
            remedy="use a vLLM that knows the model",
        )
    if "derived max_model_len" in text:
        return ConfigError(
            "max_seq_len",
            wanted="at most the verifier's own longest context",
            found=max_model_len,
            remedy="lower it",
        )
    if line := _line_with(("Engine core initialization failed",), text):
        return EnvironmentMisconfigured(
            "engine",
            wanted="an engine that starts",
            found=line,
            remedy="read the engine's own error in the log above",
        )
    return None


def explain_extra(text: str, extra: Mapping[str, Any]) -> ConfigError | None:
    """One sentence for a start that failed with arguments of the user's own; None without any.

    Args:
        text: the exception. Pydantic's has several lines, and ends with an address.
    """
    if not extra:
        return None
    said = " ".join(text.partition("For further information")[0].split())
    return ConfigError(
        "engine.extra",
        wanted="engine arguments with which this vLLM starts",
        found=f"{', '.join(extra)}, and it says: {said[:300]}",
        remedy="correct them, or leave them out",
    )


def died(text: str) -> Eagle3Error:
    """One sentence for an engine whose processes ended while it was at work.

    Args:
        text: what they logged as errors; nothing where they were killed.
    """
    raised = [line.strip() for line in text.splitlines() if _RAISED.match(line)]
    if line := _line_with(_NO_COMPILER, text):
        return EnvironmentMisconfigured(
            "engine",
            wanted="a C++ compiler, with which PyTorch makes kernels for a CPU",
            found=line,
            remedy="install g++, or use an image that has one",
        )
    silent = "its process ended without a word, as one does that is killed for its memory"
    return ServiceUnavailable(
        "engine",
        wanted="an engine that answers",
        found=raised[0][:300] if raised else silent,
        remedy="run the stage again, which goes on from the finished units; where it comes again,"
        " lower engine.max_num_seqs or engine.gpu_memory_utilization",
    )


def _line_with(words: tuple[str, ...], text: str) -> str | None:
    """The first line that holds any of these words, at most 300 characters of it."""
    lines = (line.strip() for line in text.splitlines())
    return next((line[:300] for line in lines if any(word in line for word in words)), None)


def write_logging_config(folder: Path, level: str) -> Path:
    """Have an engine's own processes log to standard error, and errors into `folder` too.

    Their exceptions do not reach this process, only that there was one. Returns the file that
    VLLM_LOGGING_CONFIG_PATH wants; `read_errors(folder)` reads the other one.
    """
    handlers = {
        "stderr": {"class": "logging.StreamHandler", "formatter": "line"},
        "file": {
            "class": "logging.FileHandler",
            "formatter": "line",
            "level": "ERROR",
            "filename": str(folder / "errors.log"),
            "delay": True,
        },
    }
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(levelname)s %(processName)s %(message)s"}},
        "handlers": handlers,
        "loggers": {"vllm": {"handlers": [*handlers], "level": level, "propagate": False}},
    }
    path = folder / "logging.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def read_errors(folder: Path) -> str:
    """What the engine's own processes logged as errors."""
    path = folder / "errors.log"
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
