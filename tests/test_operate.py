"""What a person does to a run in a cluster, and what is seen of it."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3.cluster import CANCELLED, Cluster, Object
from eagle3.errors import UpstreamMissing
from eagle3.progress import Progress
from jobs import operate
from jobs.installed import InstalledRun
from jobs.patience import Patience
from jobs.runner import Runner
from tests.shelf import (
    RUN,
    Shelf,
    failed,
    pod,
    put,
    served,
    silent_port,
    wait_for,
    write_run,
    write_run_elsewhere,
)
from tests.upstreams import VERIFIER, commit

QUEUE = "kueue.x-k8s.io/queue-name"


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def cluster(shelf: Shelf) -> Iterator[Cluster]:
    with served(shelf) as found:
        yield found


@pytest.fixture
def run(tmp_path: Path) -> InstalledRun:
    return write_run(tmp_path)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def without_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A laptop that was given nothing for the run's store."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def rows_of(run: InstalledRun, cluster: Cluster) -> dict[str, operate.StageStatus]:
    return {row.stage: row for row in operate.status(run, cluster)}


class TestStatus:
    def test_a_runner_that_cannot_begin_is_told_of(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf
    ) -> None:
        waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
        put(shelf, "runner", pod("r", "Pending", **waiting))
        row = rows_of(run, cluster)["runner"]
        assert row.state == "pending"
        assert "ImagePullBackOff: not found" in row.what

    def test_a_runner_that_failed_is_told_of_while_a_stage_goes_on(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf
    ) -> None:
        put(shelf, "extract", pod("e"))
        put(shelf, "runner", pod("r", "Failed", terminated={"exitCode": 3}), **failed())
        rows = rows_of(run, cluster)
        assert rows["extract"].state == "running"
        assert rows["runner"].state == "failed"
        assert "exit code 3" in rows["runner"].what
        assert f"no stage begins any more; `eagle3 retry STAGE --run {RUN}`" in rows["runner"].what

    def test_a_run_without_a_runner_says_so(self, run: InstalledRun, cluster: Cluster) -> None:
        row = rows_of(run, cluster)["runner"]
        assert row.state == "none"
        assert f"`eagle3 submit {RUN}`" in row.what

    def test_a_runner_s_silence_is_none(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf
    ) -> None:
        old = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
        put(shelf, "runner", pod("r", **old))
        assert rows_of(run, cluster)["runner"].what == ""

    def test_what_keeps_the_runner_waiting_stands_in_its_row(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf
    ) -> None:
        job = put(shelf, "runner", pod("r"))
        job["metadata"]["annotations"] = {"eagle3/progress": "s3://b: wanted an answer"}
        assert (
            rows_of(run, cluster)["runner"].what == "goes on when it can: s3://b: wanted an answer"
        )

    def test_a_runner_that_its_queue_holds_back_is_not_cancelled(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf
    ) -> None:
        job = put(shelf, "runner", status=suspended())
        job["spec"]["suspend"] = True
        row = rows_of(run, cluster)["runner"]
        assert row.what.startswith("suspended: no stage begins; `eagle3 retry STAGE")
        job["metadata"]["labels"][QUEUE] = "drafts"
        row = rows_of(run, cluster)["runner"]
        assert (row.state, row.what) == ("suspended", "it waits for its queue's quota")
        assert operate.restart_runner(run, cluster) == "runner: waits for its queue's quota"
        assert not shelf.asked
        job["metadata"]["annotations"] = {CANCELLED: "true"}
        assert rows_of(run, cluster)["runner"].what.startswith("cancelled: no stage begins")
        assert operate.restart_runner(run, cluster) == "runner: goes on"
        assert CANCELLED not in job["metadata"]["annotations"]

    def test_restarts_and_progress_stand_side_by_side(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf
    ) -> None:
        killed = pod("a", "Failed", terminated={"exitCode": 137, "reason": "OOMKilled"})
        put(shelf, "extract", killed, pod("b"), status={"failed": 5, "active": 1})
        with Progress(run.store, "extract", "capture", total=4, unit="rows") as progress:
            progress.advance(2, resumed=True)
        row = rows_of(run, cluster)["extract"]
        assert (row.state, row.pods, row.restarts) == ("running", "1 of 1 on n1", 5)
        first, second = row.what.splitlines()
        assert first == "capture 2 of 4 rows (50%)"
        assert second.startswith("5 pods failed so far, the last: pod a: container stage was kill")

    def test_a_store_out_of_reach_is_asked_once_and_not_for_long(
        self, tmp_path: Path, cluster: Cluster, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with silent_port() as port:
            run = write_run_elsewhere(tmp_path, f"http://127.0.0.1:{port}", monkeypatch)
            put(shelf, "extract", pod("e"))
            began = time.monotonic()
            rows = rows_of(run, cluster)
        assert time.monotonic() - began < 25
        assert rows["extract"].state == "running"
        assert rows["prepare"].state == "unknown"
        assert "the store cannot be used from here" in rows["prepare"].what

    def test_without_credentials_the_jobs_tell_what_they_can(
        self, tmp_path: Path, cluster: Cluster, shelf: Shelf, without_keys: None
    ) -> None:
        run = write_run(tmp_path, "s3://bucket/run")
        job = put(shelf, "extract", pod("e"))
        job["metadata"]["annotations"] = {"eagle3/progress": "running: 5 of 10"}
        rows = rows_of(run, cluster)
        assert (rows["extract"].state, rows["extract"].what) == ("running", "running: 5 of 10")
        assert rows["prepare"].state == "unknown"
        assert "credentials" in rows["prepare"].what


class TestCancel:
    def test_it_stops_the_runner_first_and_then_what_is_at_work(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf, said: list[str]
    ) -> None:
        put(shelf, "runner", pod("r"))
        put(shelf, "prepare", **failed())
        put(shelf, "extract", pod("e"))
        operate.cancel(run, cluster, said.append)
        assert [(method, path) for method, path, _ in shelf.asked] == [
            ("PATCH", f"jobs/{RUN}-runner"),
            ("DELETE", f"jobs/{RUN}-extract"),
        ]
        assert shelf.jobs[f"{RUN}-runner"]["spec"]["suspend"]
        assert shelf.asked[1][2]["propagationPolicy"] == "Foreground", "its pods have saved"
        assert f"`eagle3 retry extract --run {RUN}` or `eagle3 submit {RUN}` goes on" in said[-1]
        row = rows_of(run, cluster)["runner"]
        shelf.jobs[f"{RUN}-runner"]["status"] = suspended()
        row = rows_of(run, cluster)["runner"]
        assert row.state == "suspended"
        assert row.what.startswith("cancelled: no stage begins; `eagle3 retry")

    def test_the_run_goes_on_afterwards_with_what_was_finished(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf, said: list[str]
    ) -> None:
        commit(run.store, "verifier")
        commit(run.store, "prepare", verifier=VERIFIER)
        put(shelf, "runner", pod("r"))
        Runner(run, cluster, said.append).step()
        run.store.write_bytes("work/extract/unit-0", b"finished")
        operate.cancel(run, cluster, said.append)
        assert set(shelf.jobs) == {f"{RUN}-runner"}
        assert rows_of(run, cluster)["extract"].state == "waiting", "and not gone"
        assert run.store.read_bytes("work/extract/unit-0") == b"finished"
        Runner(run, cluster, said.append).step()
        assert f"{RUN}-extract" in shelf.jobs, "submit goes on"
        operate.cancel(run, cluster, said.append)
        # A queue lets it go on all the same: it finds the mark, and orders nothing.
        shelf.jobs[f"{RUN}-runner"]["spec"]["suspend"] = False
        patience = Patience(cluster, said.append, f"{RUN}-runner")
        assert patience.cancelled()
        operate.retry(run, cluster, "extract")
        assert operate.restart_runner(run, cluster) == "runner: goes on"
        assert not shelf.jobs[f"{RUN}-runner"]["spec"]["suspend"]
        assert not patience.cancelled()

    def test_gpus_are_freed_where_the_store_is_out_of_reach(
        self,
        tmp_path: Path,
        cluster: Cluster,
        shelf: Shelf,
        said: list[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        with silent_port() as port:
            nobody = f"http://127.0.0.1:{port}"
        run = write_run_elsewhere(tmp_path, nobody, monkeypatch)
        put(shelf, "extract", pod("e"))
        operate.cancel(run, cluster, said.append)
        assert f"{RUN}-extract" not in shelf.jobs
        assert said[0].endswith("It goes on after `eagle3 retry extract` only.")

    def test_gpus_are_freed_without_credentials_for_the_store(
        self, tmp_path: Path, cluster: Cluster, shelf: Shelf, said: list[str], without_keys: None
    ) -> None:
        run = write_run(tmp_path, "s3://bucket/run")
        put(shelf, "extract", pod("e"))
        operate.cancel(run, cluster, said.append)
        assert f"{RUN}-extract" not in shelf.jobs
        assert "credentials" in said[0]

    def test_pods_of_the_runner_that_failed_earlier_are_not_waited_for(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf, said: list[str]
    ) -> None:
        put(shelf, "runner")
        stays = pod("r", "Failed", terminated={"exitCode": 77})
        shelf.pods = Kept({f"{RUN}-runner": [stays]})
        operate.cancel(run, cluster, said.append)
        assert said[0] == "runner: suspended"

    def test_a_run_that_is_not_at_work_is_left_alone(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf, said: list[str]
    ) -> None:
        put(shelf, "prepare", **failed())
        operate.cancel(run, cluster, said.append)
        assert not shelf.asked
        assert len(said) == 1


class Kept(dict[str, list[Object]]):
    """Pods that have ended, which no controller deletes."""

    def pop(self, *_: Any) -> Any:
        """Nothing."""


def suspended() -> dict[str, Any]:
    return {"conditions": [{"type": "Suspended", "status": "True"}]}


class TestLogs:
    def test_the_newest_pod_of_each_worker_is_told(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf, said: list[str]
    ) -> None:
        job = put(shelf, "extract", pod("b", index=1), pod("a"))
        job["spec"]["completions"] = 2
        shelf.lines = {("a", "stage"): ["t1 one", "t2 two words"], ("b", "stage"): ["t1 three"]}
        operate.logs(run, cluster, "extract", said.append)
        assert said == ["[0] one", "[0] two words", "[1] three"]

    def test_a_stage_that_never_began_tells_what_its_gate_wrote(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf, said: list[str]
    ) -> None:
        refused = pod("a", "Failed", waiting={"reason": "PodInitializing"})
        gate = {"name": "gate", "state": {"terminated": {"exitCode": 66}}}
        refused["status"]["initContainerStatuses"] = [gate]
        put(shelf, "extract", refused, **failed())
        shelf.lines = {("a", "gate"): ["t1 run prepare first"]}
        operate.logs(run, cluster, "extract", said.append)
        assert said == ["run prepare first"]

    def test_following_goes_on_over_a_restart_until_the_job_ends(
        self,
        run: InstalledRun,
        cluster: Cluster,
        shelf: Shelf,
        said: list[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("jobs.operate.following._EVERY_SECONDS", 0.05)
        put(shelf, "extract", pod("a"))
        shelf.lines = {("a", "stage"): ["t1 one", "t2 two"], ("b", "stage"): ["t1 again"]}
        following = threading.Thread(
            target=operate.logs,
            args=(run, cluster, "extract", said.append),
            kwargs={"follow": True},
        )
        following.start()
        wait_for(lambda: said == ["one", "two"])
        # The connection broke in the same second, which is told from there on.
        shelf.lines["a", "stage"].append("t3 three")
        wait_for(lambda: said == ["one", "two", "three"])
        killed = pod("a", "Failed", terminated={"exitCode": 137})
        put(shelf, "extract", killed, pod("b", "Succeeded", terminated={"exitCode": 0}))
        wait_for(lambda: said[3:] == ["again"])
        assert following.is_alive()
        put(shelf, "extract", **failed())
        following.join(10)
        assert not following.is_alive()
        assert said == ["one", "two", "three", "again"], "each line once"

    def test_a_stage_without_a_job_is_refused(self, run: InstalledRun, cluster: Cluster) -> None:
        with pytest.raises(UpstreamMissing, match=f"eagle3 status {RUN}"):
            operate.logs(run, cluster, "vocab", print)
