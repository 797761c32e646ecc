"""What every test may count on: the project on the path of what it starts, and a real S3 server."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.s3_server import S3Server, s3_server

ROOT = Path(__file__).resolve().parent.parent


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
