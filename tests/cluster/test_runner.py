"""The runner against a real API server: killed anywhere, left without answers, robbed of Jobs.

Its Jobs are suspended, so that no pod is needed: what a stage would have written is committed by
the test.
"""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3.cluster import Cluster, Object, open_cluster
from eagle3.errors import (
    ConfigError,
    DataInvalid,
    IdentityConflict,
    PermissionRefused,
    UpstreamMissing,
)
from eagle3.store import Store
from jobs import operate
from jobs.installed import InstalledRun, read_cluster, read_files
from jobs.runner import Runner, order
from tests.cluster.cluster import Cluster as OurCluster
from tests.cluster.cluster import Namespace
from tests.upstreams import CONFIG, HIDDEN_STATES, VERIFIER, commit

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

STAGES = ("prepare", "extract", "vocab")


def body_of(stage: str, store: str, *, suspend: bool = True, command: str = "true") -> Object:
    """A Job as the chart makes them, as far as the runner looks at it."""
    labels = {
        "app.kubernetes.io/name": "eagle3",
        "app.kubernetes.io/instance": "drafts",
        "eagle3/run": "one",
        "eagle3/stage": stage,
    }
    container = {
        "name": "stage",
        "image": "localhost/none:1",
        "command": [command],
        "env": [{"name": "EAGLE3_STORE", "value": store}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"drafts-one-{stage}", "labels": labels},
        "spec": {
            "suspend": suspend,
            "template": {
                "metadata": {"labels": labels},
                "spec": {"restartPolicy": "Never", "containers": [container]},
            },
        },
    }


def write_run(folder: Path, **changes: Any) -> InstalledRun:
    """A run of three stages in files, as the runner's pod has them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(CONFIG)
    bodies = {stage: body_of(stage, f"file://{folder}/store", **changes) for stage in STAGES}
    (folder / "jobs.json").write_text(json.dumps(bodies))
    return read_files(folder / "run.yaml", folder / "jobs.json")


def commit_stage(store: Store, stage: str) -> None:
    """What the pods of a stage would have left."""
    if stage == "prepare":
        commit(store, "verifier")
        commit(store, "prepare", verifier=VERIFIER)
    elif stage == "extract":
        commit(store, "extract", **HIDDEN_STATES)
    else:
        commit(store, "vocab", facts={"draft_vocab_size": 64})


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours catches it."""


class Watched(Cluster):
    """The real cluster, where a stage's work is done as soon as its Job is made.

    Attributes:
        made: the uids of the Jobs that were made, in order.
    """

    def __init__(self, real: Cluster, store: Store, kill_after: int = 0) -> None:
        super().__init__(real.api, real.namespace)
        self.store, self.kill_after, self.calls = store, kill_after, 0
        self.made: list[str] = []

    def _call(self, method: str, path: str, **arguments: Any) -> Object:
        answer = super()._call(method, path, **arguments)
        if method == "POST" and path.endswith("/jobs"):
            self.made.append(answer["metadata"]["uid"])
            commit_stage(self.store, answer["metadata"]["labels"]["eagle3/stage"])
        self.calls += 1
        if self.calls == self.kill_after:
            raise Killed
        return answer


