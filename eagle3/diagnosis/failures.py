"""Why pods ended badly, and which of several tells why their Job did."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from eagle3.diagnosis.objects import (
    Object,
    Reason,
    condition_of,
    container_statuses,
    moment,
    name_of,
    phase_of,
)

_KILLED = {137: "SIGKILL", 143: "SIGTERM, at which what is finished is kept"}
# What the kubelet says of a pod that it puts out, in lower case -> what to do.
_BY_EVICTION = (
    ("low on resource: memory", "raise the stage's memory, which its node then keeps free"),
    ("low on resource: ephemeral", "free the node's disk, or let pods ask for more scratch"),
    ("dshm", "raise the stage's shm, then retry the stage"),
    ("ephemeral", "raise the stage's scratch, then retry the stage"),
    ("emptydir", "raise the stage's scratch, then retry the stage"),
)


def failed_pods(job: Object, pods: Sequence[Object]) -> list[Object]:
    """Failed pods: the one that the Job's own condition names, then by when they ended.

    One that was drained, or told to stop when the Job had failed already, tells nothing of why.
    """
    message = str((condition_of(job, "Failed") or {}).get("message", ""))

    def rank(pod: Object) -> tuple[bool, bool, float]:
        told_to = pod["metadata"].get("deletionTimestamp") or condition_of(pod, "DisruptionTarget")
        return f"/{name_of(pod)} " in message, not told_to, ended_at(pod)

    failed = [pod for pod in pods if phase_of(pod) == "Failed"]
    return sorted(failed, key=rank, reverse=True)


def why_ended(pod: Object) -> Reason | None:
    """Why a pod ended badly, or None where nothing says so."""
    status, name = pod.get("status", {}), name_of(pod)
    message = str(status.get("message") or "").strip()
    if status.get("reason") == "Evicted":
        remedy = next((do for said, do in _BY_EVICTION if said in message.lower()), "see the node")
        return Reason(cause="Evicted", why=f"pod {name} was evicted: {message}", remedy=remedy)
    for container, ended in _ended_badly(pod):
        if record := _last_words(ended):
            return Reason(cause=str(record["error"]), why="", record=record)
        if ended.get("reason") == "OOMKilled":
            return Reason(
                cause="OOMKilled",
                why=f"pod {name}: container {container} was killed for want of memory",
                remedy="raise the stage's memory, then retry the stage",
            )
        lines = str(ended.get("message") or "").strip().splitlines()
        code = ended.get("exitCode", 0)
        told = _KILLED.get(code, f"exit code {code}")
        why = f"container {container} ended with {told}" + (f": {lines[-1]}" if lines else "")
        return Reason(cause=f"exit code {code}", why=f"pod {name}: {why}")
    if reason := str(status.get("reason") or ""):
        why = f"pod {name}: {reason}" + (f": {message}" if message else "")
        return Reason(cause=reason, why=why, remedy="see the node")
    return None


def in_short(reason: Reason) -> str:
    """Why a pod ended, where it is not what is asked for: the stage's words or the clause."""
    return str(reason.record.get("found") or reason.cause) if reason.record else reason.why


def others_in_words(chosen: Reason, reasons: Sequence[Reason]) -> str:
    """What other pods ended of, where it is not the same; an empty text where it is."""
    causes = Counter(reason.cause for reason in reasons if reason.cause != chosen.cause)
    told = ", ".join(f"{cause} ({count})" for cause, count in causes.most_common())
    return f"other pods ended of {told}" if told else ""


def ended_at(pod: Object) -> float:
    """When a pod ended, in seconds since 1970; where nothing says so, when it was made."""
    ends = [
        moment(status.get("state", {}).get("terminated", {}).get("finishedAt"))
        for status in container_statuses(pod)
    ]
    return max([*ends, moment(pod["metadata"].get("creationTimestamp"))])


def _ended_badly(pod: Object) -> Iterator[tuple[str, Object]]:
    """Containers of a pod that ended with another code than 0, init containers first."""
    for status in container_statuses(pod):
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
