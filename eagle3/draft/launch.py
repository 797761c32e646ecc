"""Several processes on one node, one per GPU, whose exit code is kept.

`torchrun` on the command line ends with 1 whatever its processes ended with, and a Job's failure
policy would take wrong data for a fault worth trying again. So the same launcher is called here,
and the first failure's code is handed on.
"""

from __future__ import annotations

import math
import signal
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from eagle3.errors import (
    ConfigError,
    DataInvalid,
    EnvironmentMisconfigured,
    PermissionRefused,
    Stopped,
    TemporaryFailure,
    UpstreamMissing,
)

_FINAL = tuple(
    kind.exit_code
    for kind in (
        ConfigError,
        DataInvalid,
        UpstreamMissing,
        PermissionRefused,
        EnvironmentMisconfigured,
    )
)
# A collective whose peer is away aborts, so that SIGABRT tells nothing.
_CRASHES = (signal.SIGKILL, signal.SIGBUS, signal.SIGSEGV, signal.SIGILL, signal.SIGFPE)
# What one look of the launcher's, at whole seconds, may differ by.
_SECOND = 1


def num_processes(wanted: int | None) -> int:
    """Processes to train with: as many as the configuration says, else one per GPU, else one."""
    return wanted or max(torch.accelerator.device_count(), 1)


def launch(processes: int, arguments: Sequence[str], records: Path | None = None) -> int:
    """Run this Python so many times with these arguments, and wait for all.

    Each is told its RANK, LOCAL_RANK and WORLD_SIZE. SIGTERM is passed on, with as many seconds to
    save as TORCH_ELASTIC_SHUTDOWN_TIMEOUT says (30). Where one fails the others are ended.

    Args:
        records: a folder in which each process leaves its last words as `<rank>.json`; those of
            the first that failed, where there are any, are `first.json` there afterwards.

    Returns 0, or the exit code of the first that failed.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        # The launcher binds the port itself, so that nobody else can take it in between.
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        rank, first = _first_of(error, records)
        _keep(records, rank)
        # A negative code is a signal's number: killed, by the kernel for want of memory or so.
        return first.exitcode if first.exitcode > 0 else TemporaryFailure.exit_code
    except SignalException as error:
        _keep(records, 0)
        return Stopped.exit_code if error.sigval == signal.SIGTERM else 128 + error.sigval
    return 0


def _first_of(error: ChildFailedError, records: Path | None) -> tuple[int, ProcessFailure]:
    """The process that failed by itself, not of another's being away or by the launcher's hand.

    At the first failure the launcher ends the others, and their codes stand beside that one's: by
    SIGTERM, and by SIGKILL those that wait in a collective, half a minute later. What no retry
    can help is nobody else's fault, and so is a crash that was seen at once; it leaves no record
    and is the cause of those that others leave. Else the earliest record tells, since the
    launcher's own clock has seconds.
    """
    early = min(found.timestamp for found in error.failures.values()) + _SECOND
    by_themselves = {
        rank: found
        for rank, found in error.failures.items()
        if found.exitcode not in (Stopped.exit_code, -signal.SIGTERM)
        and (found.exitcode != -signal.SIGKILL or found.timestamp <= early)
    } or error.failures
    final = {rank for rank, found in by_themselves.items() if found.exitcode in _FINAL}
    crashed = {
        rank
        for rank, found in by_themselves.items()
        if -found.exitcode in _CRASHES and found.timestamp <= early
    }

    def when(rank: int) -> tuple[float, int]:
        file = records / f"{rank}.json" if records else None
        told = file.stat().st_mtime_ns if file and file.is_file() else math.inf
        return told, by_themselves[rank].timestamp

    rank = min(final or crashed or by_themselves, key=when)
    return rank, by_themselves[rank]


def _keep(records: Path | None, rank: int) -> None:
    if records is not None and (file := records / f"{rank}.json").is_file():
        file.rename(records / "first.json")
