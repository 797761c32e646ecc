"""How a Job stands and why, in one sentence, from what the API server knows of it.

Kubernetes spreads the reason over four places: the Job's conditions, its pods' conditions, the
states of their containers, and events. A stage's own last words come first: the JSON that it left
as its termination message. Everything here is a pure function of plain API objects.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle3 import errors
from eagle3.errors import Eagle3Error, StageFailed, TemporaryFailure
from eagle3.ordering import JobState

Object = Mapping[str, Any]

# Reasons for which a container waits that time alone does not mend, and what does.
_STUCK = {
    "ErrImagePull": "check the image's name and tag, and imagePullSecrets",
    "ImagePullBackOff": "check the image's name and tag, and imagePullSecrets",
    "InvalidImageName": "correct the image's name",
    "ErrImageNeverPull": "load the image onto the node, or let it be pulled",
    "CreateContainerConfigError": "create what is missing in this namespace",
    "CreateContainerError": "see the node's events",
    "RunContainerError": "see the node's events",
}
# Events that say why a pod of ours does not begin.
_BLOCKING_EVENTS = ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox", "FailedBinding")
_BY_JOB_REASON = {
    "DeadlineExceeded": "raise deadlineSeconds, then retry the stage; what is finished is kept",
    "BackoffLimitExceeded": "see the pods' last words, mend the cause, then retry the stage",
    "MaxFailedIndexesExceeded": "see the pods' last words, mend the cause, then retry the stage",
    "FailedIndexes": "see the pods' last words, mend the cause, then retry the stage",
    "PodFailurePolicy": "mend what the pod complained of, then retry the stage",
}
_KILLED = {137: "SIGKILL", 143: "SIGTERM, at which what is finished is kept"}


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """How a Job stands.

    Attributes:
        state: one word: suspended, pending, starting, running, complete, failed.
        why: what is in the way, as a clause; empty where nothing is.
        remedy: what to do about it.
        record: the stage's own last words, see `Eagle3Error.as_record`.
        nodes: where its pods run.
    """

    state: str
    why: str = ""
    remedy: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)
    nodes: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """Why and what to do, or an empty text."""
        if self.record:
            return str(self._error())
        return f"{self.why}; {self.remedy}" if self.why and self.remedy else self.why

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
    if _condition(job, "Failed"):
        return JobState.FAILED
    return JobState.COMPLETE if _condition(job, "Complete") else JobState.ACTIVE


def diagnose(job: Object, pods: Sequence[Object], events: Iterable[Object] = ()) -> Diagnosis:
    """How a Job stands and what is in its way.

    Args:
        pods: its pods.
        events: of the namespace; those about others are passed over.
    """
    nodes = tuple(sorted({_node(pod) for pod in pods if _phase(pod) == "Running"} - {""}))
    state = job_state(job)
    if state is JobState.COMPLETE:
        return Diagnosis(state="complete")
    if state is JobState.FAILED:
        return _why_failed(job, pods)
    if _condition(job, "Suspended"):
        return Diagnosis(state="suspended", why="it waits for its queue's quota" * _queued(job))
    about = list(events)
    living = [pod for pod in pods if _phase(pod) in ("Pending", "Running")]
    if not living:
        return _why_no_pod(job, pods, about)
    for pod in living:
        if (found := _why_waiting(pod, about)) is not None:
            return Diagnosis(
                state="running" if nodes else "pending",
                why=found.why,
                remedy=found.remedy,
                nodes=nodes,
            )
    return Diagnosis(state="running" if nodes else "starting", nodes=nodes)


def _why_failed(job: Object, pods: Sequence[Object]) -> Diagnosis:
    condition = _condition(job, "Failed") or {}
    reason = str(condition.get("reason", ""))
    remedy = _BY_JOB_REASON.get(reason, "see `kubectl describe`")
    if reason != "DeadlineExceeded":
        for pod in _most_telling_first(job, pods):
            why, what_to_do = _evicted(pod)
            if why:
                return Diagnosis(state="failed", why=why, remedy=what_to_do)
            for container, ended in _ended_badly(pod):
                if record := _last_words(ended):
                    return Diagnosis(state="failed", why=reason, remedy=remedy, record=record)
                said = _exit_in_words(container, ended)
                return Diagnosis(
                    state="failed",
                    why=f"pod {pod['metadata']['name']}: {said}",
                    remedy=_remedy_of_exit(ended) or remedy,
                )
    message = str(condition.get("message", ""))
    return Diagnosis(state="failed", why=f"{reason}: {message}".strip(": "), remedy=remedy)


def _why_no_pod(job: Object, pods: Sequence[Object], events: Sequence[Object]) -> Diagnosis:
    """An active Job without a living pod: none could be created, or one just ended badly."""
    refused = _newest(events, job, ("FailedCreate",))
    if refused:
        return Diagnosis(
            state="pending", why=f"no pod can be created: {refused}", remedy=_of_refusal(refused)
        )
    for pod in _most_telling_first(job, pods):
        evicted, remedy = _evicted(pod)
        if evicted:
            return Diagnosis(state="pending", why=evicted, remedy=remedy)
        for container, ended in _ended_badly(pod):
            words = _last_words(ended)
            said = words.get("found") if words else None
            why = f"its last pod ended: {said or _exit_in_words(container, ended)}"
            return Diagnosis(state="pending", why=why, remedy="it will be tried again")
    return Diagnosis(state="pending")


def _why_waiting(pod: Object, events: Sequence[Object]) -> Diagnosis | None:
    """What keeps a pod from running that time alone may not mend, or None."""
    name = pod["metadata"]["name"]
    if pod["metadata"].get("deletionTimestamp"):
        return _why_stopping(pod)
    scheduled = _condition(pod, "PodScheduled", status="False")
    if scheduled and scheduled.get("reason") == "Unschedulable":
        return Diagnosis(
            state="pending",
            why=f"pod {name} fits no node: {scheduled.get('message', '')}",
            remedy="free or add nodes, or correct nodeSelector, tolerations and resources",
        )
    for status in _container_statuses(pod):
        waiting = status.get("state", {}).get("waiting", {})
        if waiting.get("reason") in _STUCK:
            message = str(waiting.get("message", "")).strip()
            return Diagnosis(
                state="pending",
                why=f"container {status['name']}: {waiting['reason']}"
                + (f": {message}" if message else ""),
                remedy=_STUCK[waiting["reason"]],
            )
    blocked = _newest(events, pod, _BLOCKING_EVENTS) if _phase(pod) == "Pending" else ""
    if blocked:
        return Diagnosis(state="pending", why=f"pod {name}: {blocked}", remedy="see the volume")
    return None


def _why_stopping(pod: Object) -> Diagnosis:
    """A pod that is told to stop: by a drain, by preemption, or because its node is lost."""
    name, condition = pod["metadata"]["name"], _condition(pod, "DisruptionTarget") or {}
    if condition.get("reason") == "DeletionByTaintManager":
        node = _node(pod)
        return Diagnosis(
            state="running",
            why=f"node {node} of pod {name} does not answer, or evicts its pods",
            remedy=f"if it is dead, delete it, or taint it: kubectl taint node {node} "
            "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute",
        )
    return Diagnosis(
        state="running",
        why=f"pod {name} is being stopped: {condition.get('message', 'it was deleted')}",
        remedy="what is finished is kept, and another pod goes on",
    )


def _most_telling_first(job: Object, pods: Sequence[Object]) -> list[Object]:
    """Failed pods: the one that the Job's own condition names, then the newest.

    One that was drained, or told to stop when the Job had failed already, tells nothing of why.
    """
    message = str((_condition(job, "Failed") or {}).get("message", ""))

    def rank(pod: Object) -> tuple[bool, bool, str, bool]:
        name, spoke = pod["metadata"]["name"], any(map(_spoke, _ended_badly(pod)))
        disrupted = _condition(pod, "DisruptionTarget") is not None
        moment = str(pod["metadata"].get("creationTimestamp", ""))
        return f"/{name} " in message, not disrupted, moment, spoke

    failed = [pod for pod in pods if _phase(pod) == "Failed"]
    return sorted(failed, key=rank, reverse=True)


def _spoke(ended: tuple[str, Object]) -> bool:
    return bool(_last_words(ended[1]))


def _evicted(pod: Object) -> tuple[str, str]:
    """Why the kubelet put a pod out of its node, and what to do; empty texts where it did not."""
    status = pod.get("status", {})
    if status.get("reason") != "Evicted":
        return "", ""
    message = str(status.get("message", "")).strip()
    of_disk = "ephemeral" in message or "emptyDir" in message
    remedy = "raise the stage's scratch, then retry the stage" if of_disk else "see the node"
    return f"pod {pod['metadata']['name']} was evicted: {message}", remedy


def _ended_badly(pod: Object) -> Iterator[tuple[str, Object]]:
    """Containers of a pod that ended with another code than 0, init containers first."""
    for status in _container_statuses(pod):
        ended = status.get("state", {}).get("terminated")
        if ended and ended.get("exitCode"):
            yield status["name"], ended


def _last_words(ended: Object) -> dict[str, Any]:
    """The record that a stage left as its termination message; empty where it left none."""
    try:
        found = json.loads(ended.get("message") or "{}")
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) and "error" in found else {}


def _exit_in_words(container: str, ended: Object) -> str:
    code = ended.get("exitCode", 0)
    if ended.get("reason") == "OOMKilled":
        return f"container {container} was killed for want of memory"
    lines = str(ended.get("message") or "").strip().splitlines()
    told = _KILLED.get(code, f"exit code {code}")
    return f"container {container} ended with {told}" + (f": {lines[-1]}" if lines else "")


def _remedy_of_exit(ended: Object) -> str:
    if ended.get("reason") == "OOMKilled":
        return "raise the stage's memory, then retry the stage"
    return ""


def _of_refusal(message: str) -> str:
    if "quota" in message:
        return "raise the namespace's quota, or wait until others end"
    if "PodSecurity" in message:
        return "see which of the pod's settings the namespace's policy refuses"
    if "serviceaccount" in message:
        return "install the chart's service account in this namespace"
    return "see `kubectl describe job`"


def _newest(events: Sequence[Object], about: Object, reasons: tuple[str, ...]) -> str:
    """The newest message of these reasons about an object, or an empty text."""
    uid = about["metadata"]["uid"]
    found = [
        event
        for event in events
        if event.get("reason") in reasons and event.get("involvedObject", {}).get("uid") == uid
    ]
    found.sort(key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))
    return str(found[-1].get("message", "")).strip() if found else ""


def _condition(thing: Object, kind: str, *, status: str = "True") -> Object | None:
    for condition in thing.get("status", {}).get("conditions") or ():
        if condition.get("type") == kind and condition.get("status") == status:
            return dict(condition)
    return None


def _container_statuses(pod: Object) -> Iterator[Object]:
    for key in ("initContainerStatuses", "containerStatuses"):
        yield from pod.get("status", {}).get(key) or ()


def _phase(pod: Object) -> str:
    return str(pod.get("status", {}).get("phase", ""))


def _node(pod: Object) -> str:
    return str(pod.get("spec", {}).get("nodeName", ""))


def _queued(job: Object) -> bool:
    return "kueue.x-k8s.io/queue-name" in job["metadata"].get("labels", {})
