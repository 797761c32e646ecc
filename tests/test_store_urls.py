"""The URLs that name a store: which are refused, and what a backend must be able to do."""

from __future__ import annotations

import errno
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import fsspec
import pytest
from botocore.exceptions import ClientError, ParamValidationError
from fsspec.implementations.memory import MemoryFileSystem
from httpx2 import ConnectError

from eagle3.errors import (
    ConfigError,
    EnvironmentMisconfigured,
    PermissionRefused,
    ServiceUnavailable,
)
from eagle3.store import faults, open_store
from eagle3.store.urls import split_url


class Forgetful(MemoryFileSystem):
    """A backend that ignores the wish that an object be new, as several do."""

    protocol = "forgetful"
    store: ClassVar[dict[str, object]] = {}

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        return super().pipe_file(path, value, mode="overwrite", **kwargs)


class Needy(MemoryFileSystem):
    """Wants more than a URL says, as ftp wants a host."""

    protocol = "needy"

    def __init__(self, host, **options):
        super().__init__(**options)


def test_a_backend_where_two_writers_both_win_is_refused_for_writing():
    fsspec.register_implementation("forgetful", f"{__name__}.Forgetful", clobber=True)
    with pytest.raises(EnvironmentMisconfigured, match="only one of two writers"):
        open_store("forgetful://run").probe()


@pytest.mark.parametrize(
    "url",
    [
        *(
            "s4://bucket/run",
            "C://x",
            "s3://",
            "memory://",
            "file://runs/demo",
            "a\0b",
            "s3://b/\n",
        ),
        *("", " ", "s3://[abc", "http://[x/a", "s3://b:80/x", "s3://b?x", "s3a://ü/x"),
        *("~nobody-of-that-name/x", "ftp://127.0.0.1/x"),
    ],
)
def test_a_url_that_names_no_store_is_refused(url):
    with pytest.raises(ConfigError):
        open_store(url).exists("a")


@pytest.mark.parametrize("name", ["a" * 300, "loop/x"])
def test_a_path_that_cannot_be_is_no_server_that_is_away(tmp_path, name):
    (tmp_path / "loop").symlink_to("loop")
    store = open_store(f"{tmp_path}/{name}")
    for told in (store.read_bytes, store.size):
        with pytest.raises(ConfigError) as caught:
            told("a")
        assert "AWS" not in str(caught.value)


def test_a_relative_path_where_there_is_no_folder_any_more_is_refused(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigError, match="was deleted"):
        open_store("runs/demo")


@pytest.mark.parametrize("url", ["https://user:secret@[x/a", "s3://key:secret@ho\u2100st/a"])
def test_a_url_that_is_none_is_told_without_its_login(url):
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


def test_an_access_point_is_a_bucket_by_its_arn():
    name = "arn:aws:s3:eu-west-1:123456789012:accesspoint/mine"
    assert split_url(f"s3://{name}/run") == ("s3", f"{name}/run")


def test_a_name_that_the_client_refuses_is_told_with_the_reason():
    told = pytest.raises(ConfigError, match="Parameter validation failed: Invalid bucket name")
    with told, faults.translated("s3://b/x"):
        raise ParamValidationError(report="\nInvalid bucket name")


def test_an_endpoint_is_only_blamed_where_there_is_one():
    with pytest.raises(ConfigError, match="correct the URL"), faults.translated("data://x"):
        raise ValueError("not enough values to unpack")


def conflict(code):
    cause = ClientError({"Error": {"Code": code, "Message": "again"}}, "PutObject")
    error = OSError(errno.EIO, code)
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("code", ["ConditionalRequestConflict", "OperationAborted"])
def test_two_at_once_that_s3_refuses_are_asked_again(monkeypatch, code):
    monkeypatch.setattr(faults, "_CONFLICT_PAUSES", (0.0, 0.0))
    answers = [conflict(code), conflict(code), None]

    def create():
        if (answer := answers.pop(0)) is not None:
            raise answer

    faults.create_again_on_conflict(create)
    assert answers == []
    answers += [conflict(code)] * 3
    with pytest.raises(OSError, match=code):
        faults.create_again_on_conflict(create)
    answers[:] = [conflict("SlowDown"), None]
    with pytest.raises(OSError, match="SlowDown"):
        faults.create_again_on_conflict(create)


class _Says(BaseHTTPRequestHandler):
    """A web server that answers every request with the status that its path begins with."""

    def do_GET(self):
        self.send_response(int(self.path.split("/")[1]))
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def web():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Says)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (503, ServiceUnavailable),
        (429, ServiceUnavailable),
        (500, ServiceUnavailable),
        (401, PermissionRefused),
        (403, PermissionRefused),
        (404, FileNotFoundError),
        (410, FileNotFoundError),
    ],
)
def test_a_web_server_s_status_is_no_missing_file_unless_it_says_so(web, status, kind):
    store = open_store(f"{web}/{status}")
    with pytest.raises(kind):
        store.size("chats.jsonl")
    if status not in (404, 410):
        with pytest.raises(kind):
            store.read_bytes("chats.jsonl")


def test_an_address_that_is_signed_is_told_without_its_signature():
    told = faults.first_line(OSError("503 for url 'https://cdn/a?X-Amz-Signature=secret', again"))
    assert told == "OSError: 503 for url 'https://cdn/a', again"


def test_a_hub_that_does_not_answer_can_be_tried_again():
    with pytest.raises(ServiceUnavailable, match="an answer"), faults.translated("hf://datasets/a"):
        raise ConnectError("no route")


@pytest.mark.parametrize(
    "url",
    [
        "https://user:secret@host/chats",
        "https://secret@host/chats",
        "s3://key:secret@bucket/run",
        "sftp://secret@host/run",
        "https://host/chats?X-Amz-Signature=secret",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_told(url):
    with pytest.raises(ConfigError, match="without credentials") as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["hf://datasets@main/a", "abfs://box@account.dfs.core.windows.net/a", "s3://b/a@b?c"]
)
def test_an_at_sign_in_a_name_is_no_login(url):
    assert split_url(url)[1].startswith(url.split("://")[1])


@pytest.mark.parametrize("url", ["simplecache::file:///tmp/run", "zip://chats::s3://b/chats.zip"])
@pytest.mark.fault("B110")
def test_urls_joined_to_a_chain_are_refused_as_such(url):
    with pytest.raises(ConfigError, match=r"several, joined by ::"):
        open_store(url)


def test_a_name_with_two_colons_is_a_name(tmp_path):
    assert open_store("s3://b/a::b/run").url == "s3://b/a::b/run"
    assert open_store(f"{tmp_path}/a::b").url == f"file://{tmp_path}/a::b"


def test_a_backend_that_cannot_be_written_is_one_sentence():
    with pytest.raises(ServiceUnavailable, match="Connect call failed"):
        open_store("http://127.0.0.1:1/run").probe()
    fsspec.register_implementation("needy", f"{__name__}.Needy", clobber=True)
    with pytest.raises(ConfigError, match="nothing but a URL"):
        open_store("needy://run").probe()


def test_a_server_that_is_away_is_no_missing_file():
    with pytest.raises(ServiceUnavailable):
        open_store("http://127.0.0.1:1").size("chats.jsonl")


def test_a_scheme_whose_package_is_missing_is_named():
    with pytest.raises(EnvironmentMisconfigured, match="install"):
        open_store("dropbox://folder/run").read_bytes("a")
