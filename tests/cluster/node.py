"""A node: containerd, the kubelet and the proxy, in a network namespace that is its whole host."""

from __future__ import annotations

import subprocess
import tarfile
from collections.abc import Collection
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from string import Template

from tests.cluster import cgroups, network, waiting
from tests.cluster.binaries import program
from tests.cluster.identities import Identities
from tests.cluster.places import TEMPLATES, cache
from tests.cluster.processes import Processes

PAUSE = "localhost/pause:1"
PLUGINS = "/usr/lib/cni"
START_SECONDS = 60.0
IMPORT_SECONDS = 900.0
# A containerd that is stuck must not hold up whoever removes it.
ANSWER_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node by its name and number; its life is in `folder`, its images stay in the cache."""

    name: str
    number: int
    folder: Path

    @property
    def address(self) -> str:
        """The node's own address."""
        return network.address(self.number)

    @property
    def socket(self) -> Path:
        """Where its containerd listens."""
        return self.folder / "containerd.sock"

    def start_containers(self, processes: Processes) -> None:
        """Start containerd."""
        for folder in ("cni", "kubelet", "pod-logs"):
            (self.folder / folder).mkdir(parents=True)
        cgroups.make(self.name)
        root = cache() / "nodes" / self.name
        root.mkdir(parents=True, exist_ok=True)
        self._write(
            "containerd.toml",
            root=root,
            state=self.folder / "containerd",
            socket=self.socket,
            pause=PAUSE,
            plugins=PLUGINS,
            cni=self.folder / "cni",
        )
        self._write(
            "cni/pods.conflist",
            name=network.PODS_NAME,
            leases=self.folder / "leases",
            pods=network.pods(self.number),
        )
        command = ["/usr/bin/containerd", f"--config={self.folder / 'containerd.toml'}"]
        self._start(processes, "containerd", command)

    def wait_for_containers(self, processes: Processes) -> None:
        """Wait until containerd answers, and remove what a cluster that died left in it."""
        what = f"containerd of {self.name} answers"
        waiting.until(self._answers, what, seconds=START_SECONDS, ended=processes.ended)
        self.remove_containers()

    def start_pods(self, processes: Processes, identities: Identities) -> None:
        """Start the kubelet and the proxy, which need the API server."""
        self.start_kubelet(processes, identities)
        proxy = identities.kubeconfig("system:kube-proxy")
        self._write("kube-proxy.yaml", node=self.name, pods=network.PODS, kubeconfig=proxy)
        command = [program("kube-proxy"), f"--config={self.folder / 'kube-proxy.yaml'}"]
        self._start(processes, "kube-proxy", command)

    def start_kubelet(self, processes: Processes, identities: Identities) -> None:
        """Start the kubelet, for the first time or after it was killed."""
        kubelet = identities.kubeconfig(f"system:node:{self.name}")
        self._write(
            "kubelet.yaml",
            address=self.address,
            socket=self.socket,
            pod_logs=self.folder / "pod-logs",
            plugins=self.folder / "volume-plugins",
            cgroup=cgroups.name(self.name),
            dns=identities.address,
        )
        command = [
            program("kubelet"),
            f"--config={self.folder / 'kubelet.yaml'}",
            f"--kubeconfig={kubelet}",
            f"--root-dir={self.folder / 'kubelet'}",
            f"--cert-dir={self.folder / 'kubelet' / 'pki'}",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
        ]
        self._start(processes, "kubelet", command)

    def remove_containers(self) -> None:
        """End and remove every container; images stay."""
        for kind, force in (("tasks", ["--force"]), ("containers", [])):
            if held := self.ctr(kind, "list", "--quiet", seconds=ANSWER_SECONDS).split():
                self.ctr(kind, "delete", *force, *held, seconds=ANSWER_SECONDS)

    def import_image(self, archive: Path, name: str) -> None:
        """Put an OCI archive into containerd under a name, unless it has it already."""
        held = [line.split() for line in self.ctr("images", "list").splitlines()]
        if not any(line[0] == name and line[2] == _index_digest(archive) for line in held):
            self.ctr("images", "import", "--index-name", name, str(archive))

    def forget_images(self, kept: Collection[str]) -> None:
        """Remove earlier images of the project, some of which are several gigabytes.

        Args:
            kept: the names of those that stay; what has lost its name to a newer image goes too.
        """
        lines = self.ctr("images", "list").splitlines()[1:]
        held = [(line.split()[0], line.split()[2]) for line in lines]
        ours = "localhost/eagle3-"
        living = {
            digest
            for name, digest in held
            if not name.startswith("sha256:") and (name in kept or not name.startswith(ours))
        }
        stale = [name for name, digest in held if digest not in living]
        if stale:
            self.ctr("images", "remove", "--sync", *stale)

    def ctr(self, *arguments: str, seconds: float = IMPORT_SECONDS) -> str:
        """What containerd's own client answers, in the namespace of Kubernetes."""
        command = ["/usr/bin/ctr", f"--address={self.socket}", "--namespace=k8s.io", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        if done.returncode:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def _answers(self) -> bool:
        command = ["/usr/bin/ctr", f"--address={self.socket}", "version"]
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0

    def _start(self, processes: Processes, program: str, command: list[str]) -> None:
        where = network.namespace(self.name)
        processes.start(f"{program}-{self.name}", command, namespace=where)

    def _write(self, file: str, **values: object) -> None:
        template = Template((TEMPLATES / Path(file).name).read_text())
        (self.folder / file).write_text(template.substitute(values))


def _index_digest(archive: Path) -> str:
    """The digest by which containerd knows an imported archive: that of its index."""
    with tarfile.open(archive) as content:
        index = content.extractfile("index.json")
        assert index, f"{archive} is no OCI archive"
        return f"sha256:{sha256(index.read()).hexdigest()}"
