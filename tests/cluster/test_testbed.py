"""The test cluster is what the tests of it take it for: two nodes, real pods, real services."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from tests.cluster import testbed
from tests.cluster.cluster import Cluster, CommandFailed, Namespace
from tests.cluster.tiny_images import PROBE

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

UNPRIVILEGED = {
    "runAsNonRoot": True,
    "runAsUser": 10001,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONFINED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def pod(name: str, *command: str, node: str, gpus: int = 0) -> dict[str, Any]:
    """A pod of the probe, as confined as the namespace demands."""
    container = {
        "name": "probe",
        "image": PROBE,
        "imagePullPolicy": "Never",
        "args": list(command),
        "securityContext": CONFINED,
        "resources": {"limits": {"nvidia.com/gpu": gpus}},
    }
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 2,
        "nodeSelector": {"kubernetes.io/hostname": node},
        "automountServiceAccountToken": False,
        "securityContext": UNPRIVILEGED,
        "containers": [container],
    }
    metadata = {"name": name, "labels": {"app": name}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def ended(namespace: Namespace, name: str) -> str:
    """Wait until a pod has succeeded; what it printed."""
    condition = "--for=jsonpath={.status.phase}=Succeeded"
    namespace.kubectl("wait", condition, f"pod/{name}", "--timeout=90s")
    return namespace.kubectl("logs", name)


def test_two_nodes_are_ready_with_eight_gpus_each(our_cluster: Cluster) -> None:
    nodes = {node["metadata"]["name"]: node["status"] for node in our_cluster.get("nodes")}
    assert set(nodes) == set(testbed.NODES)
    for status in nodes.values():
        assert status["allocatable"]["nvidia.com/gpu"] == "8"
        assert {"type": "Ready", "status": "True"}.items() <= status["conditions"][-1].items()


def test_a_pod_on_one_node_finds_a_service_on_the_other_by_name(
    our_cluster: Cluster, namespace: Namespace
) -> None:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "greeting"},
        "spec": {"selector": {"app": "server"}, "ports": [{"port": 80, "targetPort": 8000}]},
    }
    asking = pod("asking", "fetch", "http://greeting", node="n2", gpus=8)
    namespace.apply(service, pod("server", "serve", "8000", "hello", node="n1"), asking)
    assert ended(namespace, "asking") == "200 hello\n"


def test_a_pod_reaches_the_s3_server(our_cluster: Cluster, namespace: Namespace) -> None:
    assert our_cluster.s3
    for node in testbed.NODES:
        url = f"{our_cluster.s3.endpoint}/healthz"
        namespace.apply(pod(f"from-{node}", "fetch", url, node=node))
    for node in testbed.NODES:
        assert ended(namespace, f"from-{node}").startswith("200")


def test_a_pod_that_is_not_confined_is_refused(namespace: Namespace) -> None:
    loose = textwrap.dedent("""
        apiVersion: v1
        kind: Pod
        metadata: {name: loose}
        spec: {containers: [{name: loose, image: anything}]}
    """)
    with pytest.raises(CommandFailed, match="violates PodSecurity"):
        namespace.apply(loose)


@pytest.mark.parametrize("major", [3, 4])
def test_helm_speaks_to_it(namespace: Namespace, major: int) -> None:
    assert namespace.helm("list", "--short", major=major) == ""
    assert namespace.helm("version", "--short", major=major).startswith(f"v{major}.")
