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
from eagle3.errors import PermissionRefused, StageFailed
from eagle3.ordering import JobState

GOLDEN = Path(__file__).resolve().parent / "golden" / "status.json"
CASES = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}


def diagnosed(case: str) -> Diagnosis:
    objects = CASES[case]["objects"]
    return diagnose(objects["job"], objects["pods"], objects["events"])


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


def pod(name: str, *, code: int = 0, phase: str = "Failed", **status: object) -> dict[str, Any]:
    """A pod whose stage ended with a code, as far as it is looked at."""
    ended = [{"name": "stage", "state": {"terminated": {"exitCode": code}}}] if code else []
    return {
        "metadata": {"name": name, "uid": name, "creationTimestamp": f"2026-12-01T00:00:0{name}Z"},
        "spec": {"nodeName": "n2"},
        "status": {"phase": phase, "containerStatuses": ended, **status},
    }


def failed_job(message: str = "") -> dict[str, Any]:
    condition = {"type": "Failed", "status": "True", "reason": "X", "message": message}
    return {"metadata": {"name": "job", "uid": "j"}, "status": {"conditions": [condition]}}


DISRUPTED = {"conditions": [{"type": "DisruptionTarget", "status": "True"}]}


def test_a_job_s_reason_is_the_pod_s_that_ended_it() -> None:
    pods = [pod("1", code=3), pod("2", code=4), pod("3", code=5, **DISRUPTED)]
    assert "exit code 4" in diagnose(failed_job(), pods).why, "the newest that was not drained"
    named = "Container stage for pod drafts/1 failed with exit code 3 matching FailJob rule"
    assert "exit code 3" in diagnose(failed_job(named), pods).why


def test_a_pod_that_the_kubelet_put_out_says_what_it_had_too_little_of() -> None:
    message = "Pod ephemeral local storage usage exceeds the total limit of containers 4Gi."
    evicted = pod("1", code=137, reason="Evicted", message=message)
    found = diagnose(failed_job(), [evicted])
    assert found.why == f"pod 1 was evicted: {message}"
    assert "scratch" in found.remedy
    active = {"metadata": {"name": "job", "uid": "j"}, "status": {}}
    assert diagnose(active, [evicted]).why == found.why


def test_a_lost_node_is_not_told_as_a_drain() -> None:
    active = {"metadata": {"name": "job", "uid": "j"}, "status": {}}
    stopping = pod("1", phase="Running")
    stopping["metadata"]["deletionTimestamp"] = "2026-12-01T00:10:00Z"
    assert "another pod goes on" in diagnose(active, [stopping]).remedy
    condition = {**DISRUPTED["conditions"][0], "reason": "DeletionByTaintManager"}
    stopping["status"]["conditions"] = [condition]
    found = diagnose(active, [stopping])
    assert "n2" in found.why
    assert "kubectl taint node n2" in found.remedy


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
