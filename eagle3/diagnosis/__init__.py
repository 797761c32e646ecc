"""How a Job stands and why, in one sentence, from what the API server knows of it.

Kubernetes spreads the reason over four places: the Job's conditions, its pods' conditions, the
states of their containers, and events. What ended a Job is told by the pod that ended last, in
the stage's own words where it left some as its termination message. Everything here is a pure
function of plain API objects: `failures` of pods that ended, `waiting` of those that have not.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle3 import errors
from eagle3.diagnosis.failures import (
    ended_at,
    failed_pods,
    in_short,
    others_in_words,
    why_ended,
)
from eagle3.diagnosis.objects import (
    Object,
    condition_of,
    index_of,
    moment,
    newest_event,
    node_of,
    phase_of,
)
from eagle3.diagnosis.waiting import gravest, remedy_of_refusal, why_waiting
from eagle3.errors import Eagle3Error, StageFailed, TemporaryFailure
from eagle3.ordering import JobState
from eagle3.progress import ProgressRecord, in_words

_BY_JOB_REASON = {
    "DeadlineExceeded": "raise deadlineSeconds, then retry the stage; what is finished is kept",
    "BackoffLimitExceeded": "see the pods' last words, mend the cause, then retry the stage",
    "MaxFailedIndexesExceeded": "see the pods' last words, mend the cause, then retry the stage",
    "FailedIndexes": "see the pods' last words, mend the cause, then retry the stage",
    "PodFailurePolicy": "mend what the pod complained of, then retry the stage",
}


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """How a Job stands.

    Attributes:
        state: one word: suspended, pending, starting, running, complete, failed.
        why: what is in the way, as a clause; empty where nothing is.
        remedy: what to do about it.
        record: the stage's own last words, see `Eagle3Error.as_record`.
        others: what other pods of a failed Job ended of, where it is not the same.
        nodes: where its pods run.
        began: worker -> when the container of its living pod began, in seconds since 1970.
        restarts: pods that failed so far; those that were drained or preempted do not count.
        last: of an active Job, why the newest of these failed.
    """

    state: str
    why: str = ""
    remedy: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)
    others: str = ""
    nodes: tuple[str, ...] = ()
    began: Mapping[int, float] = field(default_factory=dict)
    restarts: int = 0
    last: str = ""

    @property
    def sentence(self) -> str:
        """Why and what to do, or an empty text."""
        if self.record:
            said = str(self._error())
        else:
            said = f"{self.why}; {self.remedy}" if self.why and self.remedy else self.why
        return f"{said.rstrip('.')}; {self.others}" if self.others else said

    def told(self, reports: Sequence[ProgressRecord] | None, now: float) -> list[str]:
        """All there is to say of it, a line each: progress, what failed before, what is wrong.

        Args:
            reports: what the stage's processes reported last; None where that is not known.
            now: in seconds since 1970.
        """
        known = reports is not None and self.state == "running"
        progress = in_words(reports or (), self.began, now) if known else ""
        return [line for line in (progress, self._before, self.sentence) if line]

    def as_error(self, where: str) -> Eagle3Error:
        """What ends a run whose Job failed: never one of those that a retry can help.

        Args:
            where: the stage and its Job, for what the stage did not say itself.
        """
        error = self._error() if self.record else None
        if error is not None and not error.retry_can_help:
            return error
        # Trying again could have helped, and did not as often as the Job may be tried.
        return StageFailed(
            where,
            wanted="a Job that completes",
            found=f"{error.field}: {error.found}" if error else self.why or self.state,
            remedy=self.remedy or "see `kubectl describe`",
        )

    @property
    def _before(self) -> str:
        if not self.last:
            return ""
        pods = "1 pod" if self.restarts == 1 else f"{self.restarts} pods"
        return f"{pods} failed so far, the last: {self.last}"

    def _error(self) -> Eagle3Error:
        kind = getattr(errors, str(self.record.get("error")), None)
        if not (isinstance(kind, type) and issubclass(kind, Eagle3Error)):
            return TemporaryFailure(
                str(self.record.get("stage", "stage")),
                wanted="no fault in the program itself",
                found=f"{self.record.get('error')}: {self.record.get('found', '')}",
                remedy="see the pod's log, and report it",
            )
        said = {key: str(self.record.get(key, "")) for key in ("wanted", "found", "remedy")}
        return kind(str(self.record.get("field", "")), **said)


def job_state(job: Object | None) -> JobState:
    """How a Job stands; one that is about to fail or complete is active still."""
    if job is None:
        return JobState.MISSING
    if condition_of(job, "Failed"):
        return JobState.FAILED
    return JobState.COMPLETE if condition_of(job, "Complete") else JobState.ACTIVE


def is_queued(job: Object) -> bool:
    """Whether a Job belongs to a queue of Kueue's, which then suspends it and lets it go on."""
    return "kueue.x-k8s.io/queue-name" in job["metadata"].get("labels", {})


