"""What a person does to a run in a cluster: look at it, give a stage more workers, try one again.

A run is named by its ConfigMap, as `kubectl get configmaps -l app.kubernetes.io/name=eagle3` shows
it. Everything works from a laptop with a kubeconfig; where the laptop cannot reach the run's
store, status says what the Jobs alone tell.
"""

from __future__ import annotations

from eagle3.cluster import Cluster, Object
from eagle3.diagnosis import job_state
from eagle3.errors import ConfigError, UpstreamMissing
from eagle3.ordering import JobRecords, JobState
from eagle3.stages import stage_named
from jobs.installed import InstalledRun
from jobs.operate.seen import RUNNER, StageStatus, committed, show, status

__all__ = ["StageStatus", "restart_runner", "retry", "scale", "show", "status"]


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
    done = committed(run, stage_named(stage))
    if done or job_state(job) is JobState.ACTIVE:
        raise ConfigError(
            f"retry {stage}",
            wanted="a stage that has failed, or whose Job is gone",
            found="a committed artefact" if done else f"job {name}, still at work",
            remedy="leave it" if done else f"delete it first: kubectl delete job {name}",
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
    name = f"{run.name}-{RUNNER}"
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
