"""Whether this machine can hold the cluster; where it cannot, the reason in one sentence."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from tests.cluster import binaries, cgroups
from tests.cluster.places import cache

# Debian's names, and a program of each.
TOOLS = {
    "containerd": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "iproute2": "ip",
    "containernetworking-plugins": "/usr/lib/cni/bridge",
    "util-linux": "nsenter",
    "openssl": "openssl",
}
BUILD_GIB = 25
RUN_GIB = 3


def obstacle() -> str | None:
    """Why no cluster can be started here; None where it can."""
    if absent := binaries.absent():
        names = ", ".join(programs.name for programs in absent)
        return foundation() or f"not built yet: {names}; run `make testbed`"
    return foundation()


def expected() -> str | None:
    """Why the tests of the cluster may be skipped here; None where they must run.

    Beyond `obstacle`: root of a container may have all that is asked for, and not the right to use
    it.
    """
    if os.environ.get("KUBECONFIG"):
        return None
    if reason := obstacle():
        return reason
    namespaces = ["unshare", "--net", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    done = subprocess.run(namespaces, capture_output=True, text=True)
    if done.returncode:
        return f"namespaces of their own are refused to root here: {done.stderr.strip()}"
    if not cgroups.writable():
        return "the controllers of cgroups cannot be written here"
    return None


def foundation() -> str | None:
    """What is in the way even of building: the system, the rights, tools, the disk."""
    if sys.platform != "linux":
        return f"the test cluster needs Linux, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "the test cluster needs root, for network namespaces and containers"
    if not cgroups.supported():
        return "the test cluster is made for cgroups of version 1, which are not mounted here"
    path = f"{os.environ.get('PATH', '')}:/sbin:/usr/sbin"
    missing = [package for package, tool in TOOLS.items() if not shutil.which(tool, path=path)]
    if missing:
        return f"the test cluster needs {', '.join(missing)}; apt-get installs them"
    if binaries.absent() and not shutil.which("go"):
        return "the programs of the test cluster are built by Go 1.26, which is missing"
    return _short_disk()


def _short_disk() -> str | None:
    cache().mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache()).free >> 30
    wanted = BUILD_GIB if binaries.absent() else RUN_GIB
    if free < wanted:
        return f"the test cluster needs {wanted} GiB in {cache()}, and {free} are free"
    return None
