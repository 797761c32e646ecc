"""What an API server's refusals mean, and changes that somebody else was faster with."""

from collections.abc import Iterator

import pytest

from eagle3.cluster import Cluster
from eagle3.cluster.refusals import refusal
from eagle3.errors import (
    ConfigError,
    Eagle3Error,
    PermissionRefused,
    ServiceUnavailable,
    TemporaryFailure,
)
from tests.shelf import Shelf, put, served

FORBIDDEN: dict[str, type[Eagle3Error]] = {
    'jobs.batch is forbidden: User "a" cannot create resource "jobs"': PermissionRefused,
    'jobs.batch is forbidden: User "a" cannot create: denied the request': PermissionRefused,
    "configmaps is forbidden: cannot set an ownerRef on a resource": PermissionRefused,
    'admission webhook "a.b" denied the request: an image cannot be latest': ConfigError,
    "jobs.batch is forbidden: ValidatingAdmissionPolicy 'a' denied request: no": ConfigError,
    "jobs.batch is forbidden: failed quota: a: must specify count/jobs": ConfigError,
    "jobs.batch is forbidden: unable to create, it is being terminated": ConfigError,
    "jobs.batch is forbidden: exceeded quota: a, used: count/jobs.batch=1": TemporaryFailure,
    "jobs.batch is forbidden: status unknown for quota: a": TemporaryFailure,
}


@pytest.mark.parametrize("said", FORBIDDEN)
def test_a_policy_s_no_is_told_from_a_role_s(said: str) -> None:
    error = refusal("jobs/x", 403, said)
    assert type(error) is FORBIDDEN[said]
    assert f"found 403, {said}" in str(error)
    assert ("chart's Role" in str(error)) is (type(error) is PermissionRefused)


def test_a_status_without_words_of_ours_is_an_api_server_that_is_away() -> None:
    said = 'failed calling webhook "a.b": connection refused'
    assert isinstance(refusal("jobs/x", 500, said), ServiceUnavailable)
    assert isinstance(refusal("jobs/x", 429, "too many requests"), ServiceUnavailable)
    assert isinstance(refusal("jobs/x", 422, "spec: Required value"), ConfigError)


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def cluster(shelf: Shelf) -> Iterator[Cluster]:
    with served(shelf) as found:
        yield found


def test_a_change_that_meets_another_may_be_tried_again(cluster: Cluster, shelf: Shelf) -> None:
    job = put(shelf, "extract")
    name = job["metadata"]["name"]
    shelf.refusals = [("PATCH", 409, "the object has been modified")]
    with pytest.raises(TemporaryFailure, match="changed meanwhile"):
        cluster.patch_job(name, {"spec": {"parallelism": 2}})
    assert cluster.patch_job(name, {"spec": {"parallelism": 2}})["spec"]["parallelism"] == 2


def test_nothing_is_noted_on_a_job_that_is_gone(cluster: Cluster, shelf: Shelf) -> None:
    job = put(shelf, "extract")
    shelf.jobs.clear()
    cluster.annotate(job, {"progress": "failed"})
    assert not shelf.jobs
