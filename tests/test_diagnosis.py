"""Why a Job does not go on, from what a real cluster said of it.

`tests/golden/status.json` was recorded by `tests/cluster/test_status.py`: the objects, and the
sentence that they became.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from eagle3.diagnosis import Diagnosis, diagnose, job_state
from eagle3.diagnosis.objects import moment
from eagle3.errors import PermissionRefused, StageFailed
from eagle3.ordering import JobState
from eagle3.progress import ProgressRecord

GOLDEN = Path(__file__).resolve().parent / "golden" / "status.json"
CASES = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}


def diagnosed(case: str) -> Diagnosis:
    objects = CASES[case]["objects"]
    # As it was told then: at the newest moment that the objects know of.
    now = max(map(moment, re.findall(r"\d{4}-\d\d-\d\dT[\d:.]+Z", json.dumps(objects))))
    return diagnose(objects["job"], objects["pods"], objects["events"], now)


@pytest.mark.parametrize("case", CASES)
def test_the_same_objects_are_told_in_the_same_words(case: str) -> None:
    found = diagnosed(case)
    assert (found.state, plain(found.sentence)) == (CASES[case]["state"], CASES[case]["what"])


def test_the_stage_s_own_last_words_are_the_run_s_error() -> None:
    error = diagnosed("wrong key").as_error("prepare: job x")
    assert isinstance(error, PermissionRefused)
    assert "signature" in error.found


@pytest.mark.parametrize("case", ["stopped", "out of memory", "deadline", "fault of ours"])
def test_what_kubernetes_has_given_up_is_no_reason_to_try_again(case: str) -> None:
    error = diagnosed(case).as_error("prepare: job x")
    assert isinstance(error, StageFailed)
    assert not error.retry_can_help


def test_last_words_that_a_retry_could_have_helped_end_the_run_too() -> None:
    objects = CASES["wrong key"]["objects"]
    text = json.dumps(objects["pods"]).replace("PermissionRefused", "ServiceUnavailable")
    error = diagnose(objects["job"], json.loads(text)).as_error("prepare: job x")
    assert isinstance(error, StageFailed)
    assert "signature" in error.found


def test_a_job_is_failed_or_complete_only_when_its_condition_says_so() -> None:
    for kind, state in (("Failed", JobState.FAILED), ("Complete", JobState.COMPLETE)):
        job = {"status": {"conditions": [{"type": kind, "status": "True"}]}}
        assert job_state(job) is state
        job["status"]["conditions"][0]["status"] = "False"
        assert job_state(job) is JobState.ACTIVE
    about_to = {"status": {"conditions": [{"type": "FailureTarget", "status": "True"}]}}
    assert job_state(about_to) is JobState.ACTIVE
    assert job_state({}) is JobState.ACTIVE
    assert job_state(None) is JobState.MISSING


START = "2026-12-01T00:00:00Z"
NOW = moment(START) + 3600


def pod(name: str, *, code: int = 0, phase: str = "Failed", **status: object) -> dict[str, Any]:
    """A pod whose stage ended with a code, or runs; its name is the second in which it began."""
    began = f"2026-12-01T00:00:0{name}Z"
    state: dict[str, Any] = {"terminated": {"exitCode": code}} if code else {}
    if phase == "Running":
        state = {"running": {"startedAt": began}}
    return {
        "metadata": {"name": name, "uid": name, "creationTimestamp": began},
        "spec": {"nodeName": "n2"},
        "status": {
            "phase": phase,
            "containerStatuses": [{"name": "stage", "ready": True, "state": state}],
            **status,
        },
    }


def ended(name: str, **terminated: object) -> dict[str, Any]:
    found = pod(name)
    found["status"]["containerStatuses"][0]["state"] = {"terminated": terminated}
    return found


def failed_job(message: str = "", reason: str = "BackoffLimitExceeded") -> dict[str, Any]:
    condition = {"type": "Failed", "status": "True", "reason": reason, "message": message}
    return {"metadata": {"name": "job", "uid": "j"}, "status": {"conditions": [condition]}}


def active_job(**status: object) -> dict[str, Any]:
    return {"metadata": {"name": "job", "uid": "j"}, "status": status}


DISRUPTED = {"conditions": [{"type": "DisruptionTarget", "status": "True"}]}
RECORD = {
    "stage": "train",
    "error": "ServiceUnavailable",
    "field": "s3://x",
    "wanted": "an answer from the object store",
    "found": "ConnectTimeoutError",
    "remedy": "check the endpoint",
}


def test_a_job_s_reason_is_the_pod_s_that_ended_it() -> None:
    drained = ended("3", exitCode=5)
    drained["status"] |= DISRUPTED
    pods = [pod("1", code=3), pod("2", code=4), drained]
    assert "exit code 4" in diagnose(failed_job(), pods).why, "the newest that was not drained"
    named = "Container stage for pod drafts/1 failed with exit code 3 matching FailJob rule"
    assert "exit code 3" in diagnose(failed_job(named), pods).why


def test_the_newest_failure_comes_before_one_with_words() -> None:
    spoke = ended("1", exitCode=69, message=json.dumps(RECORD))
    silent = [ended(str(number), exitCode=137, reason="OOMKilled") for number in (2, 3, 4)]
    found = diagnose(failed_job(), [spoke, *silent])
    assert found.why == "pod 4: container stage was killed for want of memory"
    assert found.sentence.endswith("; other pods ended of ServiceUnavailable (1)")
    same = diagnose(failed_job(), silent)
    assert "other pods" not in same.sentence
    assert "memory" in str(found.as_error("train: job x"))


def test_the_newest_is_the_one_that_ended_last_whenever_it_began() -> None:
    early = ended("2", exitCode=4, finishedAt="2026-12-01T00:10:00Z")
    late = ended("1", exitCode=3, finishedAt="2026-12-01T00:20:00Z")
    assert "exit code 3" in diagnose(failed_job(), [early, late]).why


EVICTIONS = {
    "Pod ephemeral local storage usage exceeds the total limit of containers 4Gi. ": "scratch",
    'Usage of EmptyDir volume "scratch" exceeds the limit "800Gi". ': "scratch",
    'Usage of EmptyDir volume "dshm" exceeds the limit "64Gi". ': "shm",
    "The node was low on resource: memory. ": "memory",
    "The node was low on resource: ephemeral-storage. ": "disk",
}


@pytest.mark.parametrize("message", EVICTIONS)
def test_a_pod_that_the_kubelet_put_out_says_what_it_had_too_little_of(message: str) -> None:
    evicted = pod("1", code=137, reason="Evicted", message=message)
    found = diagnose(failed_job(), [evicted])
    assert found.why == f"pod 1 was evicted: {message.strip()}"
    assert EVICTIONS[message] in found.remedy
    assert found.why in diagnose(active_job(), [evicted]).why


def test_a_pod_that_its_node_never_began_says_so() -> None:
    refused = pod("1", reason="UnexpectedAdmissionError", message="no GPU is healthy")
    refused["status"]["containerStatuses"] = []
    found = diagnose(failed_job(), [refused])
    assert found.why == "pod 1: UnexpectedAdmissionError: no GPU is healthy"


def test_what_failed_before_is_told_beside_what_runs() -> None:
    spoke = ended("1", exitCode=69, message=json.dumps(RECORD))
    pods = [spoke, ended("2", exitCode=137, reason="OOMKilled"), pod("3", phase="Running")]
    found = diagnose(active_job(failed=5, active=1), pods, (), NOW)
    assert (found.state, found.restarts) == ("running", 5)
    assert found.told(None, NOW) == [
        "5 pods failed so far, the last: pod 2: container stage was killed for want of memory"
    ]
    words = diagnose(active_job(failed=1), [spoke, pod("3", phase="Running")], (), NOW)
    assert words.last == "ConnectTimeoutError"
    gone = diagnose(active_job(failed=1), [pod("3", phase="Running")], (), NOW)
    assert "1 pod failed so far" in gone.told(None, NOW)[-1]
    assert not diagnose(active_job(), [pod("3", phase="Running")], (), NOW).told(None, NOW)


def test_the_workers_that_run_are_told_of_beside_one_that_does_not() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    held = pod("2", phase="Pending", conditions=[{**condition, "message": "0/2 nodes"}])
    found = diagnose(active_job(), [pod("1", phase="Running"), held], (), NOW)
    report = ProgressRecord(
        stage="extract",
        index=0,
        step="capture",
        unit="rows",
        done=5,
        all=10,
        rate=1.0,
        seconds_left=5.0,
        host="n2",
        updated_at=NOW,
    )
    progress, trouble = found.told([report], NOW)
    assert progress == "capture 5 of 10 rows (50%), 1.0 rows/s, 0:00:05 left"
    assert trouble.startswith("pod 2 fits no node: 0/2 nodes")


class TestLostNodes:
    def stopping(self, until: str, **condition: str) -> dict[str, Any]:
        found = pod("1", phase="Running")
        found["metadata"]["deletionTimestamp"] = until
        found["status"]["conditions"] = [{**DISRUPTED["conditions"][0], **condition}]
        return found

    def test_a_drain_is_told_while_its_grace_lasts(self) -> None:
        drained = self.stopping("2026-12-01T01:00:00Z", message="Eviction API: evicting")
        found = diagnose(active_job(), [drained], (), NOW)
        assert found.why == "pod 1 is being stopped: Eviction API: evicting"
        assert "another pod goes on" in found.remedy

    def test_a_pod_that_should_have_ended_long_ago_is_on_a_lost_node(self) -> None:
        overdue = self.stopping("2026-12-01T00:50:00Z", message="Eviction API: evicting")
        found = diagnose(active_job(), [overdue], (), NOW)
        assert "node n2 does not answer: pod 1 should have ended 0:10:00 ago" in found.why
        assert "kubectl taint node n2 node.kubernetes.io/out-of-service" in found.remedy
        assert "another pod goes on" not in found.sentence

    def test_a_pod_that_the_taint_manager_ends_may_be_on_a_lost_node(self) -> None:
        evicted = self.stopping("2026-12-01T01:00:00Z", reason="DeletionByTaintManager")
        found = diagnose(active_job(), [evicted], (), NOW)
        assert "n2 does not answer, or evicts its pods" in found.why
        assert "kubectl taint node n2" in found.remedy

    def test_a_node_is_missed_before_its_pods_are_deleted(self) -> None:
        silent = pod("1", phase="Running")
        not_ready = {"type": "Ready", "status": "False", "lastTransitionTime": START}
        silent["status"]["conditions"] = [not_ready]
        found = diagnose(active_job(), [pod("2", phase="Running"), silent], (), NOW)
        assert f"node n2 does not answer: pod 1 is not ready since {START}" in found.why
        silent["status"]["containerStatuses"][0]["ready"] = False
        assert not diagnose(active_job(), [silent], (), NOW).why, "its container only begins"

    def test_a_lost_node_is_told_before_what_else_is_wrong(self) -> None:
        drained = self.stopping("2026-12-01T01:00:00Z", message="Eviction API: evicting")
        overdue = self.stopping("2026-12-01T00:50:00Z")
        found = diagnose(active_job(), [drained, overdue], (), NOW)
        assert "node n2 does not answer" in found.why
        assert found.why.endswith("(and 1 more pod held up)")


class TestNoPod:
    def refused(self, message: str, when: str) -> dict[str, Any]:
        about = {"uid": "j"}
        return {
            "reason": "FailedCreate",
            "involvedObject": about,
            "message": message,
            "lastTimestamp": when,
        }

    def test_a_quota_that_asks_for_limits_is_not_waited_for(self) -> None:
        message = "failed quota: team: must specify limits.cpu for: gate,stage"
        found = diagnose(active_job(), [], [self.refused(message, START)])
        assert "wait" not in found.remedy
        assert "LimitRange" in found.remedy
        full = self.refused("exceeded quota: none", START)
        assert "wait until others end" in diagnose(active_job(), [], [full]).remedy

    def test_an_old_event_does_not_hide_how_the_last_pod_ended(self) -> None:
        killed = ended("5", exitCode=137, reason="OOMKilled", finishedAt="2026-12-01T00:30:00Z")
        old, new = (
            self.refused("no", "2026-12-01T00:20:00Z"),
            self.refused("no", "2026-12-01T00:40:00Z"),
        )
        assert "want of memory" in diagnose(active_job(), [killed], [old]).why
        assert "no pod can be created: no" in diagnose(active_job(), [killed], [old, new]).why

    def test_a_pod_that_its_queue_holds_back_is_told_of(self) -> None:
        gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
        held = pod("1", phase="Pending", conditions=[gated])
        assert "scheduling gate" in diagnose(active_job(), [held], (), NOW).why


def plain(text: str) -> str:
    """A sentence without what differs from run to run."""
    text = re.sub(r"status-s\d+(-[a-z]+)?(-[a-z0-9]{5})?", r"RUN\1", text)
    text = re.sub(r"runs/s\d+", "runs/RUN", text)
    text = re.sub(r"eagle3-[0-9a-f]{8}", "NAMESPACE", text)
    text = re.sub(r"http://[\d.]+:\d+", "ENDPOINT", text)
    text = re.sub(r"\.probe-[0-9a-f]+", ".probe", text)
    text = re.sub(r"ErrImagePull|ImagePullBackOff", "ErrImagePull", text)
    if "ErrImagePull" in text:
        text = re.sub(r"ErrImagePull: .*;", "ErrImagePull: REASON;", text)
    return re.sub(r"\d+ Insufficient [^,.]*", "N Insufficient", text)
