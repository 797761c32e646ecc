"""Waiting for a thing to become true, with an end to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tests.cluster.places import logs

POLL_SECONDS = 0.2


class Late(Exception):
    """What was waited for did not come in time, or cannot come any more."""


def until(
    true: Callable[[], bool],
    what: str,
    *,
    seconds: float,
    ended: Callable[[], Sequence[str]] = tuple,
) -> None:
    """Poll until `true()`, for as long as `ended()` names no process that it depends on.

    Raises:
        Late: naming `what`, when it is not true after `seconds`; naming processes that ended.
    """
    deadline = time.monotonic() + seconds
    while not true():
        if gone := ended():
            names = ", ".join(gone)
            raise Late(f"{names} ended before this was so: {what}; the logs are in {logs()}")
        if time.monotonic() > deadline:
            raise Late(f"after {seconds:.0f} s still not so: {what}; the logs are in {logs()}")
        time.sleep(POLL_SECONDS)
