"""Why a pod that has not ended does not run, or will not go on."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from eagle3.diagnosis.objects import (
    Object,
    Reason,
    condition_of,
    container_statuses,
    moment,
    name_of,
    newest_event,
    node_of,
    phase_of,
)

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
# Seconds that a kubelet may take beyond a pod's grace, before its node counts as lost.
_PATIENCE = 60.0
LOST = "lost node"


def why_waiting(pod: Object, events: Sequence[Object], now: float) -> Reason | None:
    """What keeps a pod from running that time alone may not mend, or None."""
    name = name_of(pod)
    if pod["metadata"].get("deletionTimestamp"):
        return _why_stopping(pod, now)
    if not_ready := _unheard_of(pod):
        return _lost(pod, f"is not ready since {not_ready}, though its containers run")
    scheduled = condition_of(pod, "PodScheduled", status="False") or {}
    if scheduled.get("reason") == "Unschedulable":
        return Reason(
            cause="Unschedulable",
            why=f"pod {name} fits no node: {scheduled.get('message', '')}",
            remedy="free or add nodes, or correct nodeSelector, tolerations and resources",
        )
    if scheduled.get("reason") == "SchedulingGated":
        return Reason(
            cause="SchedulingGated",
            why=f"pod {name} is held back by a scheduling gate",
            remedy="see its queue's quota",
        )
    for status in container_statuses(pod):
        waiting = status.get("state", {}).get("waiting", {})
        if (cause := waiting.get("reason")) in _STUCK:
            message = str(waiting.get("message", "")).strip()
            why = f"container {status['name']}: {cause}" + (f": {message}" if message else "")
            return Reason(cause=cause, why=why, remedy=_STUCK[cause])
    _, blocked = newest_event(events, pod, _BLOCKING_EVENTS)
    if blocked and phase_of(pod) == "Pending":
        return Reason(cause="blocked", why=f"pod {name}: {blocked}", remedy="see the volume")
    return None


def gravest(reasons: Sequence[Reason]) -> Reason:
    """Of what keeps several pods: a lost node before all else, then the first, and how many."""
    chosen = next((reason for reason in reasons if reason.cause == LOST), reasons[0])
    others = len(reasons) - 1
    more = f" (and {others} more pod{'s' * (others > 1)} held up)" if others else ""
    return Reason(cause=chosen.cause, why=chosen.why + more, remedy=chosen.remedy)


def remedy_of_refusal(message: str) -> str:
    """What to do where the API server creates no pod."""
    if "must specify" in message:
        return "give the containers what the quota asks for, by a LimitRange in the namespace"
    if "quota" in message:
        return "raise the namespace's quota, or wait until others end"
    if "PodSecurity" in message:
        return "see which of the pod's settings the namespace's policy refuses"
    if "serviceaccount" in message:
        return "install the chart's service account in this namespace"
    return "see `kubectl describe job`"


def _why_stopping(pod: Object, now: float) -> Reason:
    """A pod that is told to stop: by a drain, by preemption, or because its node is lost."""
    # The moment by which it should have ended, its grace included.
    overdue = now - moment(pod["metadata"]["deletionTimestamp"])
    disrupted = condition_of(pod, "DisruptionTarget") or {}
    if node_of(pod) and overdue > _PATIENCE:
        ago = timedelta(seconds=round(overdue))
        return _lost(pod, f"should have ended {ago} ago, and no other begins before it has")
    if node_of(pod) and disrupted.get("reason") == "DeletionByTaintManager":
        return _lost(pod, "is being evicted", certain=False)
    return Reason(
        cause="stopping",
        why=f"pod {name_of(pod)} is being stopped: {disrupted.get('message', 'it was deleted')}",
        remedy="what is finished is kept, and another pod goes on",
    )


def _unheard_of(pod: Object) -> str:
    """Since when the node of a running pod is silent, or an empty text.

    Our pods have no probes, so that whoever calls one unready whose containers are ready is the
    controller of nodes, forty seconds after the kubelet's last word.
    """
    condition = condition_of(pod, "Ready", status="False")
    statuses = pod.get("status", {}).get("containerStatuses") or ()
    if phase_of(pod) != "Running" or condition is None or not statuses:
        return ""
    if not all(one.get("ready") and one.get("state", {}).get("running") for one in statuses):
        return ""
    return str(condition.get("lastTransitionTime", "a while ago"))


def _lost(pod: Object, what: str, *, certain: bool = True) -> Reason:
    node = node_of(pod)
    silent = "does not answer" if certain else "does not answer, or evicts its pods"
    return Reason(
        cause=LOST,
        why=f"node {node} {silent}: pod {name_of(pod)} {what}",
        remedy=f"if it is dead: kubectl delete node {node}, or kubectl taint node {node} "
        "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute",
    )
