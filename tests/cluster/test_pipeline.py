"""`helm install` runs the whole pipeline with the real engines in real, confined containers."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from eagle3.stages import STAGE_NAMES
from eagle3.store import open_store
from tests.cluster import figures
from tests.cluster.cluster import Cluster, Namespace
from tests.cluster.release import Release, give_credentials, pods_of, values_of
from tests.conftest import ROOT
from tests.s3_server import BUCKET
from tests.tiny_run import artifact_at, content_of

pytestmark = [pytest.mark.cluster, pytest.mark.images, pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def installed(
    loaded: Cluster, inputs: dict[str, Any], module_namespace: Namespace, tmp_path_factory: Any
) -> Release:
    """A release whose run has come to its end."""
    assert loaded.s3 is not None
    give_credentials(module_namespace, loaded.s3)
    release = Release(
        namespace=module_namespace,
        name="tiny",
        folder=tmp_path_factory.mktemp("release"),
        values=values_of(loaded.s3, inputs, store=f"s3://{BUCKET}/{module_namespace.name}"),
    )
    started = time.monotonic()
    release.helm("install", "--wait-for-jobs=false")
    first_pod = _wait_for_first_pod(release, started)
    release.wait("runner", seconds=1800)
    figures.record(
        install_to_first_pod_seconds=round(first_pod, 1),
        pipeline_seconds_cluster=round(time.monotonic() - started, 1),
    )
    return release


def _wait_for_first_pod(release: Release, started: float) -> float:
    while not pods_of(release.namespace):
        assert time.monotonic() - started < 60, "no pod at all"
        time.sleep(0.2)
    return time.monotonic() - started


def test_the_run_ends_with_a_committed_evaluation(installed: Release) -> None:
    store = installed.store(installed.run_name())
    facts = artifact_at(store, "evaluate").manifest.facts
    assert facts["lossless"]
    assert facts["heldout_prompts"] == 4
    summary = json.loads(store.read_bytes("summary.json"))
    assert set(summary["seconds_by_stage"]) == set(STAGE_NAMES)


def test_every_stage_ran_once_in_its_own_job(installed: Release) -> None:
    jobs = installed.jobs()
    assert set(jobs) == {*STAGE_NAMES, "runner"}
    for stage, job in jobs.items():
        assert job["status"].get("failed", 0) == 0, stage
        if stage != "runner":
            told = job["metadata"]["annotations"]["eagle3/progress"]
            assert told.startswith("committed as"), told


def test_every_pod_was_confined(installed: Release) -> None:
    """The namespace enforces `restricted`; this is what goes beyond it."""
    pods = pods_of(installed.namespace)
    assert len(pods) >= len(STAGE_NAMES) + 1
    for pod in pods:
        token = pod["spec"].get("automountServiceAccountToken")
        runner = pod["metadata"]["labels"]["eagle3/stage"] == "runner"
        assert token is runner, "only the runner has a token"
        for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
            assert container["securityContext"]["readOnlyRootFilesystem"]
        assert pod["spec"]["securityContext"]["runAsUser"] != 0


def test_the_gate_was_quick(installed: Release) -> None:
    seconds = []
    for pod in pods_of(installed.namespace):
        for status in pod["status"].get("initContainerStatuses", []):
            ended = status["state"]["terminated"]
            seconds.append(_seconds(ended["finishedAt"]) - _seconds(ended["startedAt"]))
    figures.record(gate_seconds=sorted(seconds)[len(seconds) // 2])
    assert seconds


def test_status_shows_every_stage_committed(installed: Release) -> None:
    told = installed.eagle3("status", installed.run_name())
    for stage in STAGE_NAMES:
        (line,) = [line for line in told.splitlines() if line.strip().startswith(stage)]
        assert "committed" in line, told


def test_the_same_values_change_nothing_and_others_make_another_run(installed: Release) -> None:
    before = {name: job["metadata"]["uid"] for name, job in installed.jobs().items()}
    run = installed.run_name()
    installed.helm("upgrade")
    assert installed.run_name() == run
    assert {n: j["metadata"]["uid"] for n, j in installed.jobs().items()} == before
    changed = installed.helm(
        "upgrade", "--dry-run=server", config={"vocab": {"draft_vocab_size": 100}}
    )
    assert f"name: {run}\n" not in changed


def test_helm_test_asks_the_store_from_a_pod(installed: Release) -> None:
    told = installed.namespace.helm("test", installed.name, "--logs")
    store = installed.store(installed.run_name())
    assert f"runner: {store.url} can be read and written" in told


def test_the_same_run_on_one_machine_writes_the_same(installed: Release, tmp_path: Path) -> None:
    run = installed.run_name()
    here = open_store(f"s3://{BUCKET}/{installed.namespace.name}-here")
    path = tmp_path / "run.yaml"
    path.write_text(installed.namespace.get("configmap", run)["data"]["run.yaml"])
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "jobs.cli", "run", f"--config={path}", f"--store={here.url}"],
        cwd=ROOT,
        # As many as the Jobs have by their requests.
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures.record(pipeline_seconds_local=round(time.monotonic() - started, 1))
    there = installed.store(run)
    for kind in ("prepare", "regenerate"):
        assert content_of(here, kind) == content_of(there, kind)
    assert artifact_at(here, "evaluate").manifest.facts["lossless"]


def test_what_it_wrote_outlives_the_release(installed: Release) -> None:
    """Last in its file: it ends what the others look at."""
    store = installed.store(installed.run_name())
    installed.namespace.helm("uninstall", installed.name)
    deadline = time.monotonic() + 120
    while installed.jobs() or installed.namespace.get("configmaps", "--selector=eagle3/run"):
        assert time.monotonic() < deadline, installed.namespace.kubectl("get", "jobs,configmaps")
        time.sleep(0.5)
    assert artifact_at(store, "evaluate").manifest.facts["lossless"]


def _seconds(moment: str) -> float:
    return time.mktime(time.strptime(moment, "%Y-%m-%dT%H:%M:%SZ"))
