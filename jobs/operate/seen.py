"""How a run in a cluster stands: a row for each stage and for its runner."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from eagle3 import artifact as artifacts
from eagle3.artifact import Artifact
from eagle3.cluster import ANNOTATIONS, Cluster, Object
from eagle3.diagnosis import Diagnosis, diagnose, job_state
from eagle3.errors import (
    ConfigError,
    Eagle3Error,
    EnvironmentMisconfigured,
    ManifestInvalid,
    PermissionRefused,
    ServiceUnavailable,
    TemporaryFailure,
)
from eagle3.ordering import JobRecords, JobState
from eagle3.progress import read_progress
from eagle3.stages import Stage
from eagle3.store import open_store
from eagle3.store.urls import hasty
from jobs.installed import InstalledRun
from jobs.patience import is_cancelled
from jobs.process import input_urls

RUNNER = "runner"
# What a laptop finds where it cannot use the run's store: TemporaryFailure without credentials.
NO_STORE = (
    ServiceUnavailable,
    TemporaryFailure,
    PermissionRefused,
    EnvironmentMisconfigured,
    ConfigError,
)


@dataclass(frozen=True, kw_only=True)
class StageStatus:
    """A stage of a run or its runner, as `eagle3 status` shows it.

    Attributes:
        state: one word: waiting, suspended, pending, starting, running, complete, failed, gone,
            committed, or unknown; of a runner also none.
        pods: how many of its Job's pods run, of how many, and where.
        restarts: pods of its Job that failed so far.
        what: its progress, what failed before, what is in its way, a line each; or what it
            committed.
    """

    stage: str
    state: str
    pods: str = ""
    restarts: int = 0
    what: str = ""


@dataclass(kw_only=True)
class _Look:
    """One look at a run: what holds for all its stages."""

    run: InstalledRun
    cluster: Cluster
    warnings: Sequence[Object]
    now: float = field(default_factory=time.time)
    # Why the store cannot be used from here: it is asked once, and not for each stage.
    away: Eagle3Error | None = None


def status(run: InstalledRun, cluster: Cluster) -> list[StageStatus]:
    """How each stage of a run stands, in order, and its runner. Raises as `Cluster`.

    Where the store cannot be reached from here, Jobs and their annotations tell what they can.
    """
    look = _Look(run=run, cluster=cluster, warnings=cluster.warnings())
    with hasty():
        found = [_stage(look, stage) for stage in run.stages]
    return [*found, _runner(look, found)]


def show(run: InstalledRun, found: Sequence[StageStatus], console: Console) -> None:
    """Print a run's status as a table."""
    console.print(f"run {run.name}, store {run.store.url}", highlight=False, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("stage", "state", "pods", "restarts", "what"):
        table.add_column(heading, no_wrap=heading != "what", overflow="fold")
    for row in found:
        table.add_row(row.stage, row.state, row.pods, str(row.restarts or ""), row.what)
    console.print(table)


def committed(run: InstalledRun, stage: Stage) -> Artifact | None:
    """The last artefact of a stage, where all of them are committed."""
    found = [artifacts.find(run.store.child(kind)) for kind in stage.writes]
    return found[-1] if all(found) else None


def _stage(look: _Look, stage: Stage) -> StageStatus:
    name = look.run.job_name(stage.name)
    job = look.cluster.job(name)
    seen = diagnose(job, look.cluster.pods(name), look.warnings, look.now) if job else None
    if look.away is None:
        try:
            return _with_store(look, stage, job, seen)
        except ManifestInvalid as error:
            return StageStatus(stage=stage.name, state="failed", what=str(error))
        except NO_STORE as error:
            look.away = error
    if job is None or seen is None:
        what = f"the store cannot be used from here: {look.away.found}"
        return StageStatus(stage=stage.name, state="unknown", what=what)
    what = "\n".join(seen.told(None, look.now)) or _noted(job)
    return _of_job(stage.name, job, seen, what)


def _with_store(
    look: _Look, stage: Stage, job: Object | None, seen: Diagnosis | None
) -> StageStatus:
    run = look.run
    artifact = committed(run, stage)
    if artifact is not None:
        samples = artifact.manifest.total_samples
        what = artifact.digest[:12] + (f", {samples} samples" if samples else "")
        restarts = seen.restarts if seen else 0
        return StageStatus(stage=stage.name, state="committed", restarts=restarts, what=what)
    if job is None or seen is None:
        records = JobRecords(run.store, stage)
        if records.made() is not None:
            return StageStatus(stage=stage.name, state="gone", what=str(records.vanished()))
        urls = input_urls(run.config, run.store, stage).values()
        missing = [url for url in urls if artifacts.find(open_store(url)) is None]
        what = ", ".join(f"{url.rpartition('/')[2]} is not committed" for url in missing)
        return StageStatus(stage=stage.name, state="waiting", what=what)
    reports = read_progress(run.store, stage.name) if seen.state == "running" else None
    return _of_job(stage.name, job, seen, "\n".join(seen.told(reports, look.now)))


def _runner(look: _Look, stages: Sequence[StageStatus]) -> StageStatus:
    """The row of the runner, without which no stage begins."""
    name, run = f"{look.run.name}-{RUNNER}", look.run
    job = look.cluster.job(name)
    done = all(row.state == "committed" for row in stages)
    if job is None:
        what = "" if done else f"nothing begins a stage; `eagle3 submit {run.name}` does from here"
        return StageStatus(stage=RUNNER, state="none", what=what)
    seen = diagnose(job, look.cluster.pods(name), look.warnings, look.now)
    said = seen.told(None, look.now)
    if seen.state == "running" and (noted := _noted(job)):
        said.append(f"goes on when it can: {noted}")
    if job_state(job) is JobState.FAILED and not done:
        goes_on = f"`eagle3 retry STAGE --run {run.name}` starts it again"
        said.append(f"no stage begins any more; {goes_on}")
    # What only waits for its queue says so itself.
    cancelled = is_cancelled(job)
    if cancelled or (seen.state == "suspended" and not seen.why):
        goes_on = f"`eagle3 retry STAGE --run {run.name}` or `eagle3 submit {run.name}` goes on"
        said = [f"{'cancelled' if cancelled else 'suspended'}: no stage begins; {goes_on}"]
    return _of_job(RUNNER, job, seen, "\n".join(said))


def _noted(job: Object) -> str:
    """What its orderer last noted on a Job."""
    return str(job["metadata"].get("annotations", {}).get(f"{ANNOTATIONS}/progress", ""))


def _of_job(name: str, job: Object, seen: Diagnosis, what: str) -> StageStatus:
    running = job.get("status", {}).get("active", 0)
    wanted = job["spec"].get("parallelism", 1)
    where = f" on {', '.join(seen.nodes)}" if seen.nodes else ""
    pods = f"{running} of {wanted}{where}" if job_state(job) is JobState.ACTIVE else ""
    return StageStatus(stage=name, state=seen.state, pods=pods, restarts=seen.restarts, what=what)
