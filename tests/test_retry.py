"""`eagle3 retry` deletes a failed Job and its logs only where it sees the run's own store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eagle3.config import parse_config
from eagle3.errors import EnvironmentMisconfigured
from eagle3.ordering import JobRecord, JobRecords
from eagle3.stages import stage_named
from eagle3.store import open_store
from jobs import operate
from jobs.installed import InstalledRun

FAILED = {
    "metadata": {"name": "e3-1-train", "uid": "u"},
    "spec": {},
    "status": {"conditions": [{"type": "Failed", "status": "True"}]},
}


class Standing:
    """A namespace in which the one Job has failed."""

    namespace = "ml"

    def __init__(self) -> None:
        self.deleted: list[str] = []

    def job(self, name: str) -> dict[str, Any] | None:
        return FAILED if name == "e3-1-train" and not self.deleted else None

    def delete_job(self, job: dict[str, Any]) -> None:
        self.deleted.append(job["metadata"]["name"])

    def wait_until_gone(self, job: dict[str, Any]) -> None:
        assert self.deleted


class Ending(Standing):
    """A namespace in which the runner's pod has ended, and its Job is told as failed soon."""

    def __init__(self, status: dict[str, Any]) -> None:
        super().__init__()
        self.looks, self.made = 0, 0
        self.status = status

    def job(self, name: str) -> dict[str, Any] | None:
        self.looks += 1
        failed = {"conditions": [{"type": "Failed", "status": "True"}]}
        return {
            "metadata": {"name": name, "uid": "u"},
            "spec": {"template": {"metadata": {}, "spec": {}}},
            "status": self.status if self.looks < 3 else failed,
        }

    def pods(self, name: str) -> list[dict[str, Any]]:
        return [{"metadata": {"name": name}, "status": {"phase": "Failed"}}]

    def create_job(self, body: dict[str, Any]) -> None:
        self.made += 1


TARGET = {"conditions": [{"type": "FailureTarget", "status": "True"}]}


@pytest.mark.parametrize("status", [{}, TARGET])
def test_a_runner_that_is_just_ending_is_not_taken_for_one_at_work(tmp_path: Path, status) -> None:
    cluster = Ending(status)
    said = operate.restart_runner(run_in(tmp_path), cluster)  # type: ignore[arg-type]
    assert (said, cluster.made) == ("runner: started again", 1)


def run_in(folder: Path) -> InstalledRun:
    return InstalledRun(
        name="e3-1",
        release="e3",
        config=parse_config({"verifier": {"source": "v"}, "prepare": {"data": ["d"]}}),
        store=open_store(str(folder)),
        bodies={"train": {"metadata": {"name": "e3-1-train"}}},
    )


def test_from_another_store_nothing_is_deleted(tmp_path: Path) -> None:
    """The same URL is another store where a laptop's endpoint is not the cluster's."""
    cluster = Standing()
    with pytest.raises(EnvironmentMisconfigured, match="AWS_ENDPOINT_URL"):
        operate.retry(run_in(tmp_path), cluster, "train")  # type: ignore[arg-type]
    assert not cluster.deleted


@pytest.mark.parametrize("noted", [False, True])
def test_in_its_own_store_the_job_and_its_records_go(tmp_path: Path, noted: bool) -> None:
    cluster, run = Standing(), run_in(tmp_path)
    records, ours = JobRecords(run.store, stage_named("train")), JobRecord(job="a", namespace="ml")
    records.intend(ours)
    if noted:
        records.note(ours)
    assert "may be tried again" in operate.retry(run, cluster, "train")  # type: ignore[arg-type]
    assert cluster.deleted == ["e3-1-train"]
    assert not records.known()


def test_where_nothing_tells_that_it_is_the_run_s_own_store_it_says_so(tmp_path: Path) -> None:
    """The Jobs were deleted to go on with other values, and the laptop sees another store."""
    cluster, run = Standing(), run_in(tmp_path)
    cluster.deleted.append("by hand")
    said = operate.retry(run, cluster, "train")  # type: ignore[arg-type]
    assert "nothing was changed" in said
    assert "AWS_ENDPOINT_URL" in said
    JobRecords(run.store, stage_named("train")).note(JobRecord(job="a", namespace="ml"))
    assert "may be tried again" in operate.retry(run, cluster, "train")  # type: ignore[arg-type]
