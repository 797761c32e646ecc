"""What is read of the API's objects: conditions, phases, moments, events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

Object = Mapping[str, Any]
"""An object of the API as JSON has it."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """What is in the way of a pod, or ended it.

    Attributes:
        cause: in a word or two, the same for pods that met the same.
        why: as a clause.
        remedy: what to do about it, as a clause; empty where the pod cannot tell.
        record: the stage's own last words, see `Eagle3Error.as_record`.
    """

    cause: str
    why: str
    remedy: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)


def name_of(thing: Object) -> str:
    """The object's name."""
    return str(thing["metadata"]["name"])


def phase_of(pod: Object) -> str:
    """The pod's phase, or an empty text."""
    return str(pod.get("status", {}).get("phase", ""))


def node_of(pod: Object) -> str:
    """The node that a pod was given, or an empty text."""
    return str(pod.get("spec", {}).get("nodeName", ""))


def index_of(pod: Object) -> int:
    """Which worker of an indexed Job a pod is; 0 in a Job of one."""
    labels = pod["metadata"].get("labels", {})
    return int(labels.get("batch.kubernetes.io/job-completion-index", 0))


def condition_of(thing: Object, kind: str, *, status: str = "True") -> Object | None:
    """A condition of that type and status, or None."""
    for condition in thing.get("status", {}).get("conditions") or ():
        if condition.get("type") == kind and condition.get("status") == status:
            return dict(condition)
    return None


def container_statuses(pod: Object) -> Iterator[Object]:
    """What is known of a pod's containers, init containers first."""
    for key in ("initContainerStatuses", "containerStatuses"):
        yield from pod.get("status", {}).get(key) or ()


def moment(text: object) -> float:
    """Seconds since 1970 of a timestamp of the API; 0 for none."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return 0.0


def newest_event(
    events: Sequence[Object], about: Object, reasons: tuple[str, ...]
) -> tuple[float, str]:
    """When and what the newest event of these reasons says of an object; (0, "") for none."""
    uid, newest = about["metadata"]["uid"], (0.0, "")
    for event in events:
        if event.get("reason") in reasons and event.get("involvedObject", {}).get("uid") == uid:
            series = event.get("series") or {}
            seen = max(
                moment(series.get("lastObservedTime")),
                moment(event.get("lastTimestamp")),
                moment(event.get("eventTime")),
            )
            newest = max(newest, (seen, str(event.get("message", "")).strip()))
    return newest
