"""A repository of the hub: files in huggingface_hub's own cache, and ranges of files that are not.

Of a checkpoint of hundreds of gigabytes only ranges are asked for, until an engine needs it all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from httpx2 import HTTPError
from huggingface_hub import (
    HfFileMetadata,
    constants,
    get_hf_file_metadata,
    hf_hub_url,
    snapshot_download,
)
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented, not in __all__
    build_hf_headers,
    hf_raise_for_status,
    http_backoff,
)

from eagle3.errors import PermissionRefused, ServiceUnavailable

# Other spellings of the same weights: vLLM reads the safetensors files where there are any.
NEVER_NEEDED = (
    "original/*", "onnx/*", "*.bin", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.pt", "*.pth",
)  # fmt: skip
# A signed address is good for an hour or so.
_EXPIRED = (401, 403)


def snapshot(repo: str, revision: str | None, *, allow: list[str] | None) -> Path:
    """The folder of a repository's snapshot, with at least the files that match `allow`.

    It is named after its commit. Raises PermissionRefused, ServiceUnavailable.
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


def size(repo: str, commit: str, name: str) -> int:
    """Bytes of a file. Raises FileNotFoundError, PermissionRefused, ServiceUnavailable."""
    return int(_located(repo, commit, name).size or 0)


def read_range(repo: str, commit: str, name: str, start: int, end: int) -> bytes:
    """Bytes start to end (exclusive) of a file by one request. Raises as `size`."""
    with _translated(repo):
        try:
            return _fetched(_located(repo, commit, name), start, end)
        except HfHubHTTPError as error:
            if error.response.status_code not in _EXPIRED:
                raise
        _located.cache_clear()
        return _fetched(_located(repo, commit, name), start, end)


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
    headers = {"Range": f"bytes={start}-{end - 1}"}
    if found.location.startswith(constants.ENDPOINT):
        # Elsewhere the address itself is signed, and the token is nobody's business.
        headers |= build_hf_headers()
    response = http_backoff("GET", found.location, headers=headers)
    hf_raise_for_status(response)
    return bytes(response.content)


@contextlib.contextmanager
def _translated(repo: str) -> Iterator[None]:
    """What the hub's client raises as errors of ours, but for a file that a repository lacks."""
    try:
        yield
    except RemoteEntryNotFoundError:
        raise
    except (GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise PermissionRefused(
            f"verifier.source: {repo}",
            wanted="a repository of the hub that this token may read",
            found=type(error).__name__,
            remedy="correct the id or the revision, or set HF_TOKEN",
        ) from error
    except (HTTPError, OSError) as error:
        raise ServiceUnavailable(
            f"verifier.source: {repo}",
            wanted="a local folder of that name, or the hub",
            found=f"neither ({type(error).__name__})",
            remedy="correct the path, or let this machine reach the hub",
        ) from error
