"""What vLLM takes from its surroundings when it starts, and what it may say to a person.

Its errors are shown, and so is what nobody expected; how its start comes along is not.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from vllm import envs
from vllm.platforms import current_platform

from eagle3.vllm_capture.seams import let_llvmlite_be_looked_at


def environment_of(
    separate_process: bool, *, num_threads: int | None, mla_off: bool
) -> dict[str, str]:
    """What vLLM reads at its start from the environment only, and its processes inherit.

    Threads: left alone, vLLM keeps one core free for its scheduler process, or two where
    states are captured, unless that would leave none: on two cores a plain engine then computes
    on one and a capturing one on both. It also pins to cores, so that two engines share the
    same. Here every engine gets the threads that were asked for, else those that its surroundings
    ask for by OMP_NUM_THREADS, else one for each CPU that it may use; and it is not pinned.
    """
    wanted = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if separate_process else "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Read when torch is loaded: in processes of the engine's own.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if current_platform.is_cpu():
        threads = num_threads or _threads_of_surroundings() or len(os.sched_getaffinity(0))
        wanted["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        wanted["OMP_NUM_THREADS"] = str(threads)
        wanted["VLLM_MLA_DISABLE"] = "1" if mla_off else "0"
    return wanted


def _threads_of_surroundings() -> int | None:
    """OMP_NUM_THREADS, by which a pod says how much of its node is its own; None without it."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() else None


@contextmanager
def set_for_now(wanted: Mapping[str, str]) -> Iterator[None]:
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


@contextmanager
def expected_warnings() -> Iterator[None]:
    """Upstream's own: a CPU worker looks at everything in every module, torch's deprecated
    objects too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.distributed.reduce_op` is deprecated")
        yield
