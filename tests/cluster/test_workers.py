"""Extraction on two nodes of eight GPUs: shared out, scaled, and disturbed in every way.

The verifier is the demonstration's and the rows are real chats, so that an extraction lasts
minutes. Whatever happens on the way, the artefact holds what an undisturbed extraction holds.
"""

import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3 import artifact as artifacts
from eagle3.store import Store, open_store
from eagle3.work import Work
from jobs import prepare
from tests.cluster import figures, testbed, waiting
from tests.cluster.cluster import Cluster, Namespace
from tests.cluster.release import (
    Release,
    give_credentials,
    merged,
    pods_of,
    upload_demo,
    values_of,
)
from tests.s3_server import BUCKET
from tests.tiny_run import artifact_at, content_of

pytestmark = [pytest.mark.cluster, pytest.mark.images, pytest.mark.slow, pytest.mark.timeout(2400)]

STAGE = "extract"
UNIT_ROWS = 4


@pytest.fixture(scope="module")
def config(loaded: Cluster, inputs: dict[str, Any], tmp_path_factory: Any) -> dict[str, Any]:
    """A configuration whose extraction reads rows that are prepared already."""
    folder = tmp_path_factory.mktemp("smollm")
    settings = merged(
        merged(inputs, upload_demo(folder)),
        {
            "prepare": {"max_seq_len": 512, "max_conversations": 100},
            "regenerate": {"enabled": False},
            "extract": {"unit_rows": UNIT_ROWS},
        },
    )
    prepared = f"s3://{BUCKET}/prepared"
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings))
    assert prepare.main(["--config", str(path), "--store", prepared]) == 0
    rows = {f"{STAGE}.rows": f"{prepared}/prepare", f"{STAGE}.verifier": f"{prepared}/verifier"}
    return merged(settings, {"inputs": rows})


@pytest.fixture
def release(
    loaded: Cluster, config: dict[str, Any], namespace: Namespace, tmp_path: Path
) -> Release:
    """A release whose runner is at home; each test has a run of its own."""
    assert loaded.s3 is not None
    give_credentials(namespace, loaded.s3)
    return Release(
        namespace=namespace,
        name="nodes",
        folder=tmp_path,
        values=values_of(
            loaded.s3,
            config,
            run={"id": f"r{time.time_ns() // 10**6 % 10**9}"},
            only=[STAGE],
            # Their GPUs are a number only: two engines on two processors take one each.
            stages={STAGE: {"gpus": 8, "workers": 1, "env": {"OMP_NUM_THREADS": "1"}}},
        ),
    )


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Any]:
    """What the first test's artefact holds, for the others."""
    return {}


def units_done(store: Store) -> int:
    return len(Work(store, STAGE).finished_units())


def wait_for_units(store: Store, count: int) -> None:
    waiting.until(lambda: units_done(store) >= count, f"{count} units are done", seconds=600)


def units_a_second(store: Store, count: int) -> float:
    """How fast the next units come."""
    began = time.monotonic(), units_done(store)
    wait_for_units(store, began[1] + count)
    return (units_done(store) - began[1]) / (time.monotonic() - began[0])


def test_two_workers_on_two_nodes_after_one_was_scaled(
    release: Release, undisturbed: dict[str, Any]
) -> None:
    release.helm("install")
    run = f"{release.name}-{release.values['run']['id']}"
    store = release.store(run)
    wait_for_units(store, 2)
    undisturbed["rate"] = units_a_second(store, 5)
    assert len(pods_of(release.namespace)) == 1
    change = '{"spec": {"parallelism": 2, "completions": 2, "maxFailedIndexes": 2}}'
    release.namespace.kubectl("patch", "job", f"{run}-{STAGE}", "--type=merge", f"--patch={change}")
    hosts = set()

    def both_run() -> bool:
        running = [pod for pod in pods_of(release.namespace) if pod["status"]["phase"] == "Running"]
        hosts.update(pod["spec"]["nodeName"] for pod in running)
        return len(running) == 2

    waiting.until(both_run, "two pods run", seconds=120)
    assert hosts == {"n1", "n2"}, "one pod of eight GPUs a node"
    release.wait(STAGE)
    undisturbed.update(content_of(store, STAGE))
    rows = artifact_at(open_store(f"s3://{BUCKET}/prepared"), "prepare")
    assert len(set(undisturbed["rows"])) == rows.manifest.total_samples


def test_a_drained_node_loses_nothing(
    release: Release, our_cluster: Cluster, undisturbed: dict[str, Any]
) -> None:
    release.helm("install")
    run = f"{release.name}-{release.values['run']['id']}"
    store = release.store(run)
    wait_for_units(store, 2)
    (pod,) = pods_of(release.namespace)
    node = pod["spec"]["nodeName"]
    try:
        our_cluster.kubectl(
            "drain", node, "--ignore-daemonsets", "--force", "--delete-emptydir-data"
        )
        release.wait(STAGE)
    finally:
        our_cluster.kubectl("uncordon", node)
    job = release.jobs()[STAGE]
    assert job["status"].get("failed", 0) == 0, "a drained pod is nobody's failure"
    same(store, undisturbed)


def test_a_node_without_network_for_half_a_minute_loses_nothing(
    release: Release, our_cluster: Cluster, undisturbed: dict[str, Any]
) -> None:
    release.helm("install", stages={STAGE: {"workers": 2}})
    run = f"{release.name}-{release.values['run']['id']}"
    store = release.store(run)
    wait_for_units(store, 1)
    nodes = {pod["spec"]["nodeName"] for pod in pods_of(release.namespace)}
    assert nodes == {"n1", "n2"}
    waiting.until(lambda: len(store.list("progress")) == 2, "both work", seconds=300)
    rate = units_a_second(store, 6) / undisturbed["rate"]
    figures.record(extract_workers_rate_2_over_1=round(rate, 2))
    our_cluster.cut("n2")
    try:
        time.sleep(30)
    finally:
        our_cluster.mend("n2")
    release.wait(STAGE)
    same(store, undisturbed)


def test_a_node_whose_kubelet_dies_loses_nothing(
    release: Release, our_cluster: Cluster, undisturbed: dict[str, Any]
) -> None:
    """As docs/cluster.md has it: the artefact commits, the Job ends once the node is given up."""
    release.helm("install", stages={STAGE: {"workers": 2}})
    run = f"{release.name}-{release.values['run']['id']}"
    store = release.store(run)
    wait_for_units(store, 4)
    assert {pod["spec"]["nodeName"] for pod in pods_of(release.namespace)} == {"n1", "n2"}
    our_cluster.kill("kubelet-n2")
    taint = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
    try:
        committed = lambda: artifacts.find(store.child(STAGE)) is not None  # noqa: E731
        waiting.until(committed, "the artefact is committed", seconds=900)
        same(store, undisturbed)
        assert not release.ended(STAGE), "nobody has said of the lost pod that it ended"
        our_cluster.kubectl("taint", "node", "n2", taint)
        release.wait(STAGE, seconds=300)
    finally:
        testbed.revive_kubelet(our_cluster, "n2")
        our_cluster.kubectl("taint", "node", "n2", f"{taint}-")
    assert release.jobs()[STAGE]["status"].get("failed", 0) == 0, "a lost node is nobody's failure"
    same(store, undisturbed)


def same(store: Store, undisturbed: dict[str, Any]) -> None:
    """Every row once, and every object to the byte."""
    found = content_of(store, STAGE)
    assert len(found["rows"]) == len(set(found["rows"]))
    assert found["rows"] == undisturbed["rows"]
    assert found["objects"] == undisturbed["objects"]