def diagnose(
    job: Object, pods: Sequence[Object], events: Iterable[Object] = (), now: float | None = None
) -> Diagnosis:
    """How a Job stands and what is in its way.

    Args:
        pods: its pods.
        events: of the namespace; those about others are passed over.
        now: in seconds since 1970, by which a pod should have ended; by default this moment.
    """
    state, restarts = job_state(job), int(job.get("status", {}).get("failed") or 0)
    if state is JobState.COMPLETE:
        return Diagnosis(state="complete", restarts=restarts)
    if state is JobState.FAILED:
        return _why_failed(job, pods, restarts)
    if condition_of(job, "Suspended"):
        return _why_suspended(job, restarts)
    about = list(events)
    living = [pod for pod in pods if phase_of(pod) in ("Pending", "Running")]
    if not living:
        return _why_no_pod(job, pods, about, restarts)
    nodes = tuple(sorted({node_of(pod) for pod in living if phase_of(pod) == "Running"} - {""}))
    moment_of_asking = time.time() if now is None else now
    kept = [held for pod in living if (held := why_waiting(pod, about, moment_of_asking))]
    worst = gravest(kept) if kept else None
    ended = [cause for pod in failed_pods(job, pods) if (cause := why_ended(pod))]
    idle = "pending" if worst else "starting"
    return Diagnosis(
        state="running" if nodes else idle,
        why=worst.why if worst else "",
        remedy=worst.remedy if worst else "",
        nodes=nodes,
        began=_began(living),
        restarts=restarts,
        last=(in_short(ended[0]) if ended else "its pod is gone") if restarts else "",
    )


def _began(living: Sequence[Object]) -> dict[int, float]:
    """When the main container of each worker's newest pod began."""
    found: dict[int, float] = {}
    for pod in living:
        for status in pod.get("status", {}).get("containerStatuses") or ():
            if running := status.get("state", {}).get("running"):
                index = index_of(pod)
                found[index] = max(moment(running.get("startedAt")), found.get(index, 0.0))
    return found


def _why_failed(job: Object, pods: Sequence[Object], restarts: int) -> Diagnosis:
    condition = condition_of(job, "Failed") or {}
    reason = str(condition.get("reason", ""))
    remedy = _BY_JOB_REASON.get(reason, "see `kubectl describe`")
    ended = [cause for pod in failed_pods(job, pods) if (cause := why_ended(pod))]
    # A deadline ends pods that had no fault.
    if ended and reason != "DeadlineExceeded":
        first = ended[0]
        return Diagnosis(
            state="failed",
            why=first.why or reason,
            remedy=first.remedy or remedy,
            record=first.record,
            others=others_in_words(first, ended),
            restarts=restarts,
        )
    message = str(condition.get("message", ""))
    why = f"{reason}: {message}".strip(": ")
    return Diagnosis(state="failed", why=why, remedy=remedy, restarts=restarts)


def _why_suspended(job: Object, restarts: int) -> Diagnosis:
    if is_queued(job):
        why = "it waits for its queue's quota"
        return Diagnosis(state="suspended", why=why, restarts=restarts)
    return Diagnosis(state="suspended", restarts=restarts)


def _why_no_pod(
    job: Object, pods: Sequence[Object], events: Sequence[Object], restarts: int
) -> Diagnosis:
    """An active Job without a living pod: none could be created, or one just ended badly."""
    failed = failed_pods(job, pods)
    when, refused = newest_event(events, job, ("FailedCreate",))
    # An event is kept for an hour: what came later tells more.
    if refused and when >= max(map(ended_at, failed), default=0.0):
        why, remedy = f"no pod can be created: {refused}", remedy_of_refusal(refused)
        return Diagnosis(state="pending", why=why, remedy=remedy, restarts=restarts)
    ended = [cause for pod in failed if (cause := why_ended(pod))]
    if not ended:
        return Diagnosis(state="pending", restarts=restarts)
    why, remedy = f"its last pod ended: {in_short(ended[0])}", "it will be tried again"
    return Diagnosis(state="pending", why=why, remedy=remedy, restarts=restarts)
