"""A release's life by both Helms: what install, upgrade and uninstall start, keep and remove.

Images are not there to be pulled, so no pod runs: the runner's part is played by its own code.
"""

import time
from pathlib import Path

import pytest

from eagle3.cluster import open_cluster
from jobs import operate
from jobs.installed import InstalledRun, read_cluster
from jobs.runner import Runner
from tests.cluster.cluster import Cluster, CommandFailed, Namespace
from tests.conftest import ROOT
from tests.helm import CHART, CPU

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

KINDS = "jobs,configmaps,serviceaccounts,roles,rolebindings,networkpolicies"


class Release:
    """The release `drafts` in a namespace, with a store that is a folder."""

    def __init__(self, namespace: Namespace, major: int, folder: Path) -> None:
        self.namespace, self.major, self.folder = namespace, major, folder

    def set(self, verb: str, *sets: str) -> str:
        """Install or upgrade it to the profile for CPUs with these values."""
        values = [f"--set={one}" for one in (f"store=file://{self.folder}", *sets)]
        return self.namespace.helm(
            verb, "drafts", str(CHART), f"--values={CHART / CPU}", *values, major=self.major
        )

    def objects(self) -> dict[tuple[str, str], tuple[str, int]]:
        """(kind, name) -> uid and generation of all that is ours."""
        return {
            (one["kind"], one["metadata"]["name"]): (
                one["metadata"]["uid"],
                one["metadata"].get("generation", 1),
            )
            for one in self.namespace.get(KINDS, "-lapp.kubernetes.io/instance=drafts")
        }

    def runs(self) -> list[str]:
        """The names of the runs that are there, which are those of their ConfigMaps."""
        found = self.namespace.get("configmaps", "-leagle3/run")
        return sorted(one["metadata"]["name"] for one in found)

    def begin(self, name: str) -> InstalledRun:
        """Do what a run's runner does first: take everything over, and make the first Job."""
        cluster = open_cluster(self.namespace.name)
        run = read_cluster(cluster, name)
        runner = Runner(run, cluster, print)
        runner.adopt()
        assert not runner.step()
        return run


@pytest.fixture(params=[3, 4])
def release(
    request: pytest.FixtureRequest,
    cluster: Cluster,
    namespace: Namespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Release:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    return Release(namespace, request.param, tmp_path)


def test_the_same_values_change_nothing_and_others_are_a_run_beside(release: Release) -> None:
    release.set("install")
    (first,) = release.runs()
    release.begin(first)
    before = release.objects()
    assert ("Job", f"{first}-prepare") in before
    release.set("upgrade")
    assert release.objects() == before

    release.set("upgrade", "stages.train.memory=7Gi")
    (second,) = set(release.runs()) - {first}
    after = release.objects()
    assert before.items() <= after.items(), "the earlier run goes on untouched"
    assert after.keys() - before.keys() == {("ConfigMap", second), ("Job", f"{second}-runner")}


def test_uninstalling_stops_what_runs_and_leaves_the_store(release: Release) -> None:
    release.set("install")
    (name,) = release.runs()
    run = release.begin(name)
    release.set("upgrade", "run.id=idle")
    written = {path for path in release.folder.rglob("*") if path.is_file()}
    assert written, "the run's Jobs are recorded in its store"

    release.namespace.helm("uninstall", "drafts", major=release.major)
    idle = {("ConfigMap", "drafts-idle"), ("Job", "drafts-idle-runner")}
    deadline = time.monotonic() + 60
    while release.objects().keys() != idle and time.monotonic() < deadline:
        time.sleep(0.5)
    assert release.objects().keys() == idle, "a run whose runner never started is owned by nobody"
    assert {path for path in release.folder.rglob("*") if path.is_file()} == written
    assert str(release.folder) in run.store.url
    release.namespace.kubectl(
        "delete", "job,configmap,pod", "-lapp.kubernetes.io/instance=drafts", "--wait=false"
    )


@pytest.mark.parametrize("release", [4], indirect=True)
def test_an_id_stands_for_the_values_that_it_was_given_with(release: Release) -> None:
    release.set("install", "run.id=one")
    before = release.objects()
    with pytest.raises(CommandFailed, match=r"run\.id: wanted the values"):
        release.set("upgrade", "run.id=one", "stages.train.memory=7Gi")
    assert release.objects() == before
    # As docs/cluster.md has it, for a run that goes on with more memory.
    release.namespace.kubectl("delete", "job,configmap", "-leagle3/run=one")
    release.set("upgrade", "run.id=one", "stages.train.memory=7Gi")
    body = read_cluster(open_cluster(release.namespace.name), "drafts-one").bodies["train"]
    (stage,) = body["spec"]["template"]["spec"]["containers"]
    assert stage["resources"]["limits"]["memory"] == f"{7 * 1024 + 256}Mi"


@pytest.mark.parametrize("release", [4], indirect=True)
def test_every_job_is_taken_as_rendered_and_scaled_both_ways(release: Release) -> None:
    release.set("install", "stages.extract.workers=2", "run.id=one")
    cluster = open_cluster(release.namespace.name)
    run = read_cluster(cluster, "drafts-one")
    for body in run.bodies.values():
        made = cluster.create_job(body)
        assert made["metadata"]["labels"].items() >= body["metadata"]["labels"].items()
    for workers in (4, 1, 2):
        operate.scale(run, cluster, "extract", workers)
        spec = release.namespace.get("job", "drafts-one-extract")["spec"]
        assert spec["parallelism"] == spec["completions"] == workers


@pytest.mark.parametrize("folder", ["k8s/base", "k8s/overlays/cpu", "k8s/overlays/kimi"])
def test_plain_manifests_are_applied_stage_by_stage(namespace: Namespace, folder: str) -> None:
    for stage in ("shared", "prepare"):
        namespace.kubectl(
            "apply", f"--kustomize={ROOT / folder}", f"--selector=eagle3/stage={stage}"
        )
    jobs = {one["metadata"]["name"] for one in namespace.get("jobs")}
    assert jobs == {"eagle3-first-prepare"}
    # The other stages, as the API server itself checks them.
    namespace.kubectl("apply", f"--kustomize={ROOT / folder}", "--dry-run=server")
