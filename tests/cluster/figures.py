"""Measured figures of the cluster, for the record of a run of the tests."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping

from tests.cluster.places import SUMMARY


def record(**figures: float | str | Mapping[str, float]) -> None:
    """Add figures to runs/test-cluster/summary.json; what others wrote there stays."""
    SUMMARY.parent.mkdir(parents=True, exist_ok=True)
    with SUMMARY.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = json.loads(SUMMARY.read_text()) if SUMMARY.exists() else {}
        part = SUMMARY.with_suffix(".part")
        part.write_text(json.dumps({**before, **figures}, indent=2, sort_keys=True) + "\n")
        part.rename(SUMMARY)
