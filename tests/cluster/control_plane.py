"""The control plane, all on the first node: etcd, API server, controllers, scheduler and DNS."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from string import Template

from tests.cluster import network, waiting
from tests.cluster.binaries import program
from tests.cluster.identities import Identities
from tests.cluster.places import TEMPLATES
from tests.cluster.processes import Processes

READY_SECONDS = 120.0
# The nodes report every two seconds; a cut-off one is missed soon, a busy one is not.
GRACE = "12s"


@dataclass(frozen=True, kw_only=True)
class ControlPlane:
    """Where the control plane lives, and by what it is known."""

    folder: Path
    node: str
    identities: Identities
    processes: Processes

    @property
    def address(self) -> str:
        """The address of its node, on which everything listens."""
        return self.identities.address

    def start(self) -> None:
        """Start etcd and the API server."""
        self._start("etcd", *self._etcd())
        self._start("kube-apiserver", *self._apiserver())

    def wait(self) -> None:
        """Wait until the API server serves.

        Raises:
            Late: when it has ended, or does not in time.
        """
        what = "the API server is ready"
        waiting.until(self._ready, what, seconds=READY_SECONDS, ended=self.processes.ended)

    def start_controllers(self) -> None:
        """Start what needs the API server, and gives up when it does not find it soon."""
        scheduler = self.identities.kubeconfig("system:kube-scheduler")
        self._start("kube-controller-manager", *self._controllers())
        self._start(
            "kube-scheduler", f"--kubeconfig={scheduler}", "--leader-elect=false", "--secure-port=0"
        )
        corefile = self.folder / "Corefile"
        template = Template((TEMPLATES / "Corefile").read_text())
        kubeconfig = self.identities.kubeconfig("dns")
        corefile.write_text(template.substitute(dns=self.address, kubeconfig=kubeconfig))
        self._start("coredns", f"-conf={corefile}")

    def _start(self, name: str, *arguments: str) -> None:
        where = network.namespace(self.node)
        self.processes.start(name, [program(name), *arguments], namespace=where)

    def _ready(self) -> bool:
        context = ssl.create_default_context(cafile=str(self.identities.authority))
        url = f"https://{self.address}:6443/readyz"
        try:
            with urllib.request.urlopen(url, timeout=2, context=context) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def _etcd(self) -> list[str]:
        url = "http://127.0.0.1:2379"
        return [
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}",
            "--listen-peer-urls=http://127.0.0.1:2380",
            # It lives no longer than the tests.
            "--unsafe-no-fsync",
        ]

    def _apiserver(self) -> list[str]:
        who = self.identities
        return [
            "--etcd-servers=http://127.0.0.1:2379",
            f"--bind-address={self.address}",
            f"--advertise-address={self.address}",
            f"--service-cluster-ip-range={network.SERVICES}",
            f"--tls-cert-file={who.certificate}",
            f"--tls-private-key-file={who.key}",
            f"--client-ca-file={who.authority}",
            # Without these, components that aggregate miss a ConfigMap and say so without end.
            f"--requestheader-client-ca-file={who.authority}",
            "--requestheader-allowed-names=aggregator",
            "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--token-auth-file={who.tokens}",
            "--authorization-mode=Node,RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={who.signer}",
            f"--service-account-signing-key-file={who.signer}",
            "--kubelet-preferred-address-types=InternalIP",
            "--allow-privileged=true",
            "--profiling=false",
        ]

    def _controllers(self) -> list[str]:
        who = self.identities
        return [
            f"--kubeconfig={who.kubeconfig('system:kube-controller-manager')}",
            "--use-service-account-credentials",
            f"--service-account-private-key-file={who.signer}",
            f"--root-ca-file={who.authority}",
            f"--node-monitor-grace-period={GRACE}",
            "--node-monitor-period=2s",
            f"--flex-volume-plugin-dir={self.folder / 'volume-plugins'}",
            "--leader-elect=false",
            "--secure-port=0",
        ]
