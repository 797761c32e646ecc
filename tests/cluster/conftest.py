"""The cluster that tests share, and a namespace for each that asks."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster, Namespace
from tests.cluster.testbed import Unavailable, running_cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A running cluster; that of KUBECONFIG, where it is given."""
    with contextlib.ExitStack() as running:
        try:
            cluster = running.enter_context(running_cluster())
        except Unavailable as reason:
            pytest.skip(f"{reason}.")
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
    mine = Namespace(cluster=cluster, name=f"eagle3-{secrets.token_hex(4)}")
    mine.make()
    yield mine
    mine.delete()
