"""What `eagle3 status` says of a run that is in trouble, held against what it once said.

Each case is a real Job on real nodes, rendered by the chart and then spoilt. The golden texts are
in `tests/golden/status.json`, written anew by `EAGLE3_RECORD=1`; beside each sentence stand the
objects that it was made from, from which `tests/test_diagnosis.py` makes it without a cluster.
"""

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from eagle3.cluster import Cluster as Kubernetes
from eagle3.cluster import Object, open_cluster
from jobs import operate
from jobs.installed import InstalledRun, read_cluster
from jobs.runner import Runner
from tests.cluster import waiting
from tests.cluster.cluster import Cluster, Namespace
from tests.cluster.release import Release, give_credentials, values_of
from tests.test_diagnosis import GOLDEN, plain

pytestmark = [pytest.mark.cluster, pytest.mark.images, pytest.mark.slow, pytest.mark.timeout(2400)]

SAVES = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(45), sys.exit(143)))\n"
    "print('at work', flush=True)\n"
    "time.sleep(600)"
)
RECORD = bool(os.environ.get("EAGLE3_RECORD"))


def main_of(body: Object) -> Object:
    (container,) = body["spec"]["template"]["spec"]["containers"]
    return container


def of_every(body: Object) -> list[Object]:
    pod = body["spec"]["template"]["spec"]
    return [*pod["initContainers"], *pod["containers"]]


def image_missing(body: Object) -> None:
    main_of(body).update(image="localhost/none:1", imagePullPolicy="IfNotPresent")


def secret_missing(body: Object) -> None:
    for container in of_every(body):
        container["envFrom"] = [{"secretRef": {"name": "lost"}}]


def unschedulable(body: Object) -> None:
    body["spec"]["template"]["spec"]["nodeSelector"] = {"nvidia.com/gpu.product": "none-such"}


def out_of_memory(body: Object) -> None:
    body["spec"]["backoffLimit"] = 0
    container = main_of(body)
    container["command"] = ["python", "-c", "x = b'x' * 10**9"]
    container["resources"] = {"limits": {"memory": "64Mi"}, "requests": {"memory": "64Mi"}}


def wrong_bucket(body: Object) -> None:
    for container in of_every(body):
        for variable in container["env"]:
            if variable["name"] == "EAGLE3_STORE":
                variable["value"] = "s3://no-such-bucket/run"


def wrong_key(body: Object) -> None:
    for container in of_every(body):
        container["env"].append({"name": "AWS_SECRET_ACCESS_KEY", "value": "wrong"})


def deadline(body: Object) -> None:
    body["spec"]["activeDeadlineSeconds"] = 3
    main_of(body)["command"] = ["python", "-c", "import time; time.sleep(600)"]


def stopped(body: Object) -> None:
    body["spec"]["backoffLimit"] = 0
    main_of(body)["command"] = ["python", "-c", "raise SystemExit(143)"]


def fault_of_ours(body: Object) -> None:
    body["spec"]["backoffLimit"] = 0
    main_of(body)["command"] = ["python", "-c", "raise ZeroDivisionError('a bug')"]


def slow_to_stop(body: Object) -> None:
    """A stage that saves for a while after SIGTERM, as ours do."""
    main_of(body)["command"] = ["python", "-c", SAVES]


def nothing(body: Object) -> None:
    """The Job as it is: the cluster is what is wrong."""


# Name -> what spoils the Job, and the state that it comes to.
CASES: dict[str, tuple[Callable[[Object], None], str]] = {
    "image missing": (image_missing, "pending"),
    "secret missing": (secret_missing, "pending"),
    "quota": (nothing, "pending"),
    "unschedulable": (unschedulable, "pending"),
    "out of memory": (out_of_memory, "failed"),
    "wrong bucket": (wrong_bucket, "failed"),
    "wrong key": (wrong_key, "failed"),
    "deadline": (deadline, "failed"),
    "stopped": (stopped, "failed"),
    "fault of ours": (fault_of_ours, "failed"),
}


