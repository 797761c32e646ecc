"""What the cluster changes on the machine outside of its own folders, and how it is undone."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import network

# The kubelet sets these on its start.
SYSCTLS = (
    "kernel/keys/root_maxbytes",
    "kernel/keys/root_maxkeys",
    "kernel/panic",
    "kernel/panic_on_oops",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
)

# Paths built into containerd, its shims, the CNI library and the kubelet.
PATHS = (
    "/etc/cni",
    "/opt/cni",
    "/opt/containerd",
    "/run/containerd",
    "/run/netns",
    "/run/xtables.lock",
    "/usr/libexec/kubernetes",
    "/var/lib/cni",
    "/var/lib/containerd",
    "/var/lib/kubelet",
    "/var/log/containers",
    "/var/log/pods",
)


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
        """Set sysctls back, and remove the paths that were not there."""
        for name, value in self.sysctls.items():
            if _sysctl(name).read_text() != value:
                _sysctl(name).write_text(value)
        for path in self.absent:
            unmount_below(Path(path))
            if Path(path).is_dir():
                # Another program may use such a folder by now; what it puts there is its own.
                shutil.rmtree(path, ignore_errors=True)
            else:
                Path(path).unlink(missing_ok=True)


def unmount_below(folder: Path) -> None:
    """Unmount all that is mounted at or below a folder, the latest first."""
    for point in reversed(_mounts()):
        if point.is_relative_to(folder):
            with contextlib.suppress(subprocess.CalledProcessError):
                subprocess.run(["umount", "-l", point], check=True, capture_output=True, timeout=30)


def _mounts() -> list[Path]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    # Spaces in a path are written as octal numbers.
    return [Path(line.split()[4].encode().decode("unicode_escape")) for line in lines]


def _sysctl(name: str) -> Path:
    return Path("/proc/sys") / name
