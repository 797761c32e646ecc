"""How long an orderer of a run bears what keeps it from going on, and where it says so."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from eagle3.cluster import CANCELLED, Cluster, Object
from eagle3.errors import (
    CredentialsUnusable,
    Eagle3Error,
    PermissionRefused,
    ServiceUnavailable,
    TemporaryFailure,
)

# As long as a new API server or a change of a role takes.
REFUSED_SECONDS = 600.0


def is_cancelled(job: Object) -> bool:
    """Whether a person has cancelled the run of this runner's Job."""
    return CANCELLED in job["metadata"].get("annotations", {})


class Patience:
    """What keeps an orderer from going on, told once and noted where a person looks for it.

    Args:
        job: the runner's own Job; empty where the run is ordered from elsewhere.
    """

    def __init__(self, cluster: Cluster, tell: Callable[[str], None], job: str) -> None:
        self._cluster, self._tell, self._job = cluster, tell, job
        self._told = ""
        # Unknown at first: an earlier pod may have left a note.
        self._noted: str | None = None
        self._looked = False
        self._refused_since: float | None = None

    def cancelled(self) -> bool:
        """Whether a person has cancelled the run, whoever has started its runner again since."""
        job = self._cluster.job(self._job) if self._job else None
        found = job is not None and is_cancelled(job)
        if found and self._told != CANCELLED:
            self._tell("runner: cancelled; `eagle3 retry` or `eagle3 submit` goes on")
            self._told = CANCELLED
        return found

    def rest(self) -> None:
        """A look has come to its end."""
        self._looked, self._refused_since, self._told = True, None, ""
        self._note("")

    def bear(self, error: Eagle3Error) -> None:
        """Bear an error that may pass. Raises it where this process cannot be helped.

        A service that is away is waited for without end. What refuses may do so for a moment too,
        while an API server starts or a role is changed; but a pod's credentials stay what they
        were when it began, and another may be given better ones.
        """
        text = str(error)
        if text != self._told:
            self._tell(f"runner: {text}")
        self._told = text
        self._note(text[:500])
        if not isinstance(error, (PermissionRefused, CredentialsUnusable)):
            self._refused_since = None
            return
        now = time.monotonic()
        self._refused_since = self._refused_since or now
        never = isinstance(error, PermissionRefused) and not self._looked
        if never or now - self._refused_since > REFUSED_SECONDS:
            raise error

    def _note(self, text: str) -> None:
        if not self._job or text == self._noted:
            return
        with contextlib.suppress(ServiceUnavailable, TemporaryFailure, PermissionRefused):
            job = self._cluster.job(self._job)
            if job is not None:
                self._cluster.annotate(job, {"progress": text})
            if job is not None and text and not self._noted:
                self._cluster.tell(job, "RunHeldUp", text, warning=True)
            self._noted = text
