"""The names of upstream that are replaced while it trains, all of them here.

On every machine: the trainer's class by ours, which extends it; its progress bar, since ours
shows the whole training; its console log. Without an accelerator also the four places that take
one for granted. With one, everything of upstream's that computes runs untouched.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed
from loguru import logger as loguru_logger
from speculators.train import checkpointer, cli, distributed, trainer
from transformers.utils import logging as transformers_logging

T = TypeVar("T")


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Give an attribute another value for a while. AttributeError where it does not exist."""
    standing = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, standing)


@contextlib.contextmanager
def upstream_seams(make_trainer: Callable[..., trainer.Trainer]) -> Iterator[None]:
    """Upstream's training with our trainer in it, quiet, and able to run without a GPU."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_quiet())
        stack.enter_context(replaced(cli, "Trainer", make_trainer))
        stack.enter_context(replaced(trainer, "tqdm", _no_bar))
        if not torch.accelerator.is_available():
            for owner, name, value in (
                (torch.accelerator, "synchronize", _no_device),
                (trainer, "get_local_rank", _cpu),
                (checkpointer, "get_current_device", _cpu),
                (cli, "maybe_setup_distributed", _setup_on_cpus),
            ):
                stack.enter_context(replaced(owner, name, value))
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Warnings of upstream on standard error, one line each; its information nowhere.

    Upstream configures the root logger only where nobody has, so a handler of ours comes first.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("train: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    loguru_logger.disable("speculators")
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            # Asked for by upstream whether or not there is memory to pin.
            warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true")
            # Upstream's way to train in float32 without an accelerator.
            warnings.filterwarnings("ignore", message="In CPU autocast")
            yield
    finally:
        root.removeHandler(handler)
        loguru_logger.enable("speculators")
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def _no_bar(iterable: Iterable[T], **_: object) -> Iterable[T]:
    return iterable


def _no_device(*_: object) -> None:
    """There is nothing to wait for."""


def _cpu() -> str:
    return "cpu"


def _setup_on_cpus(sp_size: int = 1) -> None:
    """Upstream's set-up of several processes, with gloo, for machines without an accelerator."""
    if "LOCAL_RANK" not in os.environ:
        return
    torch.distributed.init_process_group("gloo")
    distributed._is_distributed = True
    distributed._local_rank = int(os.environ["LOCAL_RANK"])
    distributed._rank = torch.distributed.get_rank()
    distributed._world_size = torch.distributed.get_world_size()
    distributed._init_sp_process_groups(distributed._rank, distributed._world_size, sp_size)
