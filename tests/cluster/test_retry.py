"""A stage that failed in its pod is mended and tried again by `eagle3 retry`."""

import time
from pathlib import Path
from typing import Any

import pytest

from eagle3.store import open_store
from tests.cluster import waiting
from tests.cluster.cluster import Cluster, Namespace
from tests.cluster.release import Release, give_credentials, values_of
from tests.s3_server import BUCKET
from tests.tiny_run import artifact_at

pytestmark = [pytest.mark.cluster, pytest.mark.images, pytest.mark.slow, pytest.mark.timeout(2400)]

STAGE = "prepare"


@pytest.fixture
def release(
    loaded: Cluster, inputs: dict[str, Any], namespace: Namespace, tmp_path: Path
) -> Release:
    assert loaded.s3 is not None
    give_credentials(namespace, loaded.s3)
    number = f"r{time.time_ns() // 10**6 % 10**9}"
    values = values_of(loaded.s3, inputs, run={"id": number}, stages={STAGE: {"backoffLimit": 0}})
    return Release(namespace=namespace, name="retried", folder=tmp_path, values=values)


def wait_until_failed(release: Release) -> None:
    both = lambda: release.ended(STAGE) == release.ended("runner") == "Failed"  # noqa: E731
    waiting.until(both, "the stage and its runner have failed", seconds=240)


def status_of(release: Release, run: str) -> str:
    told = release.eagle3("status", run)
    (line,) = [line for line in told.splitlines() if line.strip().startswith(STAGE)]
    return line


def wait_until_it_goes_on(release: Release, run: str) -> None:
    """The stage completes, and the runner makes the next one's Job."""
    release.wait(STAGE, seconds=240)
    waiting.until(lambda: "regenerate" in release.jobs(), "the run goes on", seconds=120)
    assert artifact_at(release.store(run), STAGE).manifest.total_samples
    assert "committed" in status_of(release, run)


def test_what_was_missing_is_there_and_the_stage_is_tried_again(release: Release) -> None:
    late = open_store(f"s3://{BUCKET}/late-{release.values['run']['id']}")
    release.helm("install", config={"prepare": {"data": [f"{late.url}/chats.jsonl"]}})
    run = release.run_name()
    wait_until_failed(release)
    before = release.jobs()[STAGE]["metadata"]["uid"]
    assert "failed" in status_of(release, run)
    assert "chats.jsonl" in release.eagle3("status", run)

    chats = open_store(f"s3://{BUCKET}/inputs").read_bytes("chats.jsonl")
    late.write_bytes("chats.jsonl", chats)
    told = release.eagle3("retry", STAGE, f"--run={run}")
    assert told.splitlines() == [f"{STAGE}: may be tried again", "runner: started again"]
    wait_until_it_goes_on(release, run)
    assert release.jobs()[STAGE]["metadata"]["uid"] != before
    release.namespace.helm("uninstall", release.name)


def test_a_stage_that_had_too_little_memory_goes_on_with_more(release: Release) -> None:
    """As docs/cluster.md has it, under the same id."""
    release.helm("install", stages={STAGE: {"memory": "64Mi"}})
    run = release.run_name()
    wait_until_failed(release)
    assert "killed for want of memory" in release.eagle3("status", run)

    number = release.values["run"]["id"]
    release.namespace.kubectl(
        "delete",
        "job,configmap",
        f"--selector=app.kubernetes.io/instance={release.name},eagle3/run={number}",
    )
    release.helm("upgrade")
    told = release.eagle3("retry", STAGE, f"--run={run}")
    assert told.startswith(f"{STAGE}: may be tried again")
    wait_until_it_goes_on(release, run)
    release.namespace.helm("uninstall", release.name)
