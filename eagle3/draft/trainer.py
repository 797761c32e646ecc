"""Upstream's trainer, told where to save and when to stop.

It computes nothing of its own. It hands each metric record, each finished step and each finished
checkpoint to a `Watch`. SIGTERM, which upstream turns into an exception in the middle of whatever
is going on and saves where no restart looks, becomes a checkpoint at the end of the step.
"""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed
from speculators.train import cli
from speculators.train.config import TrainConfig as UpstreamConfig
from speculators.train.trainer import Trainer

from eagle3.draft.checkpoints import UNTRAINED
from eagle3.draft.seams import upstream_seams
from eagle3.errors import DraftInvalid, Stopped

METRICS_LOGGER = "speculators.metrics"


class Watch(Protocol):
    """What a training tells while it runs. An exception from any of these ends it."""

    def began(self, step: int) -> None:
        """The training starts, or goes on, after so many steps."""

    def metrics(self, record: Mapping[str, Any], step: int) -> None:
        """A metric record, when `step` steps were finished."""

    def stepped(self, step: int) -> None:
        """So many steps are finished."""

    def saved(self, folder: Path) -> None:
        """A checkpoint, or the untrained draft, lies whole in a local folder (first rank only)."""

    def owes_validation(self, epoch: int) -> bool:
        """Whether the process before ended after this epoch's checkpoint and left this out."""

    def validated(self) -> None:
        """The validation of the last saved epoch is done (first rank only)."""

    def stop_requested(self) -> bool:
        """Whether to save and stop at this step's end."""


def train(config: UpstreamConfig, watch: Watch) -> None:
    """Run upstream's training to its end. Raises Stopped when the watch asked it to stop.

    Whatever the watch or the loader raises passes through.
    """
    with upstream_seams(partial(WatchedTrainer, watch=watch)):
        cli.main(config)


class WatchedTrainer(Trainer):  # type: ignore[misc]
    """Upstream's `Trainer` with a watch."""

    def __init__(self, *args: Any, watch: Watch, **kwargs: Any) -> None:
        """Args: watch: told of everything; the others are upstream's."""
        self._watch = watch
        self._handlers = {
            number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)
        }
        super().__init__(*args, **kwargs)
        if not torch.accelerator.is_available():
            self.device_type = "cpu"

    def run_training(self) -> None:
        """Train; before the first step of all, save the draft as it is.

        Upstream validates after an epoch's checkpoint, and going on from that one it would leave
        the validation out: it is done first here.
        """
        self._watch.began(self.global_step)
        if self.global_step == 0:
            self.checkpointer.save_checkpoint(self.model, self.optimizers, UNTRAINED)
            self._tell_saved(UNTRAINED)
        with self._metrics_told():
            if self._watch.owes_validation(self.current_epoch - 1):
                self.val_epoch(self.current_epoch - 1)
                if self.is_distributed:
                    # The others look for the newest checkpoint when the first has written it.
                    torch.distributed.barrier()
            super().run_training()

    def train_epoch(self, epoch: int, *, step_callback: Callable[[], None] | None = None) -> None:
        """One epoch, with our own callback after each step."""
        # Upstream has put its own handlers in place, which raise in the middle of a step.
        for number, handler in self._handlers.items():
            if handler is not None:
                signal.signal(number, handler)
        began = self.global_step - self._resume_local_step

        def after_step() -> None:
            if step_callback is not None:
                step_callback()
            self._after_step(epoch, self.global_step - began)

        super().train_epoch(epoch, step_callback=after_step)

    def val_epoch(self, epoch: int) -> dict[str, float] | None:
        """Validation; left out when asked to stop, for the epoch's checkpoint is saved."""
        if not self._at_the_end() and self._agreed_to_stop():
            raise Stopped("train")
        found: dict[str, float] | None = super().val_epoch(epoch)
        if self.rank == 0:
            self._watch.validated()
        return found

    def maybe_save_checkpoint(self, epoch: int | str, local_step: int = 0) -> None:
        """Save as upstream does, then tell."""
        super().maybe_save_checkpoint(epoch, local_step)
        if isinstance(epoch, int):
            self._tell_saved(str(epoch))

    def _after_step(self, epoch: int, local_step: int) -> None:
        if not self.model.training:
            raise DraftInvalid(
                f"train: step {self.global_step}",
                wanted="a model that is being trained",
                found="one set to evaluation, as a validation leaves it",
                remedy="install the version of speculators that eagle3 pins",
            )
        self._watch.stepped(self.global_step)
        if not self._at_the_end() and self._agreed_to_stop():
            self.maybe_save_checkpoint(epoch, local_step=local_step)
            raise Stopped("train")

    def _at_the_end(self) -> bool:
        return bool(self.global_step >= self.config.max_steps)

    def _agreed_to_stop(self) -> bool:
        """Whether any process was asked to: all must leave at the same step, or the rest hang."""
        asked = self._watch.stop_requested()
        if not self.is_distributed:
            return asked
        vote = torch.tensor(float(asked), device=self.local_rank)
        torch.distributed.all_reduce(vote, op=torch.distributed.ReduceOp.MAX)
        return bool(vote.item())

    def _tell_saved(self, name: str) -> None:
        if self.rank == 0:
            self._watch.saved(self.checkpointer.path / name)

    @contextlib.contextmanager
    def _metrics_told(self) -> Iterator[None]:
        """Hand upstream's metric records to the watch instead of the console."""
        logger = logging.getLogger(METRICS_LOGGER)
        listener = _Listener(lambda record: self._watch.metrics(record, self.global_step))
        propagate, logger.propagate = logger.propagate, False
        logger.addHandler(listener)
        try:
            yield
        finally:
            logger.removeHandler(listener)
            logger.propagate = propagate


class _Listener(logging.Handler):
    """Passes records that are mappings on; what the receiver raises ends the training."""

    def __init__(self, receive: Callable[[Mapping[str, Any]], None]) -> None:
        super().__init__(logging.INFO)
        self._receive = receive

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.msg, Mapping):
            self._receive(record.msg)
