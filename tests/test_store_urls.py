"""The URLs that name a store: which are refused, and what a backend must be able to do."""

from __future__ import annotations

from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from eagle3.errors import (
    ConfigError,
    EnvironmentMisconfigured,
    ServiceUnavailable,
)
from eagle3.store import open_store
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
    ["s4://bucket/run", "C://x", "s3://", "memory://", "file://runs/demo", "a\0b", "s3://b/\n"],
)
def test_a_url_that_names_no_store_is_refused(url):
    with pytest.raises(ConfigError):
        open_store(url)


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
