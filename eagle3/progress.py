"""What a long step shows: a bar on a terminal, JSON lines elsewhere, and an object for status.

Stage pods have no API token, so each process overwrites `progress/<stage>-<index>.json` in the
run's store, at most every ten seconds: that object is what a status command reads.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import TracebackType

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

from eagle3 import strict_json
from eagle3.errors import Eagle3Error
from eagle3.store import Store

_EVERY_SECONDS = 10.0
# A process that loads an engine, or hangs, reports nothing; a unit of work takes less.
SILENT_SECONDS = 300.0


def host_name() -> str:
    """The machine that this process runs on: in a pod the node, by the variable that names it."""
    return os.environ.get("NODE_NAME") or socket.gethostname()


class ProgressRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How far one process of a stage is: `rate` in units a second, `seconds_left` an estimate."""

    stage: str
    index: int
    step: str
    unit: str
    done: int
    all: int
    rate: float
    seconds_left: float | None
    host: str
    updated_at: float


def read_progress(store: Store, stage: str) -> list[ProgressRecord]:
    """What the processes of a stage reported last, by index; a damaged report is passed over."""
    found: list[ProgressRecord] = []
    for info in store.list("progress"):
        if info.path.startswith(f"progress/{stage}-"):
            with contextlib.suppress(msgspec.DecodeError, FileNotFoundError):
                record = strict_json.decode(store.read_bytes(info.path), ProgressRecord)
                found.append(record)
    return sorted(found, key=lambda record: record.index)


def in_words(records: Sequence[ProgressRecord], began: Mapping[int, float], now: float) -> str:
    """The reports of a stage's processes as one line, or an empty text where there is nothing.

    Each of several workers counts what the others have finished too, so that the furthest one
    tells how far the stage is, while their rates add up. A report outlives its process: the rate
    is of those alone that live and reported lately.

    Args:
        records: of every worker that ever was.
        began: worker -> when its living process began, in seconds since 1970.
        now: in seconds since 1970.
    """
    own = [r for r in records if r.index in began and r.updated_at >= began[r.index]]
    fresh = [record for record in own if now - record.updated_at <= SILENT_SECONDS]
    silence = _silence(own, began, now)
    if not records:
        return silence
    furthest = max(fresh or own or records, key=lambda record: record.updated_at)
    share = furthest.done / furthest.all if furthest.all else 1.0
    text = f"{furthest.step} {furthest.done} of {furthest.all} {furthest.unit} ({share:.0%})"
    rate = sum(record.rate for record in fresh if record.step == furthest.step)
    if began and not own:
        text += " by an earlier pod"
    if rate and furthest.done < furthest.all:
        left = timedelta(seconds=round((furthest.all - furthest.done) / rate))
        text += f", {rate:.1f} {furthest.unit}/s, {left} left"
    return f"{text}; {silence}" if silence else text


def _silence(own: Sequence[ProgressRecord], began: Mapping[int, float], now: float) -> str:
    """Which living processes have not reported for long, and for how long."""
    last = dict(began)
    for record in own:
        last[record.index] = max(last[record.index], record.updated_at)
    ages = [now - heard for heard in last.values() if now - heard > SILENT_SECONDS]
    if not ages:
        return ""
    who = "nothing heard" if len(began) == 1 else f"nothing heard of {len(ages)} of {len(began)}"
    return f"{who} for {timedelta(seconds=round(max(ages)))}"


class Progress:
    """A long step of a stage, as a context manager.

    >>> with Progress(store, "extract", "capture", total=12, unit="rows") as progress:
    ...     progress.advance(4)

    Args:
        store: the run's store, for the progress object.
        stage: the stage's name.
        step: what is being done, one or two words.
        total: how many units in all; those already done are given to `advance` with `resumed`.
        unit: what is counted.
        index: which worker of the stage this is.
    """

    def __init__(
        self, store: Store, stage: str, step: str, *, total: int, unit: str, index: int = 0
    ) -> None:
        self._store = store
        self._path = f"progress/{stage}-{index}.json"
        self._stage, self._step, self._unit, self._index = stage, step, unit, index
        self._total, self._done, self._fresh, self._under_way = total, 0, 0, 0
        self._started = time.monotonic()
        self._reported = self._started
        self._note = ""
        self._bars: Bars | None = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            self._bars = Bars(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=Console(stderr=True),
            )
            self._bars.start()
            self._task = self._bars.add_task(
                f"{self._stage} {self._step}", total=self._total, rate="", note=""
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars is not None:
            self._under_way = 0
            self._show()
            self._bars.stop()
        if kind is None:
            self._report()

    @property
    def done(self) -> int:
        """Units counted so far."""
        return self._done

    def advance(self, count: int = 1, *, resumed: bool = False, note: str = "") -> None:
        """Count units as done; `resumed` ones, done by an earlier process, count in no rate.

        What `under_way` showed is over with that: done by now, or given up.
        """
        self._done += count
        self._fresh += 0 if resumed else count
        self._under_way = 0
        self._note = note or self._note
        self._moved()

    def under_way(self, count: int) -> None:
        """Show so many units as done that are finished only with others, and not counted yet."""
        self._under_way = count
        self._moved()

    def _moved(self) -> None:
        self._show()
        if time.monotonic() - self._reported >= _EVERY_SECONDS:
            self._report()

    def _show(self) -> None:
        if self._bars is not None:
            self._bars.update(
                self._task,
                completed=self._done + self._under_way,
                rate=f"{self._rate():.1f} {self._unit}/s",
                note=self._note,
            )

    def _rate(self) -> float:
        return (self._fresh + self._under_way) / max(time.monotonic() - self._started, 1e-9)

    def _report(self) -> None:
        self._reported = time.monotonic()
        rate, done = self._rate(), self._done + self._under_way
        record = ProgressRecord(
            stage=self._stage,
            index=self._index,
            step=self._step,
            unit=self._unit,
            done=done,
            all=self._total,
            rate=round(rate, 3),
            seconds_left=round((self._total - done) / rate, 1) if rate else None,
            host=host_name(),
            updated_at=round(time.time(), 3),
        )
        line = msgspec.json.encode(record)
        # What is only shown must not end what is being done: the next report tries again.
        with contextlib.suppress(Eagle3Error):
            self._store.write_bytes(self._path, line)
        if self._bars is None:
            print(line.decode(), file=sys.stderr, flush=True)
