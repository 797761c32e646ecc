"""Waiting for a thing to become true, with an end to it."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_SECONDS = 0.2


class Late(Exception):
    """What was waited for did not come in time."""


def until(true: Callable[[], bool], what: str, *, seconds: float) -> None:
    """Poll until `true()`.

    Raises:
        Late: naming `what`, when it is not true after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise Late(f"after {seconds:.0f} s still not so: {what}")
        time.sleep(POLL_SECONDS)
