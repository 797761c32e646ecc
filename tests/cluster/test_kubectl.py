"""The plain manifests, applied by kubectl stage by stage until the evaluation is committed."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3.stages import STAGE_NAMES
from eagle3.store import Store, open_store
from tests.cluster.cluster import Cluster, Namespace
from tests.cluster.release import give_credentials, last_words, merged, pods_of
from tests.conftest import ROOT
from tests.s3_server import BUCKET
from tests.tiny_run import artifact_at

pytestmark = [pytest.mark.cluster, pytest.mark.images, pytest.mark.slow, pytest.mark.timeout(2400)]

STAGE_SECONDS = 900


@pytest.fixture(scope="module")
def store(module_namespace: Namespace) -> Store:
    return open_store(f"s3://{BUCKET}/{module_namespace.name}")


@pytest.fixture(scope="module")
def folder(
    loaded: Cluster,
    inputs: dict[str, Any],
    module_namespace: Namespace,
    store: Store,
    tmp_path_factory: Any,
) -> Path:
    """k8s/overlays/cpu, edited where docs/cluster.md says that it is to be edited."""
    assert loaded.s3 is not None
    give_credentials(module_namespace, loaded.s3)
    copy: Path = tmp_path_factory.mktemp("plain") / "k8s"
    shutil.copytree(ROOT / "k8s", copy)
    overlay = copy / "overlays" / "cpu"

    settings = overlay / "settings.yaml"
    settings.write_text(settings.read_text().replace("s3://eagle3/runs/first", store.url))

    file = overlay / "kustomization.yaml"
    kustomization = yaml.safe_load(file.read_text())
    for image in kustomization["images"]:
        image.update(newName=f"localhost/{image['name']}", newTag="test")
    file.write_text(yaml.safe_dump(kustomization))

    file = overlay / "00-shared.yaml"
    shared = list(yaml.safe_load_all(file.read_text()))
    (run,) = (one for one in shared if "run.yaml" in one.get("data", {}))
    run["data"]["run.yaml"] = yaml.safe_dump(
        merged(yaml.safe_load(run["data"]["run.yaml"]), inputs)
    )
    file.write_text(yaml.safe_dump_all(shared))
    return overlay


def apply(namespace: Namespace, folder: Path, stage: str) -> str:
    """What `kubectl apply` prints of one stage."""
    return namespace.kubectl("apply", f"--kustomize={folder}", f"--selector=eagle3/stage={stage}")


def wait_for(namespace: Namespace, stage: str, condition: str, seconds: int) -> None:
    job = f"job/eagle3-first-{stage}"
    namespace.kubectl("wait", f"--for=condition={condition}", job, f"--timeout={seconds}s")


def test_a_stage_that_is_applied_too_early_says_what_is_missing(
    module_namespace: Namespace, folder: Path
) -> None:
    apply(module_namespace, folder, "shared")
    apply(module_namespace, folder, "vocab")
    wait_for(module_namespace, "vocab", "Failed", 120)
    (pod,) = pods_of(module_namespace)
    (gate,) = pod["status"]["initContainerStatuses"]
    assert gate["state"]["terminated"]["exitCode"] == 66
    assert "run regenerate first" in last_words(pod, "gate")["remedy"]
    module_namespace.kubectl("delete", "job", "eagle3-first-vocab")


def test_stage_by_stage_it_comes_to_a_committed_evaluation(
    module_namespace: Namespace, folder: Path, store: Store
) -> None:
    for stage in STAGE_NAMES:
        assert apply(module_namespace, folder, stage).split() == [
            f"job.batch/eagle3-first-{stage}",
            "created",
        ]
        try:
            wait_for(module_namespace, stage, "Complete", STAGE_SECONDS)
        finally:
            log = module_namespace.kubectl(
                "logs", f"--selector=eagle3/stage={stage}", "--all-containers", "--tail=40"
            )
            print(log)
    facts = artifact_at(store, "evaluate").manifest.facts
    assert facts["lossless"]
    assert facts["heldout_prompts"] == 4
    jobs = {one["metadata"]["labels"]["eagle3/stage"]: one for one in module_namespace.get("jobs")}
    assert set(jobs) == set(STAGE_NAMES)
    assert not any(job["status"].get("failed") for job in jobs.values())
    assert not module_namespace.get("clusterroles", "--selector=app.kubernetes.io/name=eagle3")


def test_an_applied_stage_is_left_alone_when_it_is_applied_again(
    module_namespace: Namespace, folder: Path
) -> None:
    assert apply(module_namespace, folder, "evaluate").endswith("unchanged\n")
