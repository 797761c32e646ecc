"""What the cluster changes on the machine outside of its own folders, and how it is undone."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import network
from tests.cluster.places import STATE

# The kubelet sets these on its start.
SYSCTLS = (
    "kernel/keys/root_maxbytes",
    "kernel/keys/root_maxkeys",
    "kernel/panic",
    "kernel/panic_on_oops",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
)

# Paths built into containerd, its shims, the CNI library and the kubelet, and below each what a
# cluster of ours may leave there.
PATHS: dict[str, tuple[str, ...]] = {
    "/etc/cni": (),
    "/opt/cni": (),
    "/opt/containerd": (),
    "/run/containerd": ("s/*", "runc/k8s.io/*"),
    "/run/netns": (),
    "/run/xtables.lock": (),
    "/usr/libexec/kubernetes": (),
    "/var/lib/cni": ("results/*",),
    "/var/lib/containerd": (),
    "/var/lib/kubelet": ("device-plugins/kubelet.sock",),
    "/var/log/containers": ("*.log",),
    "/var/log/pods": (),
}
# What a file of ours tells: its folder, its network, or its name server.
SIGNS = tuple(
    os.fsencode(sign) for sign in (f"{STATE}/", f'"{network.PODS_NAME}"', f'"{network.address(1)}"')
)
# A kubelet's, of whichever cluster: it goes where nothing else is left beside it.
UNSIGNED = frozenset({"kubelet_internal_checkpoint"})


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The machine as it was found."""

    sysctls: dict[str, str]
    absent: list[str]
    namespaces: list[str]

    @classmethod
    def taken(cls) -> Footprint:
        """The machine as it is now."""
        return cls(
            sysctls={name: _sysctl(name).read_text() for name in SYSCTLS if _sysctl(name).exists()},
            absent=[path for path in PATHS if not os.path.lexists(path)],
            namespaces=sorted(network.namespaces()),
        )

    def restore(self) -> None:
        """Set sysctls back, and remove of paths that were not there what is ours."""
        for name, value in self.sysctls.items():
            if _sysctl(name).read_text() != value:
                _sysctl(name).write_text(value)
        for path in self.absent:
            remove_ours(Path(path), PATHS.get(path, ()))


def remove_ours(path: Path, patterns: Iterable[str]) -> None:
    """Remove what a cluster left at a path that was not there before it, and only that.

    Another program may have come meanwhile and keep its images, its network namespaces or its
    containers there. So of a folder goes what matches one of the patterns and is ours, and the
    folder itself only when nothing but empty folders is left in it.
    """
    if path.is_file():
        # The lock of iptables, an empty file; whoever holds it counts on its being this one.
        with contextlib.suppress(OSError), path.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        return
    for entry in [entry for pattern in patterns for entry in path.glob(pattern)]:
        if _is_ours(entry):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
    if path.is_dir() and not _holds_more(path):
        if path in _mounts():
            # `ip netns` mounts its folder on itself.
            unmount_below(path)
        shutil.rmtree(path, ignore_errors=True)


def _is_ours(entry: Path) -> bool:
    """Whether an entry that could be ours is: by where it points, or as nobody is behind it."""
    if entry.is_symlink():
        return entry.readlink().is_relative_to(STATE)
    if entry.is_socket():
        return not _is_answered(entry)
    # A container of runc tells the folder that it was made from.
    files = entry.glob("state.json") if entry.is_dir() else [entry]
    return any(sign in file.read_bytes() for file in files for sign in SIGNS)


def _is_answered(socket_file: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as asking:
        return asking.connect_ex(os.fspath(socket_file)) == 0


def _holds_more(folder: Path) -> bool:
    """Whether there is more below a folder than folders, a mount included."""
    if any(folder in point.parents for point in _mounts()):
        return True
    return any(name not in UNSIGNED for _, _, names in os.walk(folder) for name in names)


def unmount_below(folder: Path) -> None:
    """Unmount all that is mounted at or below a folder, the latest first."""
    for point in reversed(_mounts()):
        if point.is_relative_to(folder):
            with contextlib.suppress(subprocess.SubprocessError):
                subprocess.run(["umount", "-l", point], check=True, capture_output=True, timeout=30)


def _mounts() -> list[Path]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    # Spaces in a path are written as octal numbers.
    return [Path(line.split()[4].encode().decode("unicode_escape")) for line in lines]


def _sysctl(name: str) -> Path:
    return Path("/proc/sys") / name
