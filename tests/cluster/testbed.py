"""The cluster's life: up within seconds, down without a trace, and the record in between.

The record is written before anything is changed, so that `down` finds its way after any crash.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests import s3_server
from tests.cluster import binaries, cgroups, figures, machine, network, tiny_images, waiting
from tests.cluster.cluster import Cluster, CommandFailed
from tests.cluster.control_plane import ControlPlane
from tests.cluster.footprint import Footprint, unmount_below
from tests.cluster.identities import Identities
from tests.cluster.node import PAUSE, Node
from tests.cluster.places import STATE, TEMPLATES, cache, logs
from tests.cluster.processes import Process, Processes, kill_where, stop
from tests.s3_server import S3Server

NODES = {"n1": 1, "n2": 2}
GPU, GPUS = "nvidia.com/gpu", "8"
READY_SECONDS = 120.0
# A kubelet reports its node's state every two seconds.
SETTLED_SECONDS = 5.0
RECORD = STATE / "record.json"


class Unavailable(Exception):
    """No cluster can be had here now; the message is the reason, in one sentence."""


class Occupied(Unavailable):
    """Another process has the cluster of this machine, which can hold one."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """How the machine was found, whose cluster it is, and its S3 server once all is up."""

    boot: str
    footprint: Footprint
    owner: Process | None
    s3: S3Server | None = None

    def write(self) -> None:
        """Put it whole into the state folder."""
        part = RECORD.with_suffix(".part")
        part.write_text(json.dumps(asdict(self)))
        part.rename(RECORD)

    @classmethod
    def read(cls) -> Record | None:
        """The record of the last cluster that was not taken down."""
        with contextlib.suppress(FileNotFoundError):
            fields = json.loads(RECORD.read_text())
            fields["footprint"] = Footprint(**fields["footprint"])
            fields["owner"] = Process(**fields["owner"]) if fields["owner"] else None
            fields["s3"] = S3Server(**fields["s3"]) if fields["s3"] else None
            return cls(**fields)
        return None


@contextlib.contextmanager
def running_cluster() -> Iterator[Cluster]:
    """A cluster for as long as it is needed.

    That of KUBECONFIG, if given; else one that `up` left running; else one of our own, which is
    taken down at the end.

    Raises:
        Unavailable: when this machine cannot hold one; Occupied when another process has it.
    """
    if given := os.environ.get("KUBECONFIG"):
        try:
            binaries.program("kubectl")
        except binaries.NotBuilt as error:
            raise Unavailable(f"KUBECONFIG is given, but {error}") from error
        yield Cluster(kubeconfig=Path(given))
        return
    me = os.getpid()
    cluster, own = up(owner=Process.of(me, name="tests"))
    try:
        yield cluster
    finally:
        if own:
            down()


def up(*, owner: Process | None = None) -> tuple[Cluster, bool]:
    """The running cluster, and whether it was started now; with an owner it is for that process.

    Raises:
        Unavailable: when this machine cannot hold one; Occupied when another process has it.
    """
    if reason := machine.obstacle():
        raise Unavailable(reason)
    with lock():
        record = Record.read()
        if record and _lives(record):
            if record.owner and record.owner != owner:
                raise Occupied(f"the cluster on this machine is that of process {record.owner.pid}")
            return _cluster(record), False
        _remove()
        start = time.monotonic()
        try:
            cluster = _start(owner)
        except BaseException:
            _remove()
            raise
        figures.record(cluster_up_seconds=round(time.monotonic() - start, 1))
        return cluster, True


def down() -> bool:
    """Take down whatever cluster is recorded, alive or half-dead; whether there was one."""
    with lock():
        start = time.monotonic()
        if not _remove():
            return False
        figures.record(cluster_down_seconds=round(time.monotonic() - start, 1))
        return True


def revive_kubelet(cluster: Cluster, name: str) -> None:
    """Start the kubelet of a node again, which was killed, and wait until the node is ready."""
    assert cluster.processes is not None, "a cluster of ours"
    (node,) = (one for one in cluster.nodes if one.name == name)
    processes = cluster.processes
    node.start_kubelet(processes, _identities())

    # One that begins anew takes back what no device plugin told it, some time after it is ready.
    def given_and_kept() -> bool:
        _give_gpus(cluster, name, processes)
        time.sleep(SETTLED_SECONDS)
        return _ready(cluster)

    waiting.until(given_and_kept, f"{name} is ready again", seconds=READY_SECONDS)


def _start(owner: Process | None) -> Cluster:
    STATE.mkdir(mode=0o700)
    record = Record(boot=_boot(), footprint=Footprint.taken(), owner=owner)
    record.write()
    shutil.rmtree(logs(), ignore_errors=True)
    processes = _processes()
    network.build(NODES)
    s3, command = s3_server.new_server(STATE / "s3", network.HOST_ADDRESS)
    weed = processes.start("s3", command)
    record = replace(record, s3=s3)
    cluster = _cluster(record)
    identities = _identities()
    identities.make(list(NODES))
    plane = ControlPlane(folder=STATE, node="n1", identities=identities, processes=processes)
    plane.start()
    for node in cluster.nodes:
        node.start_containers(processes)
    for node in cluster.nodes:
        node.wait_for_containers(processes)
        node.import_image(tiny_images.archive("pause"), PAUSE)
        node.import_image(tiny_images.archive("probe"), tiny_images.PROBE)
    plane.wait()
    plane.start_controllers()
    for node in cluster.nodes:
        node.start_pods(processes, identities)
    cluster.kubectl("apply", f"--filename={TEMPLATES / 'access.yaml'}")
    if not s3_server.answers(s3, weed.alive):
        raise waiting.Late(f"the S3 server did not start; its log is {processes.log('s3')}")
    for name in NODES:
        _give_gpus(cluster, name, processes)
    what = "both nodes are ready, and controllers work"
    waiting.until(lambda: _ready(cluster), what, seconds=READY_SECONDS, ended=processes.ended)
    record.write()
    return cluster


def _give_gpus(cluster: Cluster, node: str, processes: Processes) -> None:
    """Let a node say that it has GPUs, as a device plugin would."""
    path = f"/status/capacity/{GPU.replace('/', '~1')}"
    patch = json.dumps([{"op": "add", "path": path, "value": GPUS}])
    command = ["patch", "node", node, "--subresource=status", "--type=json", f"--patch={patch}"]

    def patched() -> bool:
        try:
            cluster.kubectl(*command)
        except CommandFailed:
            return False
        return True

    what = f"{node} has registered"
    waiting.until(patched, what, seconds=READY_SECONDS, ended=processes.ended)


def _ready(cluster: Cluster) -> bool:
    try:
        cluster.get("serviceaccount", "default", "--namespace=default")
    except CommandFailed:
        return False
    for node in cluster.get("nodes"):
        conditions = {each["type"]: each["status"] for each in node["status"]["conditions"]}
        gpus = node["status"]["allocatable"].get(GPU)
        if conditions.get("Ready") != "True" or gpus != GPUS:
            return False
    return True


def _remove() -> bool:
    """Undo all that a recorded cluster did; what is gone already is passed over."""
    record = Record.read()
    if not record:
        # Died between making the folder and writing the record: nothing was changed yet.
        shutil.rmtree(STATE, ignore_errors=True)
        return False
    processes = _processes()
    stop(processes.named("kubelet", "kube-proxy"), patience=2.0)
    if record.boot == _boot():
        for node in _nodes():
            if any(each.alive() for each in processes.named(f"containerd-{node.name}")):
                empty(node)
    stop(processes.recorded(), patience=1.0)
    for name in NODES:
        kill_where(cgroups.members(name))
    kill_where(network.inhabitants(NODES))
    for folder in (STATE, cache() / "nodes"):
        unmount_below(folder)
    network.remove(NODES, set(record.footprint.namespaces))
    for name in NODES:
        cgroups.remove(name)
    record.footprint.restore()
    shutil.rmtree(STATE)
    return True


def empty(node: Node) -> None:
    """Remove a node's containers, as far as its containerd answers: it is killed next anyway."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        node.remove_containers()


def _lives(record: Record) -> bool:
    """Whether a recorded cluster still stands, as far as its processes and its owner tell."""
    owned = record.owner is None or record.owner.alive()
    whole = record.s3 is not None and not _processes().ended()
    return record.boot == _boot() and owned and whole


def _cluster(record: Record) -> Cluster:
    kubeconfig = _identities().kubeconfig("admin")
    return Cluster(kubeconfig=kubeconfig, nodes=_nodes(), s3=record.s3, processes=_processes())


def _identities() -> Identities:
    return Identities(STATE / "identities", network.address(NODES["n1"]))


def _nodes() -> tuple[Node, ...]:
    return tuple(
        Node(name=name, number=number, folder=STATE / name) for name, number in NODES.items()
    )


def _processes() -> Processes:
    return Processes(STATE / "processes.jsonl", logs())


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@contextlib.contextmanager
def lock() -> Iterator[None]:
    """One process at a time starts or removes."""
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / "testbed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
