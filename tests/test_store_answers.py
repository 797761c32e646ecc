"""What is made of a store's answers: only its own word that an object is missing is evidence."""

from __future__ import annotations

import contextlib
import http.server
import secrets
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from botocore.exceptions import ClientError
from fsspec.asyn import sync_wrapper
from s3fs import S3FileSystem
from s3fs.errors import translate_boto_error

from eagle3 import artifact as artifacts
from eagle3.errors import ConfigError, ServiceUnavailable, TemporaryFailure
from eagle3.ordering import JobRecord, JobRecords
from eagle3.stages import stage_named
from eagle3.store import open_store
from tests.s3_server import BUCKET

PAGE = b"default backend - 404"
REFUSED = (
    b"<ErrorResponse><Error><Type>Sender</Type><Code>AccessDenied</Code>"
    b"<Message>Not authorized</Message></Error></ErrorResponse>"
)
ASKED = {
    "read_bytes": ("a",),
    "read_range": ("a", 0, 4),
    "size": ("a",),
    "exists": ("a",),
    "sha256": ("a",),
    "list": (),
    "folders": (),
    "delete": ("a",),
    "write_bytes": ("a", b"1"),
    "create_bytes": ("a", b"1"),
}


@contextlib.contextmanager
def answering(of_method: dict[str, tuple[int, bytes]]) -> Iterator[str]:
    """A server that answers each method in one way, whatever it is asked for; its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            code, body = of_method.get(self.command, of_method["GET"])
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(code)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

        def log_message(self, *_: object) -> None:
            """Nothing to say."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}"
        finally:
            listening.shutdown()
            thread.join()


@pytest.fixture
def with_keys(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


@pytest.fixture
def store_behind_a_proxy(with_keys, monkeypatch):
    """A store that is away, and before it a proxy that answers 404 by itself."""
    with answering({"GET": (404, PAGE)}) as address:
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        yield open_store("s3://bucket/run")


@pytest.fixture
def url(s3_environment):
    return f"s3://{BUCKET}/{secrets.token_hex(4)}/run"


@pytest.fixture
def requests_sent(monkeypatch):
    sent: list[str] = []
    whole = S3FileSystem._call_s3

    async def counted(self, method, *args, **kwargs):
        sent.append(method)
        return await whole(self, method, *args, **kwargs)

    monkeypatch.setattr(S3FileSystem, "_call_s3", counted)
    monkeypatch.setattr(S3FileSystem, "call_s3", sync_wrapper(counted))
    return sent


class TestSomebodyElsesNotFound:
    @pytest.mark.parametrize("call", ASKED)
    def test_is_no_evidence_of_anything(self, store_behind_a_proxy, call):
        with pytest.raises(ServiceUnavailable, match="a proxy"):
            getattr(store_behind_a_proxy, call)(*ASKED[call])

    def test_is_no_file_that_cannot_be_fetched(self, store_behind_a_proxy, tmp_path):
        with pytest.raises(ServiceUnavailable):
            store_behind_a_proxy.get_file("a", tmp_path / "a")
        assert not list(tmp_path.iterdir())

    def test_is_neither_a_stage_to_do_nor_a_job_to_make(self, store_behind_a_proxy):
        records = JobRecords(store_behind_a_proxy, stage_named("prepare"))
        for ask in (
            lambda: artifacts.find(store_behind_a_proxy.child("prepare")),
            records.made,
            records.forget,
            lambda: records.intend(JobRecord(job="a", namespace="b")),
        ):
            with pytest.raises(ServiceUnavailable):
                ask()

    def test_of_a_head_alone_is_no_missing_object(self, with_keys, monkeypatch):
        with answering({"HEAD": (404, b""), "GET": (206, b"1")}) as address:
            monkeypatch.setenv("AWS_ENDPOINT_URL", address)
            with pytest.raises(ServiceUnavailable, match="there for the next"):
                open_store("s3://bucket/run").exists("a")

    def test_of_the_look_before_a_reading_is_none_either(self, url, monkeypatch):
        store = open_store(url)
        store.write_bytes("data_config.json", b"{}")
        whole = S3FileSystem._call_s3

        async def astray(self, method, *args, **kwargs):
            if method == "head_object":
                answer = {"Error": {"Code": "404", "Message": "Not Found"}}
                raise translate_boto_error(ClientError(answer, method))
            return await whole(self, method, *args, **kwargs)

        monkeypatch.setattr(S3FileSystem, "_call_s3", astray)
        with pytest.raises(ServiceUnavailable, match="there for the next"):
            artifacts.find(store)


class TestTheStoresOwn:
    def test_a_missing_object_is_missing_by_one_request_more(self, url, requests_sent):
        store = open_store(url)
        assert not store.exists("a")
        assert requests_sent == ["head_object", "get_object"]
        requests_sent.clear()
        assert artifacts.find(store) is None
        assert requests_sent == ["head_object", "list_objects_v2", "get_object"]

    def test_an_object_that_is_there_costs_no_more_than_it_did(self, url, requests_sent):
        store = open_store(url)
        store.write_bytes("a", b"123")
        requests_sent.clear()
        assert store.size("a") == 3
        assert requests_sent == ["head_object"]
        assert store.read_bytes("a") == b"123"
        assert requests_sent == ["head_object", "head_object", "get_object"]

    @pytest.mark.parametrize("call", ["read_bytes", "exists", "list"])
    def test_a_bucket_that_is_not_there_is_no_missing_object(self, s3_environment, call):
        with pytest.raises(ConfigError, match="create the bucket"):
            getattr(open_store("s3://no-such-bucket/run"), call)(*ASKED[call])


class TestCredentials:
    @pytest.fixture(autouse=True)
    def without_keys(self, monkeypatch, tmp_path):
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    def refused(self) -> TemporaryFailure:
        with pytest.raises(TemporaryFailure, match="identity") as caught:
            open_store("s3://bucket/run").read_bytes("a")
        return caught.value

    def test_that_are_not_there_yet_may_come(self):
        """A node's identity is handed out by a service that may be late, or asked too often."""
        assert self.refused().exit_code == 75

    def test_that_a_role_does_not_give_may_come(self, monkeypatch, tmp_path: Path):
        (tmp_path / "token").write_text("a token")
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/drafts")
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
        monkeypatch.setattr("eagle3.store.urls._RETRIES", 1)
        with answering({"GET": (403, REFUSED)}) as address:
            monkeypatch.setenv("AWS_ENDPOINT_URL", address)
            assert self.refused().retry_can_help
