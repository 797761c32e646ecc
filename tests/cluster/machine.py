"""Whether this machine can hold the cluster; where it cannot, the reason in one sentence."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

from tests.cluster import binaries, cgroups
from tests.cluster.places import MODULES, cache

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


def insisted() -> str:
    """What EAGLE3_CLUSTER asks of tests that find no cluster.

    `required`: to fail. `expected`, as `make test` finds by `expected()`: to fail, but where
    another process has the machine's. Anything else, such as `optional`: to be skipped, with the
    reason.
    """
    return os.environ.get("EAGLE3_CLUSTER", "")


def obstacle() -> str | None:
    """Why no cluster can be started here; None where it can."""
    if absent := binaries.absent():
        names = ", ".join(programs.name for programs in absent)
        return foundation() or f"not built yet: {names}; run `make testbed`"
    return foundation()


def expected() -> str | None:
    """Why the tests of the cluster may be skipped here; None where they must run.

    Beyond `foundation`: root of a container may have all that is asked for, and not the right to
    use it. That programs are not built is no reason: where they could be, the build has failed.
    """
    if os.environ.get("KUBECONFIG"):
        return None
    if reason := foundation():
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
    return (_go() if binaries.absent() else None) or _short_disk()


def _go() -> str | None:
    """What is in the way of building, of Go."""
    modules = "".join(path.read_text() for path in MODULES.glob("*/go.mod"))
    wanted = max(_version(number) for number in re.findall(r"^go (\S+)$", modules, re.MULTILINE))
    needs = f"the programs of the test cluster are built by Go {'.'.join(map(str, wanted))}"
    if not shutil.which("go"):
        return f"{needs}, which is missing"
    # Of any other folder's go.mod and of a newer Go on the net it shall say nothing.
    environment = {**os.environ, "GOTOOLCHAIN": "local", "GOFLAGS": ""}
    command = ["go", "env", "GOVERSION"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/")
    found = done.stdout.strip().removeprefix("go")
    return f"{needs}, and this is {found or 'none'}" if _version(found) < wanted else None


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def _short_disk() -> str | None:
    cache().mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache()).free >> 30
    wanted = BUILD_GIB if binaries.absent() else RUN_GIB
    if free < wanted:
        return f"the test cluster needs {wanted} GiB in {cache()}, and {free} are free"
    return None
