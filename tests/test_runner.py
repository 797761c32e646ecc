"""What orders a run: what it makes, what it bears, and what it says meanwhile.

Against a real API server, killed after any of its calls: `tests/cluster/test_runner.py`.
"""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle3.cluster import CANCELLED, Cluster, Object
from eagle3.errors import (
    ConfigError,
    CredentialsUnusable,
    Eagle3Error,
    PermissionRefused,
    ServiceUnavailable,
    StageFailed,
    Stopped,
    TemporaryFailure,
    UpstreamMissing,
)
from jobs import operate
from jobs.installed import InstalledRun
from jobs.patience import Patience
from jobs.runner import Runner, order
from tests.shelf import RUN, Shelf, failed, pod, put, served, write_run
from tests.upstreams import HIDDEN_STATES, VERIFIER, commit


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


class TestRunner:
    def test_a_failure_does_not_give_up_what_is_at_work(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf, said: list[str]
    ) -> None:
        """vocab fails in minutes while extract runs for days: the run ends after extract."""
        commit(run.store, "verifier")
        commit(run.store, "prepare", verifier=VERIFIER)
        runner = Runner(run, cluster, said.append)
        runner.step()
        broken = pod("v", "Failed", terminated={"exitCode": 3})
        put(shelf, "vocab", broken, **failed())
        for _ in range(2):
            assert not runner.step()
            assert runner.going
        assert isinstance(runner.failure, StageFailed)
        assert sum("exit code 3" in line for line in said) == 1, "told once"
        ordering = threading.Thread(target=ended_by, args=(run, cluster, said))
        ordering.start()
        time.sleep(0.3)
        assert ordering.is_alive(), "extract is at work"
        commit(run.store, "extract", **HIDDEN_STATES)
        ordering.join(20)
        assert said[-1].startswith("StageFailed: vocab: job")

    def test_a_stage_that_is_tried_again_meanwhile_is_no_failure_any_more(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf, said: list[str]
    ) -> None:
        commit(run.store, "verifier")
        commit(run.store, "prepare", verifier=VERIFIER)
        runner = Runner(run, cluster, said.append)
        runner.step()
        put(shelf, "vocab", **failed())
        runner.step()
        assert runner.failure
        operate.retry(run, cluster, "vocab")
        runner.step()
        assert runner.failure is None
        assert f"{RUN}-vocab" in shelf.jobs

    def test_a_store_that_is_away_in_the_middle_of_a_look_ends_nothing(
        self,
        run: InstalledRun,
        cluster: Cluster,
        shelf: Shelf,
        said: list[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The look that found the failure did not get as far as what is at work."""
        runner = Runner(run, cluster, said.append)
        put(shelf, "prepare", **failed())
        put(shelf, "extract", pod("e"))
        looked = []

        def away(self: Runner, stage: Any, job: Object) -> None:
            looked.append(stage.name)
            if len(looked) == 1:
                raise ServiceUnavailable("store", wanted="it", found="nothing", remedy="wait")
            del shelf.jobs[f"{RUN}-extract"]

        monkeypatch.setattr(Runner, "_show_progress", away)
        del runner
        ended_by(run, cluster, said)
        assert looked == ["extract", "extract"], "asked again before the run was given up"

    def test_a_job_that_is_being_deleted_is_made_again(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf, said: list[str]
    ) -> None:
        """What `cancel` deletes stands for its grace, while another orderer looks."""
        runner = Runner(run, cluster, said.append)
        job = put(shelf, "prepare", pod("p"))
        job["metadata"]["deletionTimestamp"] = "2026-12-01T00:00:00Z"
        assert not runner.step()
        del shelf.jobs[f"{RUN}-prepare"]
        assert not runner.step()
        assert "deletionTimestamp" not in shelf.jobs[f"{RUN}-prepare"]["metadata"]
        assert runner.failure is None

    @pytest.mark.parametrize("before", [True, False])
    def test_a_retry_in_the_middle_of_a_look_is_no_loss(
        self,
        run: InstalledRun,
        cluster: Cluster,
        shelf: Shelf,
        said: list[str],
        before: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The old Job is not noted as the next one, nor missed, whenever it went."""
        commit(run.store, "verifier")
        commit(run.store, "prepare", verifier=VERIFIER)
        runner = Runner(run, cluster, said.append)
        runner.step()
        put(shelf, "vocab", **failed())
        own, tried = Cluster.job, []

        def job(self: Cluster, name: str) -> Object | None:
            def retried() -> None:
                tried.append(name)
                operate.retry(run, self, "vocab")

            here = name == f"{RUN}-vocab" and not tried
            if here and before:
                retried()
            found = own(self, name)
            if here and not before:
                retried()
            return found

        monkeypatch.setattr(Cluster, "job", job)
        runner.step()
        assert tried
        assert f"{RUN}-vocab" not in shelf.jobs
        assert bool(runner.failure) is not before, "it had failed, and was not gone"
        runner.step()
        assert runner.failure is None
        assert f"{RUN}-vocab" in shelf.jobs

    def test_what_is_committed_is_noted_though_the_api_was_away(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf, said: list[str]
    ) -> None:
        job = put(shelf, "prepare")
        job["metadata"]["annotations"] = {"eagle3/ttl-seconds": "60"}
        commit(run.store, "verifier")
        commit(run.store, "prepare", verifier=VERIFIER)
        runner = Runner(run, cluster, said.append)
        shelf.refusals = [("PATCH", 503, "away")]
        with pytest.raises(ServiceUnavailable):
            runner.step()
        runner.step()
        assert job["metadata"]["annotations"]["eagle3/progress"].startswith("committed as")
        assert job["spec"]["ttlSecondsAfterFinished"] == 60
        assert sum(line.startswith("prepare: committed") for line in said) == 1

    def test_other_owners_are_kept(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf, said: list[str]
    ) -> None:
        others = [{"kind": "Application", "name": "git", "uid": "1"}]
        before = {"kind": "ConfigMap", "name": "drafts", "uid": "an earlier release's"}
        shelf.config_maps["drafts"] = {"metadata": {"uid": "2"}}
        shelf.config_maps[RUN] = {"metadata": {"ownerReferences": [*others, before]}}
        job = put(shelf, "runner", pod("r"))
        job["metadata"] |= {"ownerReferences": others, "resourceVersion": "7"}
        for _ in range(2):
            Runner(run, cluster, said.append).adopt()
            for thing in (shelf.config_maps[RUN], job):
                owners = thing["metadata"]["ownerReferences"]
                assert [one["uid"] for one in owners] == ["1", "2"]
        patches = [body["metadata"] for method, _, body in shelf.asked if method == "PATCH"]
        assert patches[-1]["resourceVersion"] == "7", "one that came between is not overwritten"

    def test_a_policy_that_refuses_one_stage_does_not_give_up_another(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf, said: list[str]
    ) -> None:
        commit(run.store, "verifier")
        commit(run.store, "prepare", verifier=VERIFIER)
        runner = Runner(run, cluster, said.append)
        shelf.refusals = [("POST", 403, 'admission webhook "x" denied the request: too large')]
        assert not runner.step()
        assert runner.going, "vocab is"
        assert isinstance(runner.failure, ConfigError)
        assert not runner.step()
        assert runner.failure is None
        assert f"{RUN}-extract" in shelf.jobs


class TestPatience:
    """What an orderer does while something keeps it from going on."""

    OWN = f"{RUN}-runner"

    @pytest.fixture(autouse=True)
    def at_work(self, run: InstalledRun, shelf: Shelf) -> None:
        put(shelf, "runner", pod("r"))

    def ordered(self, run: InstalledRun, cluster: Cluster, said: list[str], looks: int) -> None:
        """So many looks, as the runner's pod does them."""
        waits: list[float] = []

        def stop(seconds: float) -> bool:
            waits.append(seconds)
            return len(waits) == looks

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("jobs.runner.stop_requested", stop)
            try:
                order(run, cluster, said.append, 0.01, job=self.OWN)
            except Stopped:
                return

    def test_what_keeps_it_waiting_is_noted_on_its_own_job_until_it_passes(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf, said: list[str]
    ) -> None:
        """A first install whose store cannot be reached says so to who looks at the cluster."""

        def refuse(*_: Any) -> None:
            raise away()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("jobs.runner.JobRecords.expect", refuse)
            self.ordered(run, cluster, said, looks=3)
        rows = {row.stage: row for row in operate.status(run, cluster)}
        assert "s3://b: wanted an answer, found none" in rows["runner"].what
        assert [event["reason"] for event in shelf.events] == ["RunHeldUp"]
        assert shelf.events[0]["involvedObject"]["name"] == self.OWN
        assert said == ["runner: s3://b: wanted an answer, found none; wait."], "told once"
        self.ordered(run, cluster, said, looks=1)
        rows = {row.stage: row for row in operate.status(run, cluster)}
        assert rows["runner"].what == ""

    def test_a_full_quota_for_jobs_is_noted_too(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf, said: list[str]
    ) -> None:
        shelf.refusals = [("POST", 403, "jobs is forbidden: exceeded quota: team, count/jobs")]
        self.ordered(run, cluster, said, looks=1)
        noted = shelf.jobs[self.OWN]["metadata"]["annotations"]["eagle3/progress"]
        assert "exceeded quota" in noted
        self.ordered(run, cluster, said, looks=1)
        assert f"{RUN}-prepare" in shelf.jobs

    def test_a_run_that_is_ordered_from_elsewhere_notes_nothing_on_the_runner(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf, said: list[str]
    ) -> None:
        Patience(cluster, said.append, "").bear(away())
        assert len(said) == 1
        assert not shelf.asked

    @pytest.mark.parametrize("status", [401, 403])
    def test_a_moment_s_refusal_ends_nothing(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf, said: list[str], status: int
    ) -> None:
        """An API server that restarts knows neither tokens nor roles for a while."""
        commit(run.store, "verifier")
        commit(run.store, "prepare", verifier=VERIFIER)
        for stage in ("extract", "vocab"):
            put(shelf, stage, pod(stage))
        waits = 0

        def stop(_: float) -> bool:
            nonlocal waits
            waits += 1
            if waits == 1:
                role = 'jobs.batch "x" is forbidden: User "r" cannot get: RBAC: role not found'
                shelf.refusals = [("GET", status, role)]
            if waits == 3:
                commit(run.store, "extract", **HIDDEN_STATES)
                commit(run.store, "vocab", facts={"draft_vocab_size": 64})
            return waits > 9

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("jobs.runner.stop_requested", stop)
            order(run, cluster, said.append, 0.01)
        assert waits == 3
        assert any("role not found" in line for line in said)

    def test_what_it_was_never_let_do_ends_it_at_once(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf, said: list[str]
    ) -> None:
        shelf.refusals = [("GET", 403, 'jobs "x" is forbidden: User "r" cannot get')]
        with pytest.raises(PermissionRefused):
            self.ordered(run, cluster, said, looks=5)

    @pytest.mark.parametrize("kind", [PermissionRefused, CredentialsUnusable, TemporaryFailure])
    def test_a_pod_whose_credentials_stay_refused_makes_room_for_one_with_others(
        self,
        cluster: Cluster,
        said: list[str],
        kind: type[Eagle3Error],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """A Secret's keys are those of the moment at which the pod began."""
        patience, error = Patience(cluster, said.append, self.OWN), away(kind)
        patience.rest()
        patience.bear(error)
        monkeypatch.setattr("jobs.patience.REFUSED_SECONDS", 0.0)
        time.sleep(0.01)
        if kind is TemporaryFailure:
            patience.bear(error)
            return
        with pytest.raises(kind):
            patience.bear(error)
        patience.rest()
        patience.bear(error)

    def test_a_cancelled_run_is_not_ordered_whoever_starts_its_runner(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf, said: list[str]
    ) -> None:
        shelf.jobs[self.OWN]["metadata"]["annotations"] = {CANCELLED: "true"}
        self.ordered(run, cluster, said, looks=3)
        assert set(shelf.jobs) == {self.OWN}
        assert len(said) == 1
        operate.restart_runner(run, cluster)
        self.ordered(run, cluster, said, looks=1)
        assert f"{RUN}-prepare" in shelf.jobs


def away(kind: type[Eagle3Error] = ServiceUnavailable) -> Eagle3Error:
    return kind("s3://b", wanted="an answer", found="none", remedy="wait")


def ended_by(run: InstalledRun, cluster: Cluster, said: list[str]) -> None:
    try:
        order(run, cluster, said.append, 0.02)
    except (StageFailed, UpstreamMissing) as error:
        said.append(f"{type(error).__name__}: {error}")