@pytest.fixture
def real(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """The namespace, as a person with this kubeconfig has it."""
    monkeypatch.setenv("KUBECONFIG", str(namespace.cluster.kubeconfig))
    return open_cluster(namespace.name)


@pytest.fixture
def said() -> list[str]:
    """What the runner tells."""
    return []


def delete_jobs(real: Cluster) -> None:
    for job in real.jobs("app.kubernetes.io/name=eagle3"):
        real.delete_job(job)
        real.wait_until_gone(job)


def test_killed_after_any_call_it_comes_to_the_same_end(real: Cluster, tmp_path: Path) -> None:
    calm = Watched(real, write_run(tmp_path / "calm").store)
    order(write_run(tmp_path / "calm"), calm, str, 0.01)
    assert len(calm.made) == len(STAGES)
    for kill_after in range(1, calm.calls + 1):
        delete_jobs(real)
        run = write_run(tmp_path / str(kill_after))
        doomed = Watched(real, run.store, kill_after)
        with pytest.raises(Killed):
            order(run, doomed, str, 0.01)
        again = Watched(real, run.store)
        order(run, again, str, 0.01)
        made = doomed.made + again.made
        jobs = real.jobs("eagle3/run=one")
        assert sorted(made) == sorted(job["metadata"]["uid"] for job in jobs), kill_after
        assert len(made) == len(STAGES), f"after call {kill_after}: {made}"
        for job in jobs:
            assert job["metadata"]["annotations"]["eagle3/progress"].startswith("committed")


def test_a_stage_waits_for_what_it_reads(real: Cluster, tmp_path: Path, said: list[str]) -> None:
    run = write_run(tmp_path)
    runner = Runner(run, real, said.append)
    assert not runner.step()
    assert [job["metadata"]["name"] for job in real.jobs("")] == ["drafts-one-prepare"]
    assert not runner.step()
    commit_stage(run.store, "prepare")
    assert not runner.step()
    names = {job["metadata"]["name"] for job in real.jobs("")}
    assert names == {f"drafts-one-{stage}" for stage in STAGES}, "extract and vocab side by side"
    rows = {row.stage: row for row in operate.status(run, real)}
    assert rows["prepare"].state == "committed"
    assert (rows["extract"].state, rows["extract"].pods) == ("suspended", "0 of 1")


def test_a_job_that_vanished_is_told_from_one_never_made(
    real: Cluster, tmp_path: Path, said: list[str]
) -> None:
    run = write_run(tmp_path)
    Runner(run, real, said.append).step()
    delete_jobs(real)
    with pytest.raises(UpstreamMissing, match="who deleted it; `eagle3 retry prepare`"):
        order(run, real, said.append, 0.01)
    assert real.jobs("") == []
    (row, *_) = operate.status(run, real)
    assert (row.state, "eagle3 retry prepare" in row.what) == ("gone", True)
    operate.retry(run, real, "prepare")
    Runner(run, real, said.append).step()
    assert len(real.jobs("")) == 1


def test_a_job_that_ended_without_a_manifest_is_a_failure(
    real: Cluster, tmp_path: Path, said: list[str]
) -> None:
    run = write_run(tmp_path)
    # A Job of no pods is complete as soon as the controller has seen it.
    run.bodies["prepare"]["spec"].update(suspend=False, parallelism=0, completions=0)
    with pytest.raises(DataInvalid, match="though its pods ended with 0"):
        order(run, real, said.append, 0.2)


def test_a_runner_that_has_ended_is_started_again_with_the_same_body(
    real: Cluster, tmp_path: Path
) -> None:
    run = write_run(tmp_path)
    body = body_of("runner", run.store.url, suspend=False)
    body["spec"].update(parallelism=0, completions=0)
    first = real.create_job(body)
    wait_for(lambda: operate.restart_runner(run, real) == "runner: started again")
    second = real.job("drafts-one-runner")
    assert second is not None
    assert second["metadata"]["uid"] != first["metadata"]["uid"]
    assert second["metadata"]["labels"] == first["metadata"]["labels"]
    containers = [job["spec"]["template"]["spec"]["containers"] for job in (first, second)]
    assert containers[0] == containers[1]


def test_a_broken_upstream_ends_the_run_before_any_job_of_its_reader(
    real: Cluster, tmp_path: Path, said: list[str]
) -> None:
    run = write_run(tmp_path)
    commit_stage(run.store, "prepare")
    run.store.delete("prepare/prepare-000001.safetensors")
    with pytest.raises(DataInvalid, match="prepare-000001"):
        order(run, real, said.append, 0.01)
    assert real.jobs("") == []


def test_an_upstream_that_nobody_will_make_ends_the_run(
    real: Cluster, tmp_path: Path, said: list[str]
) -> None:
    folder = tmp_path / "run"
    run = write_run(folder)
    elsewhere = yaml.safe_load(CONFIG) | {"inputs": {"extract.rows": f"file://{tmp_path}/nowhere"}}
    (folder / "run.yaml").write_text(yaml.safe_dump(elsewhere))
    for stage in ("prepare", "vocab"):
        commit_stage(run.store, stage)
    run = read_files(folder / "run.yaml", folder / "jobs.json")
    with pytest.raises(UpstreamMissing, match="nowhere"):
        order(run, real, said.append, 0.01)
    assert real.jobs("") == []


def test_two_runs_on_one_prefix_are_refused(real: Cluster, tmp_path: Path, said: list[str]) -> None:
    run = write_run(tmp_path)
    Runner(run, real, said.append).step()
    bodies = json.loads((tmp_path / "jobs.json").read_text().replace("drafts-one", "drafts-two"))
    (tmp_path / "jobs.json").write_text(json.dumps(bodies))
    other = read_files(tmp_path / "run.yaml", tmp_path / "jobs.json")
    with pytest.raises(IdentityConflict, match="a prefix of its own"):
        order(other, real, said.append, 0.01)
    assert len(real.jobs("")) == 1


def test_an_api_server_that_does_not_answer_changes_nothing(
    our_cluster: OurCluster,
    real: Cluster,
    tmp_path: Path,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("eagle3.cluster._TIMEOUT", (1, 2))
    run = write_run(tmp_path)
    runner = Runner(run, real, said.append)
    runner.step()
    before = [job["metadata"]["uid"] for job in real.jobs("")]
    stop = threading.Event()

    def come_back() -> None:
        stop.wait(8)
        our_cluster.pause("kube-apiserver", False)
        commit_stage(run.store, "prepare")
        commit_stage(run.store, "extract")
        commit_stage(run.store, "vocab")

    our_cluster.pause("kube-apiserver", True)
    thread = threading.Thread(target=come_back)
    thread.start()
    try:
        order(run, real, said.append, 0.5)
    finally:
        stop.set()
        thread.join()
    assert any("wanted an answer from the Kubernetes API server" in line for line in said)
    assert [job["metadata"]["uid"] for job in real.jobs("")] == before


def test_what_the_release_owns_goes_with_it(
    namespace: Namespace, real: Cluster, tmp_path: Path, said: list[str]
) -> None:
    namespace.kubectl("create", "configmap", "drafts")
    namespace.kubectl("create", "configmap", "drafts-one")
    run = write_run(tmp_path)
    runner = Runner(run, real, said.append)
    runner.adopt()
    runner.step()
    assert len(real.jobs("")) == 1
    namespace.kubectl("delete", "configmap", "drafts")
    wait_for(lambda: not real.jobs("") and real.config_map("drafts-one") is None)
    assert run.store.list("work"), "what lies in the store stays"


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.2)


class TestRefusals:
    def test_a_field_that_the_api_does_not_know(self, real: Cluster) -> None:
        body = body_of("prepare", "file:///x")
        body["spec"]["podFailurePolice"] = {}
        with pytest.raises(ConfigError, match="podFailurePolice"):
            real.create_job(body)

    def test_credentials_that_may_not(
        self,
        namespace: Namespace,
        real: Cluster,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        namespace.kubectl("create", "serviceaccount", "nobody")
        token = namespace.kubectl("create", "token", "nobody").strip()
        config = yaml.safe_load(namespace.cluster.kubeconfig.read_text())
        for user in config["users"]:
            user["user"] = {"token": token}
        (tmp_path / "config").write_text(yaml.safe_dump(config))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        with pytest.raises(PermissionRefused, match="cannot get resource"):
            open_cluster(real.namespace).job("x")

    def test_a_namespace_that_is_not_there(self, real: Cluster) -> None:
        lost = Cluster(real.api, "nowhere")
        with pytest.raises(ConfigError, match="nowhere"):
            lost.create_job(body_of("prepare", "file:///x"))

    def test_a_configmap_that_is_no_run(self, real: Cluster) -> None:
        with pytest.raises(UpstreamMissing, match="kubectl get configmaps"):
            read_cluster(real, "drafts-one")
        with pytest.raises(ConfigError, match=r"run\.yaml and jobs\.json"):
            read_cluster(real, "kube-root-ca.crt")
