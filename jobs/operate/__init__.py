"""What a person does to a run in a cluster: look at it, give a stage more workers, try one again.

A run is named by its ConfigMap, as `kubectl get configmaps -l app.kubernetes.io/name=eagle3` shows
it. Everything works from a laptop with a kubeconfig; where the laptop cannot reach the run's
store, status says what the Jobs alone tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from eagle3 import artifact as artifacts
from eagle3.artifact import Artifact
from eagle3.cluster import ANNOTATIONS, Cluster, Object
from eagle3.diagnosis import Diagnosis, diagnose, job_state
from eagle3.errors import (
    ConfigError,
    EnvironmentMisconfigured,
    ManifestInvalid,
    PermissionRefused,
    ServiceUnavailable,
    UpstreamMissing,
)
from eagle3.ordering import JobRecords, JobState
from eagle3.progress import in_words, read_progress
from eagle3.stages import Stage, stage_named
from eagle3.store import open_store
from jobs.installed import InstalledRun
from jobs.process import input_urls


@dataclass(frozen=True, kw_only=True)
class StageStatus:
    """A stage of a run or its runner, as `eagle3 status` shows it.

    Attributes:
        state: one word: waiting, suspended, pending, starting, running, complete, failed, gone,
            committed, or unknown.
        pods: how many of its Job's pods run, of how many, and where.
        what: its progress, what is in its way, or what it committed.
    """

    stage: str
    state: str
    pods: str = ""
    what: str = ""


def status(run: InstalledRun, cluster: Cluster) -> list[StageStatus]:
    """How each stage of a run stands, in order, and its runner. Raises as `Cluster`.

    Where the store cannot be reached from here, Jobs and their annotations tell what they can.
    """
    warnings, found = cluster.warnings(), []
    for stage in run.stages:
        name = run.job_name(stage.name)
        job = cluster.job(name)
        pods = cluster.pods(name) if job else []
        seen = diagnose(job, pods, warnings) if job else None
        try:
            found.append(_status_of(stage, run, job, seen))
        except ManifestInvalid as error:
            found.append(StageStatus(stage=stage.name, state="failed", what=str(error)))
        except (ServiceUnavailable, PermissionRefused, EnvironmentMisconfigured, ConfigError):
            found.append(_status_without_store(stage, job, seen))
    found.extend(_status_of_runner(run, cluster, warnings))
    return found


def scale(run: InstalledRun, cluster: Cluster, stage: str, workers: int) -> str:
    """Give an indexed stage's running Job so many workers, and return what was done in words.

    Raises ConfigError for a stage whose work is not shared out, UpstreamMissing for one without a
    Job, or whose Job has ended.
    """
    if not stage_named(stage).indexed:
        raise ConfigError(
            f"scale {stage}",
            wanted="a stage whose work is shared out: regenerate or extract",
            found=stage,
            remedy="leave it at one pod",
        )
    name = run.job_name(stage)
    job = cluster.job(name)
    if job is None or job_state(job) is not JobState.ACTIVE:
        raise UpstreamMissing(
            f"job {name}",
            wanted="a running one",
            found="none" if job is None else f"one that is {job_state(job).value}",
            remedy=f"set stages.{stage}.workers in the values of the next run",
        )
    before = job["spec"]["parallelism"]
    # The API refuses to let more indexes fail than there are.
    wanted = {"parallelism": workers, "completions": workers, "maxFailedIndexes": workers}
    cluster.patch_job(name, {"spec": wanted})
    return f"{stage}: {before} -> {workers} workers"


def retry(run: InstalledRun, cluster: Cluster, stage: str) -> str:
    """Let a stage be tried again: its ended Job and the records of it go, its work stays.

    Raises ConfigError while its Job is at work or its artefact is committed, TemporaryFailure
    where the old Job does not go.
    """
    name = run.job_name(stage)
    job = cluster.job(name)
    committed = _committed(run, stage_named(stage))
    if committed or job_state(job) is JobState.ACTIVE:
        raise ConfigError(
            f"retry {stage}",
            wanted="a stage that has failed, or whose Job is gone",
            found="a committed artefact" if committed else f"job {name}, still at work",
            remedy="leave it" if committed else f"delete it first: kubectl delete job {name}",
        )
    if job is not None:
        cluster.delete_job(job)
        # An orderer that looks meanwhile must not take the old Job for the new one.
        cluster.wait_until_gone(job)
    JobRecords(run.store, stage_named(stage)).forget()
    return f"{stage}: may be tried again"


def restart_runner(run: InstalledRun, cluster: Cluster) -> str:
    """Replace the run's runner, where it has ended, by another of the same body.

    Returns what was done in words; a runner that is still there goes on by itself.
    """
    name = f"{run.name}-runner"
    job = cluster.job(name)
    if job is None:
        return "runner: none in the cluster; `eagle3 submit` orders the run from here"
    if job_state(job) is JobState.ACTIVE:
        return "runner: at work"
    body = _as_created(job)
    cluster.delete_job(job)
    cluster.wait_until_gone(job)
    cluster.create_job(body)
    return "runner: started again"


def show(run: InstalledRun, found: Sequence[StageStatus], console: Console) -> None:
    """Print a run's status as a table."""
    console.print(f"run {run.name}, store {run.store.url}", highlight=False, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in ("stage", "state", "pods", "what"):
        table.add_column(heading, no_wrap=heading != "what", overflow="fold")
    for row in found:
        table.add_row(row.stage, row.state, row.pods, row.what)
    console.print(table)


def _status_of_runner(
    run: InstalledRun, cluster: Cluster, warnings: Sequence[Object]
) -> list[StageStatus]:
    """The row of the runner, without which no stage begins; none where the run has none here."""
    name = f"{run.name}-runner"
    job = cluster.job(name)
    if job is None:
        return []
    seen = diagnose(job, cluster.pods(name), warnings)
    pods = _pods_in_words(job, seen.nodes) if job_state(job) is JobState.ACTIVE else ""
    return [StageStatus(stage="runner", state=seen.state, pods=pods, what=seen.sentence)]


def _status_of(
    stage: Stage, run: InstalledRun, job: Object | None, seen: Diagnosis | None
) -> StageStatus:
    artifact = _committed(run, stage)
    if artifact is not None:
        samples = artifact.manifest.total_samples
        what = artifact.digest[:12] + (f", {samples} samples" if samples else "")
        return StageStatus(stage=stage.name, state="committed", what=what)
    if job is None or seen is None:
        records = JobRecords(run.store, stage)
        if records.made() is not None:
            return StageStatus(stage=stage.name, state="gone", what=str(records.vanished()))
        urls = input_urls(run.config, run.store, stage).values()
        missing = [url for url in urls if artifacts.find(open_store(url)) is None]
        what = ", ".join(f"{url.rpartition('/')[2]} is not committed" for url in missing)
        return StageStatus(stage=stage.name, state="waiting", what=what)
    progress = in_words(read_progress(run.store, stage.name)) if seen.state == "running" else ""
    return StageStatus(
        stage=stage.name,
        state=seen.state,
        pods=_pods_in_words(job, seen.nodes),
        what=seen.sentence or progress,
    )


def _status_without_store(stage: Stage, job: Object | None, seen: Diagnosis | None) -> StageStatus:
    if job is None or seen is None:
        return StageStatus(stage=stage.name, state="unknown", what="the store cannot be reached")
    noted = job["metadata"].get("annotations", {}).get(f"{ANNOTATIONS}/progress", "")
    return StageStatus(
        stage=stage.name,
        state=seen.state,
        pods=_pods_in_words(job, seen.nodes),
        what=seen.sentence or noted,
    )


def _committed(run: InstalledRun, stage: Stage) -> Artifact | None:
    found = [artifacts.find(run.store.child(kind)) for kind in stage.writes]
    return found[-1] if all(found) else None


def _pods_in_words(job: Object, nodes: Sequence[str]) -> str:
    running = job.get("status", {}).get("active", 0)
    wanted = job["spec"].get("parallelism", 1)
    where = f" on {', '.join(nodes)}" if nodes else ""
    return f"{running} of {wanted}{where}"


def _as_created(job: Object) -> Object:
    """A Job's body without what the API server added to it."""
    metadata, spec = job["metadata"], job["spec"]
    kept = {
        key: metadata[key]
        for key in ("name", "labels", "annotations", "ownerReferences")
        if key in metadata
    }
    template = spec["template"]
    added = ("batch.kubernetes.io/", "controller-uid", "job-name")
    labels = {
        key: value
        for key, value in template["metadata"].get("labels", {}).items()
        if not key.startswith(added)
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            **kept,
            "labels": {k: v for k, v in kept.get("labels", {}).items() if not k.startswith(added)},
        },
        "spec": {
            **{key: value for key, value in spec.items() if key != "selector"},
            "template": {
                **template,
                "metadata": {**template["metadata"], "labels": labels},
            },
        },
    }
