"""A run gets on with what its network policy lets out, and with nothing more.

The cluster's network does not enforce policies. Here a node does, by rules of its own made from the
rendered policies: from every pod the egress that a stage has, and the runner's to the API server.
"""

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from tests.cluster import network, waiting
from tests.cluster.cluster import Cluster, CommandFailed, Namespace
from tests.cluster.release import Release, give_credentials, values_of
from tests.tiny_run import artifact_at

pytestmark = [pytest.mark.cluster, pytest.mark.images, pytest.mark.slow, pytest.mark.timeout(2400)]

CHAIN = "E3-POLICY"
EVERYWHERE = [{"ipBlock": {"cidr": "0.0.0.0/0"}}]


def lines_of(rule: dict[str, Any], chain: str, where: str) -> Iterator[str]:
    """An egress rule as lines of a chain; IPv6 is not in use."""
    for block in (one["ipBlock"] for one in rule.get("to", EVERYWHERE)):
        if ":" in block["cidr"]:
            continue
        yield from (f"-A {chain} -d {each} -j RETURN" for each in block.get("except", ()))
        cidr = where or block["cidr"]
        for port in rule["ports"]:
            match = f"-p {port['protocol'].lower()} --dport {port['port']}"
            yield f"-A {chain} -d {cidr} {match} -j ACCEPT"


def rules(policies: list[dict[str, Any]], pods: str) -> str:
    """What iptables-restore puts in for the pods of a node."""
    declared, filled = [CHAIN], []
    filled.append(f"-A {CHAIN} -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT")
    for policy in policies:
        of_runner = policy["metadata"]["name"].endswith("-runner")
        api_server = f"{network.address(1)}/32" if of_runner else ""
        for rule in policy["spec"]["egress"]:
            chain = f"{CHAIN}-{len(declared)}"
            declared.append(chain)
            filled += [f"-A {CHAIN} -j {chain}", *lines_of(rule, chain, api_server)]
    filled.append(f"-A {CHAIN} -j REJECT")
    for hook in ("INPUT", "FORWARD"):
        filled.append(f"-I {hook} 1 -s {pods} -j {CHAIN}")
    filled.append(f"-I FORWARD 1 -d {pods} -m conntrack --ctstate NEW -j REJECT")
    return "\n".join(["*filter", *(f":{one} -" for one in declared), *filled, "COMMIT", ""])


def undone(text: str) -> str:
    """The rules that take those away again."""
    lines = text.splitlines()
    chains = [line.split()[0][1:] for line in lines if line.startswith(":")]
    hooks = [line for line in lines if line.startswith("-I")]
    deleted = [f"-D {hook.split()[1]} {hook.split(maxsplit=3)[3]}" for hook in hooks]
    emptied = [f"-F {chain}" for chain in chains] + [f"-X {chain}" for chain in chains]
    return "\n".join(["*filter", *deleted, *emptied, "COMMIT", ""])


@contextlib.contextmanager
def enforced(cluster: Cluster, policies: list[dict[str, Any]]) -> Iterator[None]:
    """Both nodes let their pods do what the policies say, and no more."""
    applied = []
    try:
        for node in cluster.nodes:
            text = rules(policies, network.pods(node.number))
            restore(node.name, text)
            applied.append((node.name, text))
        yield
    finally:
        for name, text in applied:
            restore(name, undone(text))


def restore(node: str, text: str) -> None:
    where = f"--net=/run/netns/{network.namespace(node)}"
    command = ["nsenter", where, "iptables-restore", "--noflush", "--wait"]
    done = subprocess.run(command, input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, (done.stderr, text)


@pytest.fixture
def release(
    loaded: Cluster, inputs: dict[str, Any], namespace: Namespace, tmp_path: Path
) -> Release:
    assert loaded.s3 is not None
    give_credentials(namespace, loaded.s3)
    number = f"n{time.time_ns() // 10**6 % 10**9}"
    values = values_of(loaded.s3, inputs, run={"id": number})
    return Release(namespace=namespace, name="policed", folder=tmp_path, values=values)


def policies_of(release: Release, **values: Any) -> list[dict[str, Any]]:
    rendered = yaml.safe_load_all(release.helm("template", **values))
    return [one for one in rendered if one and one["kind"] == "NetworkPolicy"]


def test_a_run_gets_on_with_what_its_policy_lets_out(release: Release, loaded: Cluster) -> None:
    assert loaded.s3 is not None
    port = urlsplit(loaded.s3.endpoint).port
    store = {"extraEgress": [{"ports": [{"protocol": "TCP", "port": port}]}]}
    with enforced(loaded, policies_of(release, networkPolicy=store)):
        release.helm("install", networkPolicy=store)
        release.wait("prepare", seconds=300)
        assert artifact_at(release.store(release.run_name()), "prepare").manifest.total_samples
        waiting.until(lambda: "regenerate" in release.jobs(), "the runner goes on", seconds=120)
        release.namespace.helm("uninstall", release.name)


def test_a_store_that_the_policy_shuts_out_is_found_by_helm_test(
    release: Release, loaded: Cluster
) -> None:
    shut = {"extraEgress": []}
    release.helm("install", networkPolicy=shut, runner={"enabled": False})
    release.namespace.helm("test", release.name)
    with (
        enforced(loaded, policies_of(release, networkPolicy=shut)),
        pytest.raises(CommandFailed, match="policed-test"),
    ):
        release.namespace.helm("test", release.name, "--timeout=240s")
    pod = release.namespace.get("pod", "policed-test")
    ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    assert ended["exitCode"] == 69
    release.namespace.helm("uninstall", release.name)
