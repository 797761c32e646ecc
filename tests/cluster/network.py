"""The network: a bridge on the host and a namespace for each node, which is its whole host.

What the nodes do to iptables and to the network's sysctls stays in their namespaces and goes
with them. Nothing is forwarded by the host, so that pods reach each other and the host, and
nothing beyond.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

BRIDGE = "e3-bridge"
HOST_ADDRESS = "10.243.0.254"
SERVICES = "10.246.0.0/16"
FIRST_SERVICE = "10.246.0.1"
PODS = "10.244.0.0/16"
# What results of ours are called in the folder that all CNI plugins share.
PODS_NAME = "e3-pods"
NAMESPACES = Path("/run/netns")


def namespace(node: str) -> str:
    """The network namespace of a node; the host's end of its cable has the same name."""
    return f"e3-{node}"


def address(number: int) -> str:
    """A node's own address."""
    return f"10.243.0.{number}"


def pods(number: int) -> str:
    """The addresses of a node's pods."""
    return f"10.244.{number}.0/24"


def build(nodes: dict[str, int]) -> None:
    """Lay the network for nodes, each given with its number."""
    lines = [
        f"link add {BRIDGE} type bridge",
        f"address add {HOST_ADDRESS}/24 dev {BRIDGE}",
        f"link set {BRIDGE} up",
    ]
    for node, number in nodes.items():
        cable = namespace(node)
        lines += [
            f"netns add {cable}",
            f"link add {cable} type veth peer name eth0 netns {cable}",
            f"link set {cable} master {BRIDGE} up",
            f"route add {pods(number)} via {address(number)}",
        ]
    _ip(lines)
    for node, number in nodes.items():
        inside = [
            "link set lo up",
            f"address add {address(number)}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {HOST_ADDRESS}",
        ]
        others = [other for other in nodes.values() if other != number]
        inside += [f"route add {pods(other)} via {address(other)}" for other in others]
        _ip(inside, within=namespace(node))
        forward = ["tee", "/proc/sys/net/ipv4/ip_forward"]
        _run(["nsenter", f"--net={NAMESPACES / namespace(node)}", *forward], stdin="1")


def connect(node: str, connected: bool) -> None:
    """Plug a node's cable in, or pull it out: a real partition."""
    _ip([f"link set {namespace(node)} {'up' if connected else 'down'}"])


def remove(nodes: dict[str, int], before: set[str]) -> None:
    """Remove all of it: the namespaces of nodes and of the pods that came since, and the bridge."""
    ours = {namespace(node) for node in nodes} | {
        name for name in namespaces() - before if name.startswith("cni-")
    }
    for name in sorted(ours & namespaces()):
        # A cable goes at once, its namespace a moment later.
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip([f"link delete {name}"])
        _ip([f"netns delete {name}"])
    if Path(f"/sys/class/net/{BRIDGE}").exists():
        _ip([f"link delete {BRIDGE}"])


def namespaces() -> set[str]:
    """The names of the machine's network namespaces."""
    with contextlib.suppress(FileNotFoundError):
        return {entry.name for entry in NAMESPACES.iterdir()}
    return set()


def inhabitants(nodes: dict[str, int]) -> set[int]:
    """The processes that live in the nodes' namespaces, other than the caller."""
    inodes = set()
    for node in nodes:
        with contextlib.suppress(FileNotFoundError):
            inodes.add((NAMESPACES / namespace(node)).stat().st_ino)
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (entry / "ns" / "net").stat().st_ino in inodes:
                    found.add(int(entry.name))
    return found - {os.getpid()}


def _ip(lines: list[str], *, within: str = "") -> None:
    at = ["-netns", within] if within else []
    _run(["ip", *at, "-batch", "-"], stdin="\n".join(lines) + "\n")


def _run(command: list[str], *, stdin: str) -> None:
    subprocess.run(command, input=stdin, text=True, check=True, capture_output=True, timeout=30)