@pytest.fixture
def kubernetes(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> Kubernetes:
    monkeypatch.setenv("KUBECONFIG", str(namespace.cluster.kubeconfig))
    return open_cluster(namespace.name)


@pytest.fixture
def run(
    loaded: Cluster,
    inputs: dict[str, Any],
    namespace: Namespace,
    kubernetes: Kubernetes,
    tmp_path: Path,
) -> InstalledRun:
    """A run in the namespace, without a runner: its Jobs are made by the tests."""
    assert loaded.s3 is not None
    give_credentials(namespace, loaded.s3)
    number = f"s{time.time_ns() // 10**5 % 10**10}"
    values = values_of(loaded.s3, inputs, run={"id": number}, runner={"enabled": False})
    release = Release(namespace=namespace, name="status", folder=tmp_path, values=values)
    release.helm("install")
    return read_cluster(kubernetes, f"status-{number}")


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_said_in_one_sentence(
    run: InstalledRun, kubernetes: Kubernetes, namespace: Namespace, case: str
) -> None:
    spoil, wanted = CASES[case]
    if case == "quota":
        namespace.kubectl("create", "quota", "none", "--hard=pods=0")
    spoil(run.bodies["prepare"])
    Runner(run, kubernetes, str).step()
    found = operate.status(run, kubernetes)[0]
    deadline = time.monotonic() + 240
    # The kubelet of a busy machine tries again, and says so meanwhile.
    while found.state != wanted or not found.what or "failed to sync" in found.what:
        assert time.monotonic() < deadline, (found, namespace.kubectl("describe", "pods"))
        time.sleep(0.5)
        found = operate.status(run, kubernetes)[0]
    hold_against_golden(case, found, run, kubernetes)


def test_a_drained_pod_is_told_of_while_it_saves(
    run: InstalledRun, kubernetes: Kubernetes, namespace: Namespace
) -> None:
    """SIGTERM by a real drain: said while it lasts, and nobody's failure afterwards."""
    slow_to_stop(run.bodies["prepare"])
    Runner(run, kubernetes, str).step()
    log = ("logs", "--selector=eagle3/stage=prepare", "--container=stage")
    namespace.kubectl("wait", "--for=condition=Ready", "pods", "--all", "--timeout=120s")
    waiting.until(lambda: "at work" in namespace.kubectl(*log), "it is at work", seconds=60)
    (pod,) = kubernetes.pods(run.job_name("prepare"))
    node = pod["spec"]["nodeName"]
    seen = lambda: operate.status(run, kubernetes)[0]  # noqa: E731
    drain = ("drain", node, "--ignore-daemonsets", "--force", "--delete-emptydir-data")
    drain = (*drain, "--pod-selector=eagle3/stage=prepare", "--timeout=120s")
    try:
        with ThreadPoolExecutor() as beside:
            drained = beside.submit(namespace.cluster.kubectl, *drain)
            told = [seen()]
            while "being stopped" not in told[-1].what:
                assert len(told) < 60, told
                told.append(seen())
            hold_against_golden("drained", told[-1], run, kubernetes)
            drained.result()
        waiting.until(
            lambda: node not in seen().pods and seen().state == "running",
            "another pod runs",
            seconds=120,
        )
        found = seen()
    finally:
        namespace.cluster.kubectl("uncordon", node)
    assert node not in found.pods
    assert not found.what
    job = kubernetes.job(run.job_name("prepare"))
    assert job is not None
    assert not job["status"].get("failed"), "a drained pod is nobody's failure"


def hold_against_golden(
    case: str, found: operate.StageStatus, run: InstalledRun, kubernetes: Kubernetes
) -> None:
    """What was found is what was once recorded, where this is not the recording itself."""
    job = kubernetes.job(run.job_name("prepare"))
    assert job is not None
    objects = {
        "job": job,
        "pods": kubernetes.pods(run.job_name("prepare")),
        "events": kubernetes.warnings(),
    }
    record(case, found.state, plain(found.what), objects)
    golden = json.loads(GOLDEN.read_text())[case]
    assert (found.state, plain(found.what)) == (golden["state"], golden["what"])


def test_a_broken_upstream_fails_the_job_at_once(
    run: InstalledRun, kubernetes: Kubernetes, namespace: Namespace
) -> None:
    """extract without prepare's artefact: no retry, no engine, no GPU, a readable reason."""
    body = run.bodies["extract"]
    kubernetes.create_job(body)
    name = body["metadata"]["name"]
    deadline = time.monotonic() + 120
    while not (kubernetes.job(name) or {}).get("status", {}).get("failed"):
        assert time.monotonic() < deadline
        time.sleep(0.3)
    (pod,) = kubernetes.pods(name)
    (stage,) = pod["status"]["containerStatuses"]
    assert stage["state"] == {"waiting": {"reason": "PodInitializing"}}, "it never ran"
    job = kubernetes.job(name)
    assert job is not None
    reasons = {one["reason"] for one in job["status"]["conditions"] if one["status"] == "True"}
    assert reasons == {"PodFailurePolicy"}
    told = namespace.kubectl("describe", "pod", pod["metadata"]["name"])
    assert "a committed" in told
    rows = {row.stage: row for row in operate.status(run, kubernetes)}
    assert rows["extract"].state == "failed"
    assert "run prepare first" in rows["extract"].what or "run regenerate" in rows["extract"].what


def record(case: str, state: str, what: str, objects: dict[str, Any]) -> None:
    """Keep what was seen, where it was asked for."""
    if RECORD:
        known = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
        known[case] = {"state": state, "what": what, "objects": stripped(objects)}
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def stripped(thing: Any) -> Any:
    """Objects of the API without specifications and book-keeping."""
    if isinstance(thing, list):
        return [stripped(one) for one in thing]
    if not isinstance(thing, dict):
        return thing
    dropped = {"managedFields", "template", "annotations", "volumes", "env", "ownerReferences"}
    return {key: stripped(value) for key, value in thing.items() if key not in dropped}
