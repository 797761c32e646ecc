"""Faults of object storage that no other file's tests answer for, each by its row of the table."""

from __future__ import annotations

import ast
import contextlib
import http.server
import json
import os
import secrets
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import botocore.auth
import fsspec.config
import pytest
from botocore.exceptions import ClientError
from s3fs.errors import translate_boto_error

from eagle3.errors import EnvironmentMisconfigured, PermissionRefused, TemporaryFailure
from eagle3.store import faults, open_store
from tests.fault_table import ROOT
from tests.s3_server import BUCKET, S3Server

# Of one object, by bytes or a file that are finished; a listing; and what sends no request.
WHOLE = {"cat_file", "pipe_file", "put_file", "get_file", "info", "find", "ls", "rm_file"}
OF_ONE_REQUEST = {"call_s3", "split_path", "_strip_protocol", "connect", "session", "retries"}


def asked_of_backends() -> Iterator[tuple[str, str]]:
    """Where something is asked of a backend's client, and what."""
    for path in sorted((ROOT / "eagle3" / "store").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            owner = ast.unparse(node.value) if isinstance(node, ast.Attribute) else ""
            if isinstance(node, ast.Attribute) and owner.endswith(("_fs", "client", "fsspec")):
                yield f"{path.name}:{node.lineno}", node.attr


def test_b28_b29_b37_backends_are_asked_for_whole_objects_one_at_a_time() -> None:
    allowed = (
        WHOLE
        | OF_ONE_REQUEST
        | {
            "filesystem",
            "available_protocols",
            "get_filesystem_class",
        }
    )
    asked = list(asked_of_backends())
    assert {name for _, name in asked} >= {"cat_file", "pipe_file", "put_file"}
    other = [f"{where}: {name}" for where, name in asked if name not in allowed]
    assert not other, (
        "a handle publishes what it holds when it is dropped; many at once drown a store"
    )


@pytest.fixture
def url(s3_environment: S3Server) -> str:
    return f"s3://{BUCKET}/{secrets.token_hex(4)}/run"


@pytest.mark.slow
def test_b29_b30_a_process_that_fails_after_a_large_write_ends_at_once(url: str) -> None:
    code = """
        import sys
        from eagle3.store import open_store
        store = open_store(sys.argv[1])
        store.write_bytes("large", bytes(60_000_000))
        raise RuntimeError("a fault of ours")
    """
    command = [sys.executable, "-c", textwrap.dedent(code), url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "a fault of ours" in done.stderr
    assert open_store(url).size("large") == 60_000_000


@pytest.mark.slow
def test_b32_what_another_pod_adds_to_a_level_is_there_at_once(url: str) -> None:
    store = open_store(url)
    store.write_bytes("one/a", b"1")
    assert store.folders() == ("one",)
    open_store(url).write_bytes("two/a", b"1")
    assert store.folders() == ("one", "two")


@pytest.mark.slow
def test_b34_other_credentials_are_those_of_the_next_client(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_store(url).write_bytes("a", b"1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "0" * 40)
    with pytest.raises(PermissionRefused):
        open_store(url).read_bytes("a")


@contextlib.contextmanager
def credentials_endpoint(server: S3Server) -> Iterator[tuple[str, list[str]]]:
    """What a cluster gives pods their credentials by: soon too old, and anew for each who asks."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            soon = datetime.now(UTC) + timedelta(minutes=5)
            found = {"AccessKeyId": server.key, "SecretAccessKey": server.secret}
            found |= {"Token": "", "Expiration": soon.strftime("%Y-%m-%dT%H:%M:%SZ")}
            body = json.dumps(found).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing to say."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}/", asked
        finally:
            listening.shutdown()
            thread.join()


@pytest.mark.slow
def test_b38_credentials_that_grow_old_are_asked_for_again(
    s3_environment: S3Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with credentials_endpoint(s3_environment) as (address, asked):
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", address)
        store = open_store(url)
        store.write_bytes("a", b"1")
        before = len(asked)
        assert store.read_bytes("a") == b"1"
        assert len(asked) > before > 0


def refuse(code: str) -> None:
    """A write to which S3 answers so, as s3fs tells it."""
    answer = {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {}}
    error = translate_boto_error(ClientError(answer, "PutObject"))
    assert isinstance(error, PermissionError)
    with faults.translated("s3://b/run/a", writing=True):
        raise error


def test_b38_a_token_that_has_expired_is_worth_another_try() -> None:
    with pytest.raises(TemporaryFailure, match="renew themselves") as caught:
        refuse("ExpiredToken")
    assert caught.value.retry_can_help


def test_b39_a_wrong_clock_is_called_by_its_name_and_a_wrong_key_is_none() -> None:
    with pytest.raises(EnvironmentMisconfigured, match="this machine's clock"):
        refuse("RequestTimeTooSkewed")
    with pytest.raises(PermissionRefused):
        refuse("AccessDenied")


@pytest.mark.slow
def test_b39_a_real_server_refuses_a_clock_that_is_twenty_minutes_off(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = botocore.auth.get_current_datetime
    wrong = lambda *given, **named: right(*given, **named) + timedelta(minutes=20)  # noqa: E731
    monkeypatch.setattr(botocore.auth, "get_current_datetime", wrong)
    with pytest.raises(EnvironmentMisconfigured, match="this machine's clock"):
        open_store(url).write_bytes("a", b"1")


@pytest.mark.slow
def test_b110_an_endpoint_is_found_by_fsspec_s_variable_alone(
    s3_environment: S3Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    found: dict[str, dict[str, str]] = {}
    variables = {**os.environ, "FSSPEC_S3_ENDPOINT_URL": s3_environment.endpoint}
    fsspec.config.set_conf_env(found, envdict=variables)
    monkeypatch.setitem(fsspec.config.conf, "s3", found["s3"])
    open_store(url).write_bytes("a", b"1")
    monkeypatch.delitem(fsspec.config.conf, "s3")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_environment.endpoint)
    assert open_store(url).read_bytes("a") == b"1"
