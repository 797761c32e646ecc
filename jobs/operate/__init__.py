"""What a person does to a run in a cluster: look at it, stop it, scale a stage, try one again.

A run is named by its ConfigMap, as `kubectl get configmaps -l app.kubernetes.io/name=eagle3` shows
it. Everything works from a laptop with a kubeconfig; where the laptop cannot reach the run's
store, status says what the Jobs alone tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from eagle3.cluster import ANNOTATIONS, CANCELLED, Cluster, Object
from eagle3.diagnosis import is_queued, job_state
from eagle3.diagnosis.objects import condition_of, phase_of
from eagle3.errors import ConfigError, EnvironmentMisconfigured, UpstreamMissing
from eagle3.ordering import JobRecords, JobState
from eagle3.stages import stage_named
from eagle3.store.urls import hasty
from jobs.installed import InstalledRun
from jobs.operate.following import logs
from jobs.operate.seen import NO_STORE, RUNNER, StageStatus, committed, show, status
from jobs.patience import is_cancelled

__all__ = ["StageStatus", "cancel", "logs", "restart_runner", "retry", "scale", "show", "status"]

# Seconds that a pod may take beyond its grace.
_PATIENCE = 60.0
# Seconds in which the Job controller says what a pod's end means for its Job.
_SETTLING = 15.0


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
    where the old Job does not go, EnvironmentMisconfigured where the store that is seen from here
    knows nothing of the Job that stands.
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
    records = JobRecords(run.store, stage_named(stage))
    if job is not None:
        # The same URL is another store where another endpoint or other keys are used.
        if not records.known():
            raise EnvironmentMisconfigured(
                f"retry {stage}: {run.store.url}",
                wanted=f"the record of job {name}, which whoever made it left there",
                found="none",
                remedy="use the run's own AWS_ENDPOINT_URL and credentials; nothing was deleted",
            )
        # An orderer that looks meanwhile must not take the Job for one that vanished.
        records.cancel()
        cluster.delete_job(job)
        # Nor the old Job for the new one.
        cluster.wait_until_gone(job)
    elif not records.known():
        # No Job tells whether this is the run's own store: a stage that never began, or another.
        return (
            f"{stage}: no Job stands, none is recorded in {run.store.url}, nothing was changed; "
            "if it had begun, use the run's own AWS_ENDPOINT_URL and credentials"
        )
    records.forget()
    return f"{stage}: may be tried again"


def restart_runner(run: InstalledRun, cluster: Cluster) -> str:
    """Replace the run's runner, where it has ended, by another of the same body.

    Returns what was done in words; a runner that is still there goes on by itself.
    """
    name = f"{run.name}-{RUNNER}"
    job = cluster.job(name)
    if job is None:
        return "runner: none in the cluster; `eagle3 submit` orders the run from here"
    job = _settled(cluster, job)
    suspended = job["spec"].get("suspend")
    if job_state(job) is JobState.ACTIVE:
        if is_cancelled(job) or (suspended and not is_queued(job)):
            going_on = {"metadata": {"annotations": {CANCELLED: None}}, "spec": {"suspend": False}}
            cluster.patch_job(name, going_on)
            return "runner: goes on"
        return "runner: waits for its queue's quota" if suspended else "runner: at work"
    body = _as_created(job)
    cluster.delete_job(job)
    cluster.wait_until_gone(job)
    cluster.create_job(body)
    return "runner: started again"


def cancel(run: InstalledRun, cluster: Cluster, tell: Callable[[str], None]) -> None:
    """Stop a run: suspend its runner, and delete the Jobs that are at work once they have saved.

    What is committed and what is finished stays, and so do Jobs that have ended. The run is as if
    these Jobs had never been made: `retry` of one of them lets the runner go on, and `submit`
    orders the run from elsewhere.

    Args:
        tell: is given a line for each thing that was stopped, and one for what stays.

    Raises TemporaryFailure where pods do not end within their grace, as on a node that is lost.
    """
    _suspend_runner(run, cluster, tell)
    stopped: list[tuple[str, Object]] = []
    for stage in run.stages:
        job = cluster.job(run.job_name(stage.name))
        if job is None or job_state(job) is not JobState.ACTIVE:
            continue
        try:
            # Before the Job goes: one that vanished is told from one that was meant to go.
            with hasty():
                JobRecords(run.store, stage).cancel()
        except NO_STORE as error:
            tell(f"{stage.name}: {error} It goes on after `eagle3 retry {stage.name}` only.")
        cluster.delete_job(job, foreground=True)
        tell(f"{stage.name}: is being stopped, its pods save what is finished")
        stopped.append((stage.name, job))
    for name, job in stopped:
        grace = job["spec"]["template"]["spec"].get("terminationGracePeriodSeconds", 30)
        cluster.wait_until_gone(job, grace + _PATIENCE)
        tell(f"{name}: stopped")
    again = f"`eagle3 retry {stopped[0][0]} --run {run.name}` or " if stopped else ""
    tell(
        f"what is committed or finished stays in {run.store.url}; "
        f"{again}`eagle3 submit {run.name}` goes on"
    )


def _suspend_runner(run: InstalledRun, cluster: Cluster, tell: Callable[[str], None]) -> None:
    """Nothing may order the run any more, before its Jobs go."""
    name = f"{run.name}-{RUNNER}"
    job = cluster.job(name)
    if job is None or job_state(job) is not JobState.ACTIVE:
        return
    # A queue may undo the suspension; the runner looks for the mark itself.
    mark = {"metadata": {"annotations": {CANCELLED: "true"}}, "spec": {"suspend": True}}
    cluster.patch_job(name, mark)
    deadline = time.monotonic() + _PATIENCE
    # Pods of it that failed earlier stay.
    while any(phase_of(pod) in ("Pending", "Running") for pod in cluster.pods(name)):
        if time.monotonic() > deadline:
            tell(f"{RUNNER}: its pod has not ended yet; see `eagle3 status {run.name}`")
            return
        time.sleep(0.5)
    tell(f"{RUNNER}: suspended")


def _settled(cluster: Cluster, job: Object) -> Object:
    """The Job once Kubernetes has said of its last pod's end what it means; it takes seconds.

    A runner that failed just now, as its stage did, is at work no more.
    """
    name = job["metadata"]["name"]
    deadline = time.monotonic() + _SETTLING
    while job_state(job) is JobState.ACTIVE and time.monotonic() < deadline:
        phases = [phase_of(pod) for pod in cluster.pods(name)]
        ended = phases and not {"Pending", "Running"} & {*phases}
        if job["spec"].get("suspend") or not (ended or condition_of(job, "FailureTarget")):
            break
        time.sleep(0.5)
        job = cluster.job(name) or job
    return job


def _as_created(job: Object) -> Object:
    """A Job's body without what the API server added to it."""
    metadata, spec = job["metadata"], job["spec"]
    kept = {
        key: metadata[key]
        for key in ("name", "labels", "annotations", "ownerReferences")
        if key in metadata
    }
    template = spec["template"]
    # What was noted on it is of the one that ended.
    if "annotations" in kept:
        kept["annotations"] = {
            key: value
            for key, value in kept["annotations"].items()
            if key not in (CANCELLED, f"{ANNOTATIONS}/progress")
        }
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
            **{key: value for key, value in spec.items() if key not in ("selector", "suspend")},
            "template": {
                **template,
                "metadata": {**template["metadata"], "labels": labels},
            },
        },
    }
