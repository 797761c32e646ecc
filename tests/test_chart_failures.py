"""Which ends of a pod end its Job, of a stage and of the runner; and who waits in a queue."""

import pytest

from eagle3 import errors
from eagle3.errors import Eagle3Error
from eagle3.stages import STAGES
from tests.helm import CPU, EVERYTHING, KIMI, Helm, client


@pytest.fixture(scope="module")
def helm():
    return Helm(client("clients", "helm"))


@pytest.mark.fault("B77")
def test_a_code_that_no_retry_can_help_fails_the_job(helm):
    def below(error):
        return [error, *(found for one in error.__subclasses__() for found in below(one))]

    # Our own classes alone: tests elsewhere may define further ones.
    final = {
        one.exit_code
        for one in below(Eagle3Error)[1:]
        if one.__module__ == errors.__name__ and not one.retry_can_help
    }
    for stage in STAGES:
        rules = helm.release(CPU).jobs[stage.name]["spec"]["podFailurePolicy"]["rules"]
        disrupted, gate, failed, *lacking = rules
        assert disrupted == {
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        }
        machine = errors.EnvironmentMisconfigured.exit_code
        # A pod's keys are those of its start: the next one's gate tells of newer ones.
        refused = errors.PermissionRefused.exit_code
        for container, ends, but in (("gate", gate, set()), ("stage", failed, {refused})):
            assert ends["onExitCodes"]["containerName"] == container
            assert set(ends["onExitCodes"]["values"]) == final - {machine} - but
            assert ends["action"] == "FailJob"
        assert [one["onExitCodes"]["containerName"] for one in lacking] == ["gate", "stage"]
        for one in lacking:
            assert one["onExitCodes"]["values"] == [machine]
            assert one["action"] == ("FailIndex" if stage.indexed else "FailJob")


def test_a_refusal_does_not_end_the_runner_for_good(helm):
    (job,) = helm.release(CPU).of_kind("Job")
    _, ends = job["spec"]["podFailurePolicy"]["rules"]
    assert ends["action"] == "FailJob"
    assert ends["onExitCodes"]["values"] == [64, 65, 66, 78]


def test_the_runner_stands_in_the_same_queue_as_its_stages(helm):
    """Where Kueue manages every Job, one without a queue never begins."""
    queue = "kueue.x-k8s.io/queue-name"
    (runner,) = helm.release_of(KIMI, EVERYTHING).of_kind("Job")
    assert runner["metadata"]["labels"][queue] == "drafts"
    assert queue not in helm.release(CPU).of_kind("Job")[0]["metadata"]["labels"]
