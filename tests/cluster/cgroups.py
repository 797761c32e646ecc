"""A folder for each node in every controller (cgroup version 1).

Each kubelet has a root of its own, for it ends every pod below its root that it does not know.
Controllers and settings already in use are not touched: folders are added, and removed.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

REMOVE_SECONDS = 5.0


def name(node: str) -> str:
    """The folder of a node, in every hierarchy."""
    return f"e3-{node}"


def supported() -> bool:
    """Whether the machine has controllers of version 1."""
    return any((hierarchy / "cpuset.cpus").exists() for hierarchy in _hierarchies())


def writable() -> bool:
    """Whether a folder may be added to the controllers; a container often only sees them."""
    probe = f"e3-probe-{os.getpid()}"
    try:
        for hierarchy in _hierarchies():
            (hierarchy / probe).mkdir()
            (hierarchy / probe).rmdir()
    except OSError:
        return False
    return True


def make(node: str) -> None:
    """Make the node's folders, with all processors: the kubelet gives its pods all that it sees."""
    for hierarchy in _hierarchies():
        folder = hierarchy / name(node)
        folder.mkdir(exist_ok=True)
        if (folder / "cpuset.cpus").exists():
            for file in ("cpuset.cpus", "cpuset.mems"):
                (folder / file).write_text((hierarchy / file).read_text())


def members(node: str) -> set[int]:
    """The processes of the node's pods."""
    found = set()
    for folder in _folders(node):
        with contextlib.suppress(FileNotFoundError):
            found |= {int(pid) for pid in (folder / "cgroup.procs").read_text().split()}
    return found


def remove(node: str) -> None:
    """Remove the node's folders, the deepest first; a process takes a moment to leave its own."""
    deadline = time.monotonic() + REMOVE_SECONDS
    while left := _folders(node):
        for folder in left:
            with contextlib.suppress(OSError):
                folder.rmdir()
        if time.monotonic() > deadline:
            raise OSError(f"these cgroups cannot be removed: {', '.join(map(str, left))}")
        if _folders(node):
            time.sleep(0.1)


def _folders(node: str) -> list[Path]:
    return [
        Path(path)
        for hierarchy in _hierarchies()
        for path, _, _ in os.walk(hierarchy / name(node), topdown=False)
    ]


def _hierarchies() -> list[Path]:
    """Where they are mounted; runc also uses that of version 2 beside those of version 1."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.split()[0] in ("cgroup", "cgroup2"):
            found.append(Path(before.split()[4]))
    return found
