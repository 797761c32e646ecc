"""What every test may count on: the project on the path of what it starts, and a real S3 server.

Tests run on every core (pytest-xdist), a file at a time, since a file shares its engines; the
files of tests/cluster/ are one group, since they share one cluster.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.fault_table import faults_in_name
from tests.s3_server import S3Server, s3_server

ROOT = Path(__file__).resolve().parent.parent

# How much a test of that mark weighs in the order of groups.
HEAVY = {"cluster": 100, "slow": 100, "engine": 1}


def pytest_configure(config: pytest.Config) -> None:
    """Give each worker cores of its own, before anything counts them: the thread pools of two
    engines on the same cores wait for each other in busy loops."""
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker is not None:
        cores = sorted(os.sched_getaffinity(0))
        mine = cores[int(worker["workerid"][2:]) :: worker["workercount"]]
        os.sched_setaffinity(0, mine or cores)


class _Groups(LoadFileScheduling):
    """A worker takes a file at a time, and one worker all that needs the cluster."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _Groups:
    """Share the tests out in groups."""
    return _Groups(config, log)


def pytest_itemcollected(item: pytest.Item) -> None:
    """A test whose name, or whose class's, begins with ids of faults is marked with them."""
    for part in item.nodeid.split("::")[1:]:
        if ids := faults_in_name(part):
            item.add_marker(pytest.mark.fault(*sorted(ids)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The groups with slow tests and engines first, so that no worker begins one at the end."""
    weights = Counter[str]()
    for item in items:
        for mark in item.iter_markers():
            weights[group_of(item.nodeid)] += HEAVY.get(mark.name, 0)
    items.sort(key=lambda item: -weights[group_of(item.nodeid)])


def group_of(nodeid: str) -> str:
    """What the tests of one worker have in common: their file, or the cluster."""
    file = nodeid.split("::")[0]
    return "tests/cluster" if file.startswith("tests/cluster/") else file


@contextlib.contextmanager
def started(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A process of the project with its output in pipes, which no failing test leaves behind."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session", autouse=True)
def _project_on_the_path_of_children() -> Iterator[None]:
    """Engines and loaders are spawned, and import the project by PYTHONPATH."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), before]))
    yield
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server with real credentials, one for all tests; its bucket is `BUCKET`."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3_environment(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The same server, with the variables set by which a client finds it."""
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return s3
