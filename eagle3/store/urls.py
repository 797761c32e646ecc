"""URLs of stores, and the clients that serve them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

import fsspec

from eagle3.errors import ConfigError, EnvironmentMisconfigured
from eagle3.store import faults

# s3fs sends If-None-Match for mode="create".
EXCLUSIVE_BY_BACKEND = frozenset({"s3", "s3a"})
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_RETRIES = 6
# Seconds that a person waits for one answer, before the store counts as out of reach.
_HASTY_SECONDS = 3
_HASTY_ATTEMPTS = 2
_HASTY: ContextVar[bool] = ContextVar("_HASTY", default=False)
# As fsspec joins URLs; a name that only holds two colons is none of these.
_CHAINED = re.compile(r"^[a-z0-9]+::|::[a-z0-9]+://")
# What S3 takes for a bucket; an access point or another account's bucket is named by its ARN.
_BUCKET = re.compile(r"[A-Za-z0-9._-]{1,255}|arn:[^ ]+")
_WHOLE_URLS = frozenset({"http", "https"})
# Where what stands before an @ is a container or a repository, and no one's name.
_AT_IN_NAMES = frozenset({"abfs", "abfss", "az", "adl", "hf", "github"})


def split_url(url: str) -> tuple[str, str]:
    """(scheme, root) of an fsspec URL or a local path. Raises ConfigError."""
    if not url.strip():
        raise ConfigError("URL", wanted="a URL or a path", found="an empty one", remedy="name one")
    if not url.isprintable():
        raise ConfigError(
            repr(url), wanted="a URL or a path", found="a control character", remedy="correct it"
        )
    if _CHAINED.search(url):
        raise ConfigError(
            url,
            wanted="a URL of one scheme, such as file:// or s3://",
            found="several, joined by ::",
            remedy="name the folder or file itself, by one URL",
        )
    if "://" not in url:
        return "file", str(_absolute(expanded(url)))
    parts = _parts_of(url)
    known = set(fsspec.available_protocols())
    if parts.scheme not in known:
        raise ConfigError(
            url,
            wanted="a URL with a scheme that fsspec knows, such as file:// or s3://",
            found=f"{parts.scheme}://",
            remedy="correct the scheme",
        )
    refuse_secrets(url)
    rest = url.split("://", 1)[1].rstrip("/")
    if parts.scheme in ("file", "local") and parts.netloc:
        raise ConfigError(
            url,
            wanted="a whole path, as in file:///data/run",
            found=f"a host, {parts.netloc}",
            remedy="write three slashes, or the path alone",
        )
    if parts.scheme in ("file", "local"):
        return "file", "/" + rest.lstrip("/")
    if not rest:
        raise ConfigError(
            url, wanted="a bucket or a prefix", found="nothing", remedy="name one after ://"
        )
    bucket = rest.split("/")[0]
    if parts.scheme in EXCLUSIVE_BY_BACKEND and not _BUCKET.fullmatch(bucket):
        raise ConfigError(
            url,
            wanted="a bucket's name, of letters, digits, dots and dashes, or its ARN",
            found=bucket,
            remedy="correct the bucket",
        )
    # Where the scheme is part of the protocol, its client wants it in every path.
    return parts.scheme, f"{parts.scheme}://{rest}" if parts.scheme in _WHOLE_URLS else rest


def expanded(path: str) -> Path:
    """A local path with its ~ resolved. Raises ConfigError where there is no such home."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            path,
            wanted="a path whose ~ is somebody's home here",
            found=faults.first_line(error),
            remedy="write the whole path",
        ) from error


def _absolute(path: Path) -> Path:
    try:
        return path.absolute()
    except FileNotFoundError as error:
        raise ConfigError(
            str(path),
            wanted="a path from a working folder that exists",
            found="one that was deleted",
            remedy="change to another folder, or write the whole path",
        ) from error


def _parts_of(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:
        # Neither its login nor urlsplit's own words, which may repeat one.
        raise ConfigError(
            url.rpartition("@")[2],
            wanted="a URL, such as s3://bucket/run",
            found="one whose host is none",
            remedy="correct it",
        ) from None


def refuse_secrets(url: str) -> None:
    """A URL is kept in manifests and told in logs: nothing in it may let anybody in.

    Raises ConfigError, which does not repeat it.
    """
    parts = _parts_of(url)
    login = "@" in parts.netloc and parts.scheme not in _AT_IN_NAMES
    # Signed URLs have their signature in the query, and no store here is named by one.
    query = parts.scheme in _WHOLE_URLS and "?" in url
    if login or query:
        host = parts.netloc.rpartition("@")[2]
        raise ConfigError(
            f"{parts.scheme}://{host}",
            wanted="a URL without credentials, since manifests and logs hold it",
            found="a login before its host" if login else "a query behind its path",
            remedy="leave that out, and give credentials by the environment",
        )


@contextmanager
def hasty() -> Iterator[None]:
    """Clients that are opened meanwhile give up within seconds: for a person who looks on."""
    before = _HASTY.set(True)
    try:
        yield
    finally:
        _HASTY.reset(before)


def open_client(scheme: str) -> Any:
    """A client of its own for this process, with every cache off."""
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    hurried = scheme in EXCLUSIVE_BY_BACKEND and _HASTY.get()
    if hurried:
        options["config_kwargs"] = {
            "retries": {"mode": "standard", "total_max_attempts": 1},
            "connect_timeout": _HASTY_SECONDS,
            "read_timeout": _HASTY_SECONDS,
        }
    elif scheme in EXCLUSIVE_BY_BACKEND:
        options["config_kwargs"] = {"retries": {"mode": "standard", "max_attempts": _RETRIES}}
    try:
        _refuse_needy(scheme)
        client = fsspec.filesystem(scheme, **options)
    except ImportError as error:
        raise EnvironmentMisconfigured(
            f"{scheme}://",
            wanted="the package that serves this scheme",
            found=faults.first_line(error),
            remedy="install it beside eagle3",
        ) from error
    except (TypeError, ValueError) as error:
        # Some backends want a host, a token or a name that a URL here does not carry.
        raise ConfigError(
            f"{scheme}://",
            wanted="a scheme that needs nothing but a URL and the environment",
            found=faults.first_line(error),
            remedy="use file:// or s3://",
        ) from error
    if hurried:
        # Beside botocore's own it has attempts of its own.
        client.retries = _HASTY_ATTEMPTS
    return client


def _refuse_needy(scheme: str) -> None:
    """Raises TypeError for a client that needs a host, a token or a name.

    Asked for without, fsspec's own for FTP complains a second time when it is collected.
    """
    arguments = inspect.signature(fsspec.get_filesystem_class(scheme).__init__).parameters.values()
    # The first is the client itself.
    for argument in list(arguments)[1:]:
        if argument.default is argument.empty and argument.kind in _NAMED:
            raise TypeError(f"its client needs {argument.name}")
