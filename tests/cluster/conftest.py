"""The cluster that tests share, and a namespace for each that asks."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from tests.cluster import machine, release, waiting
from tests.cluster.cluster import Cluster, CommandFailed, Namespace
from tests.cluster.images import ImagesUnavailable, build_images, record
from tests.cluster.places import logs
from tests.cluster.testbed import Occupied, Unavailable, running_cluster

DID_NOT_START = (OSError, subprocess.SubprocessError, waiting.Late, CommandFailed, RuntimeError)


def skip(reason: str, *, occupied: bool = False) -> NoReturn:
    """Skip with a reason, but where the cluster was asked for: there it is a failure."""
    if machine.insisted() in (("required",) if occupied else ("required", "expected")):
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A running cluster; that of KUBECONFIG, where it is given."""
    with contextlib.ExitStack() as running:
        try:
            cluster = running.enter_context(running_cluster())
        except Unavailable as reason:
            skip(f"{reason}.", occupied=isinstance(reason, Occupied))
        except DID_NOT_START as error:
            # A machine may lack what nobody thought of.
            skip(f"the test cluster did not start ({error}); see {logs()}.")
        yield cluster


@pytest.fixture
def our_cluster(cluster: Cluster) -> Cluster:
    """A cluster whose nodes a test may operate on: images, cables, the S3 server."""
    if not cluster.ours:
        pytest.skip("KUBECONFIG names a cluster that is not ours to operate on.")
    return cluster


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[Namespace]:
    """A namespace that admits only pods of the standard `restricted`; deleted afterwards."""
    with _new_namespace(cluster) as mine:
        yield mine


@pytest.fixture(scope="module")
def module_namespace(cluster: Cluster) -> Iterator[Namespace]:
    """The same, for a whole file of tests."""
    with _new_namespace(cluster) as mine:
        yield mine


@pytest.fixture(scope="session")
def loaded(cluster: Cluster) -> Cluster:
    """Our cluster, with the project's images on every node."""
    if not cluster.ours:
        pytest.skip("KUBECONFIG names a cluster that is not ours to operate on.")
    try:
        images = build_images()
    except ImagesUnavailable as reason:
        skip(f"{reason}.")
    record(images)
    release.load_images(cluster, images)
    return cluster


@pytest.fixture(scope="session")
def inputs(loaded: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The configuration of a tiny run, whose verifier and chats lie in the cluster's bucket.

    The variables by which this process reads that bucket stay set as long.
    """
    assert loaded.s3 is not None
    with release.environment(loaded.s3):
        yield dict(release.upload_inputs(tmp_path_factory.mktemp("inputs")))


@contextlib.contextmanager
def _new_namespace(cluster: Cluster) -> Iterator[Namespace]:
    mine = Namespace(cluster=cluster, name=f"eagle3-{secrets.token_hex(4)}")
    mine.make()
    yield mine
    mine.delete()
