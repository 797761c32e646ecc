"""What a stage's pods write, as `kubectl logs` shows it, from all of them and across restarts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from eagle3.cluster import Cluster, Object
from eagle3.diagnosis import job_state
from eagle3.diagnosis.objects import container_statuses, index_of
from eagle3.errors import ServiceUnavailable, UpstreamMissing
from eagle3.ordering import JobState
from jobs.installed import InstalledRun
from jobs.operate.seen import RUNNER

_EVERY_SECONDS = 2.0
_ENDED = ("Succeeded", "Failed")


def logs(
    run: InstalledRun,
    cluster: Cluster,
    stage: str,
    tell: Callable[[str], None],
    *,
    follow: bool = False,
) -> None:
    """Tell what the newest pod of each of a stage's workers wrote, a line at a time.

    Where there are several, their number stands before each line. A pod whose stage has not begun
    tells what its gate wrote.

    Args:
        stage: a stage of the run, or `runner`.
        follow: go on with what they write from now on, and with the pods that come after them,
            until the Job ends.

    Raises UpstreamMissing where the stage has no Job, ConfigError for a stage that the run has not.
    """
    name = f"{run.name}-{RUNNER}" if stage == RUNNER else run.job_name(stage)
    job = cluster.job(name)
    if job is None:
        raise UpstreamMissing(
            f"job {name}",
            wanted=f"one in the namespace {cluster.namespace}",
            found="none",
            remedy=f"see `eagle3 status {run.name}` for what {stage} waits for",
        )
    if follow:
        _Followed(cluster=cluster, name=name, tell=tell).follow()
        return
    several = int(job["spec"].get("completions", 1)) > 1
    for pod in _newest(cluster.pods(name)):
        container = _begun(pod)
        try:
            for line in cluster.log(pod["metadata"]["name"], container) if container else ():
                tell(_prefix(pod, several) + line.partition(" ")[2])
        except (ServiceUnavailable, UpstreamMissing) as error:
            # A node that does not answer is no reason to leave out the other workers.
            tell(_prefix(pod, several) + str(error))


@dataclass(kw_only=True)
class _Followed:
    """A Job's pods, each with a thread that tells what it writes."""

    cluster: Cluster
    name: str
    tell: Callable[[str], None]
    threads: dict[str, threading.Thread] = field(default_factory=dict)
    several: bool = False

    def follow(self) -> None:
        """Look for new pods until the Job has ended and all is told."""
        active = True
        while active or any(thread.is_alive() for thread in self.threads.values()):
            # An API server that is away for a while ends nothing.
            with contextlib.suppress(ServiceUnavailable):
                active = self._look()
            time.sleep(_EVERY_SECONDS)

    def _look(self) -> bool:
        """Begin with the pods that are new, and return whether there may be more."""
        # Asked before the pods: the last one of a Job that has ended is among them.
        job = self.cluster.job(self.name)
        self.several |= job is not None and int(job["spec"].get("completions", 1)) > 1
        for pod in self.cluster.pods(self.name):
            uid = pod["metadata"]["uid"]
            if uid not in self.threads and _begun(pod):
                # A daemon, so that Ctrl-C does not wait for the next line.
                thread = threading.Thread(target=self._pour, args=(pod,), daemon=True)
                self.threads[uid] = thread
                thread.start()
        return job_state(job) is JobState.ACTIVE

    def _pour(self, pod: Object) -> None:
        """Tell what one pod writes until it has ended: its gate's lines, then its stage's."""
        told: dict[str, str] = {}
        found: Object | None = pod
        while found is not None:
            container, ended = _begun(found), found["status"].get("phase") in _ENDED
            try:
                self._stream(found, container, told)
            except UpstreamMissing:
                return
            except ServiceUnavailable:
                # The connection broke, or the node does not answer: from there on, later.
                ended = False
            if ended:
                return
            time.sleep(_EVERY_SECONDS / 10)
            with contextlib.suppress(ServiceUnavailable):
                uid = pod["metadata"]["uid"]
                pods = self.cluster.pods(self.name)
                found = next((one for one in pods if one["metadata"]["uid"] == uid), None)

    def _stream(self, pod: Object, container: str, told: dict[str, str]) -> None:
        last = told.get(container, "")
        name = pod["metadata"]["name"]
        for line in self.cluster.log(name, container, follow=True, since=last):
            # The API knows whole seconds: what was told of that one comes again.
            when, _, text = line.partition(" ")
            if when > told.get(container, ""):
                told[container] = when
                self.tell(_prefix(pod, self.several) + text)


def _newest(pods: Sequence[Object]) -> list[Object]:
    """The newest pod of each worker, in their order."""
    by_age = sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))
    found = {index_of(pod): pod for pod in by_age}
    return [found[index] for index in sorted(found)]


def _begun(pod: Object) -> str:
    """The last of a pod's containers that has begun, whose log is there; or an empty text."""
    begun = [
        status["name"]
        for status in container_statuses(pod)
        if status.get("state", {}).keys() & {"running", "terminated"}
    ]
    return str(begun[-1]) if begun else ""


def _prefix(pod: Object, several: bool) -> str:
    return f"[{index_of(pod)}] " if several else ""
