"""Where the cluster keeps what it needs: programs in a cache, its life in a state folder.

There is one cluster on a machine, since the names of its network are the machine's. Its state
therefore lies at a fixed place, and the sockets in it have short paths.
"""

from __future__ import annotations

import os
from pathlib import Path

HERE = Path(__file__).resolve().parent
TEMPLATES = HERE / "templates"
MODULES = HERE / "go"

STATE = Path("/var/lib/eagle3-testbed")
SUMMARY = HERE.parent.parent / "runs" / "test-cluster" / "summary.json"


def cache_home() -> Path:
    """The user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def cache() -> Path:
    """The folder of built programs, of the nodes' images, and of the last cluster's logs."""
    return cache_home() / "eagle3-testbed"


def logs() -> Path:
    """One file for each process of the last cluster."""
    return cache() / "logs"
