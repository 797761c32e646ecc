"""A repository of the hub: files in huggingface_hub's own cache, and ranges of files that are not.

Of a checkpoint of hundreds of gigabytes only ranges are asked for, until an engine needs it all.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

from httpx2 import HTTPError, NetworkError, RemoteProtocolError, TimeoutException
from huggingface_hub import (
    HfFileMetadata,
    constants,
    get_hf_file_metadata,
    hf_hub_url,
    snapshot_download,
)
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, not in __all__
    build_hf_headers,
    hf_raise_for_status,
    http_stream_backoff,
)

from eagle3.errors import (
    ConfigError,
    EnvironmentMisconfigured,
    PermissionRefused,
    ServiceUnavailable,
)

# Other spellings of the same weights: vLLM reads the safetensors files where there are any.
NEVER_NEEDED = (
    "original/*", "onnx/*", "*.bin", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.pt", "*.pth",
)  # fmt: skip
# An address that is signed is good for an hour or so; asked for anew it is refused for good.
_REFUSED = (401, 403)
_PARTIAL_CONTENT = 206
_BROKEN = (TimeoutException, NetworkError, RemoteProtocolError)
_WAITS = (1, 2, 4, 8)


def snapshot(repo: str, revision: str | None, *, allow: list[str] | None) -> Path:
    """The folder of a repository's snapshot, with at least the files that match `allow`.

    It is named after its commit. Raises ConfigError, PermissionRefused, ServiceUnavailable.
    """
    with _translated(repo):
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=allow,
                ignore_patterns=list(NEVER_NEEDED) if allow is None else None,
            )
        )


def cache() -> Path:
    """Where snapshots lie; it may not be there yet."""
    return Path(constants.HF_HUB_CACHE)


def missing_bytes(repo: str, commit: str | None) -> int:
    """Bytes that a whole snapshot has yet to download; 0 where the hub is not there to tell."""
    with _translated(repo):
        try:
            files = snapshot_download(
                repo, revision=commit, ignore_patterns=list(NEVER_NEEDED), dry_run=True
            )
        except DryRunError:
            return 0
    return sum(file.file_size or 0 for file in files if file.will_download)


def size(repo: str, commit: str, name: str) -> int:
    """Bytes of a file. Raises FileNotFoundError, PermissionRefused, ServiceUnavailable."""
    return int(_located(repo, commit, name).size or 0)


def read_range(repo: str, commit: str, name: str, start: int, end: int) -> bytes:
    """Bytes start to end (exclusive, and beyond start) of a file by one request.

    Raises as `size`, and EnvironmentMisconfigured where whole files come for ranges.
    """
    with _translated(repo):
        try:
            data = _fetched(_located(repo, commit, name), start, end)
        except HfHubHTTPError as error:
            if error.response.status_code not in _REFUSED:
                raise
            _located.cache_clear()
            data = _fetched(_located(repo, commit, name), start, end)
    if len(data) != end - start:
        raise ServiceUnavailable(
            f"verifier.source: {repo}/{name}",
            wanted=f"the {end - start} bytes from byte {start}",
            found=f"{len(data)} bytes",
            remedy="try again, and without a proxy or a mirror if it stays so",
        )
    return data


@lru_cache(maxsize=4096)
def _located(repo: str, commit: str, name: str) -> HfFileMetadata:
    """Size and address of a file. The hub counts such requests, so one is enough."""
    address = hf_hub_url(repo, name, revision=commit, endpoint=constants.ENDPOINT)
    try:
        with _translated(repo):
            return get_hf_file_metadata(address, retry_on_errors=True)
    except RemoteEntryNotFoundError as error:
        raise FileNotFoundError(name) from error


def _fetched(found: HfFileMetadata, start: int, end: int) -> bytes:
    """A range, asked for again where the connection breaks, be it in the middle of an answer."""
    for wait in _WAITS:
        try:
            return _fetched_once(found, start, end)
        except _BROKEN:
            time.sleep(wait)
    return _fetched_once(found, start, end)


def _fetched_once(found: HfFileMetadata, start: int, end: int) -> bytes:
    # Some servers send a file that they compress as a whole, whatever range is asked for.
    headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    if _origin(found.location) == _origin(constants.ENDPOINT):
        # Elsewhere the address itself is signed, and the token is nobody's business.
        headers |= build_hf_headers()
    with http_stream_backoff(
        "GET",
        found.location,
        headers=headers,
        timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        retry_on_exceptions=(),
    ) as response:
        hf_raise_for_status(response)
        # Whoever ignores the range sends the whole file, which may be of many gigabytes.
        if response.status_code != _PARTIAL_CONTENT:
            raise EnvironmentMisconfigured(
                f"verifier.source: {urlsplit(found.location).netloc}",
                wanted=f"a part of a file (status {_PARTIAL_CONTENT})",
                found=f"the whole of it (status {response.status_code})",
                remedy="reach the hub without the proxy or mirror that ignores ranges, or name a"
                " folder that holds the model",
            )
        return bytes(response.read())


def _origin(address: str) -> tuple[str, str]:
    """Scheme and host with its port: `https://huggingface.co.example` is another host."""
    parts = urlsplit(address)
    return parts.scheme, parts.netloc


@contextlib.contextmanager
def _translated(repo: str) -> Iterator[None]:
    """What the hub's client raises as errors of ours, but for a file that a repository lacks."""
    where = f"verifier.source: {repo}"
    try:
        yield
    except RemoteEntryNotFoundError:
        raise
    except GatedRepoError as error:
        raise _refused(where, error) from error
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise ConfigError(
            where,
            wanted="a folder here, or a repository of the hub that HF_TOKEN may read",
            found=f"no such folder and no such repository ({type(error).__name__})",
            remedy="correct the path or the id, or set HF_TOKEN",
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(
            where,
            wanted="a revision that this repository has",
            found=type(error).__name__,
            remedy="correct verifier.revision, or leave it out",
        ) from error
    except (HTTPError, OSError) as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code in _REFUSED:
            raise _refused(where, error) from error
        raise ServiceUnavailable(
            where,
            wanted="a local folder of that name, or the hub",
            found=f"no such folder, and no answer from the hub ({type(error).__name__})",
            remedy="correct the path, or let this machine reach the hub",
        ) from error


def _refused(where: str, error: HfHubHTTPError) -> PermissionRefused:
    return PermissionRefused(
        where,
        wanted="a repository of the hub that this token may read",
        found=f"status {error.response.status_code} ({type(error).__name__})",
        remedy="set HF_TOKEN to one that may, and accept the model's terms on the hub",
    )
