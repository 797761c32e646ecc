"""A running cluster as a test sees it: its kubectl and helm, its nodes, its S3 server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster import network
from tests.cluster.binaries import program
from tests.cluster.node import Node
from tests.cluster.processes import Processes, stop
from tests.s3_server import S3Server

COMMAND_SECONDS = 300.0


class CommandFailed(Exception):
    """kubectl or helm ended with an error; the message is the command and what it said."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster and how to reach it; one that a person gives has no nodes and no S3 server."""

    kubeconfig: Path
    nodes: tuple[Node, ...] = ()
    s3: S3Server | None = None
    processes: Processes | None = None

    @property
    def ours(self) -> bool:
        """Whether we started it, so that its nodes may be operated on."""
        return bool(self.nodes)

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """What kubectl prints.

        Raises:
            CommandFailed: with what it said on its error output.
        """
        return self._run([program("kubectl"), *arguments], stdin)

    def helm(self, *arguments: str, major: int = 4) -> str:
        """What Helm prints, of version 4 or 3.

        Raises:
            CommandFailed: with what it said on its error output.
        """
        group = {3: "clients-helm3", 4: "clients" if self.ours else ""}[major]
        return self._run([program("helm", of=group), *arguments], None)

    def get(self, *arguments: str) -> Any:
        """Objects as `kubectl get` finds them, parsed; a list is its items."""
        found = json.loads(self.kubectl("get", *arguments, "--output=json"))
        return found["items"] if found["kind"] == "List" else found

    def import_image(self, archive: Path, name: str) -> None:
        """Put an OCI archive into every node under a name; nothing is done where it is already."""
        for node in self.nodes:
            node.import_image(archive, name)

    def pause(self, name: str, stopped: bool) -> None:
        """Stop a process of ours in its tracks, or let it go on."""
        for process in self.processes.named(name) if self.processes else ():
            process.signal(signal.SIGSTOP if stopped else signal.SIGCONT)

    def kill(self, name: str) -> None:
        """Kill a process of ours where it stands, and wait until it is gone."""
        stop(self.processes.named(name) if self.processes else (), patience=0.0)

    def cut(self, node: str) -> None:
        """Pull the node's network cable out."""
        network.connect(node, False)

    def mend(self, node: str) -> None:
        """Plug it in again."""
        network.connect(node, True)

    def _run(self, command: Sequence[str], stdin: str | None) -> str:
        done = subprocess.run(
            command,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        if done.returncode:
            words = " ".join([Path(command[0]).name, *command[1:]])
            raise CommandFailed(f"{words}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout


@dataclass(frozen=True, kw_only=True)
class Namespace:
    """A namespace of one test, with commands that stay in it."""

    cluster: Cluster
    name: str

    def make(self) -> None:
        """Make it, to admit only pods of the standard `restricted`, and wait until it does."""
        enforced = {"pod-security.kubernetes.io/enforce": "restricted"}
        metadata = {"name": self.name, "labels": enforced}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        # No pod is admitted before its service account is there.
        self.kubectl("wait", "--for=create", "serviceaccount/default", "--timeout=60s")

    def delete(self) -> None:
        """Begin to delete it, with all that is in it."""
        self.cluster.kubectl("delete", "namespace", self.name, "--wait=false")

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """What kubectl prints, in this namespace."""
        return self.cluster.kubectl(f"--namespace={self.name}", *arguments, stdin=stdin)

    def helm(self, *arguments: str, major: int = 4) -> str:
        """What Helm prints, in this namespace."""
        return self.cluster.helm(f"--namespace={self.name}", *arguments, major=major)

    def get(self, *arguments: str) -> Any:
        """Objects of this namespace, parsed; a list is its items."""
        return self.cluster.get(f"--namespace={self.name}", *arguments)

    def apply(self, *objects: dict[str, Any] | str) -> None:
        """Apply objects, or texts of YAML."""
        texts = [each if isinstance(each, str) else json.dumps(each) for each in objects]
        self.kubectl("apply", "--filename=-", stdin="\n---\n".join(texts))
