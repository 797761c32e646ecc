"""Where a verifier's files are: a folder, any fsspec URL, or a repository of the hub.

A hub repository is read through the snapshots of huggingface_hub's own cache, file by file as
they are needed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from httpx2 import HTTPError
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from eagle3.errors import (
    ConfigError,
    EnvironmentMisconfigured,
    PermissionRefused,
    ServiceUnavailable,
    VerifierInvalid,
)
from eagle3.store import Store, open_store

# A repository's name, not a path: `name` or `owner/name`.
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_SMALL_FILES = (
    "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "additional_chat_templates/*",
)  # fmt: skip
# Other spellings of the same weights: vLLM reads the safetensors files where there are any.
_NEVER_NEEDED = (
    "original/*", "onnx/*", "*.bin", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.pt", "*.pth",
)  # fmt: skip
_PARALLEL_DOWNLOADS = 8


@dataclass(frozen=True, kw_only=True)
class VerifierFiles:
    """A verifier's files. `repo` and `revision`, a commit, are set for a hub repository only."""

    store: Store
    repo: str | None = None
    revision: str | None = None

    @property
    def where(self) -> str:
        """How an error names this verifier."""
        return self.repo or self.store.url

    def names(self) -> list[str]:
        """Every file that can be read without a download, by path below the folder."""
        return [info.path for info in self.store.list()]

    def has(self, name: str) -> bool:
        """Whether the file is there; on the hub only small files are, until they are required."""
        return self.store.exists(name)

    def require(self, name: str) -> None:
        """Make a file readable. Raises VerifierInvalid where there is none of that name."""
        if self.repo is not None and not self.store.exists(name):
            _snapshot(self.repo, self.revision, allow=[name])
        if not self.store.exists(name):
            raise VerifierInvalid(
                f"{self.where}/{name}",
                wanted="this file of the verifier",
                found="no such file",
                remedy="complete the download of the model",
            )

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON object. Raises VerifierInvalid for a missing file or for anything else in it."""
        self.require(name)
        try:
            value = json.loads(self.store.read_bytes(name))
        except ValueError as error:
            raise VerifierInvalid(
                f"{self.where}/{name}",
                wanted="a JSON object",
                found=error,
                remedy="download the file again",
            ) from error
        if not isinstance(value, dict):
            raise VerifierInvalid(
                f"{self.where}/{name}",
                wanted="a JSON object",
                found=type(value).__name__,
                remedy="download the file again",
            )
        return value

    def copy(self, names: Sequence[str], folder: Path) -> None:
        """Bring files into a local folder under their own paths."""
        for name in names:
            self.store.get_file(name, folder / name)

    def whole_folder(self, scratch: Path) -> Path:
        """A local folder with the whole model, downloaded into `scratch` where it must be.

        Raises EnvironmentMisconfigured where it does not fit.
        """
        if self.repo is not None:
            return _snapshot(self.repo, self.revision, allow=None)
        if (folder := self.store.local_path()) is not None:
            return folder
        infos = [info for info in self.store.list() if not _is_never_needed(info.path)]
        needed, free = sum(info.bytes for info in infos), shutil.disk_usage(scratch).free
        if needed > free:
            raise EnvironmentMisconfigured(
                str(scratch),
                wanted=f"{needed} bytes free for {self.where}",
                found=f"{free} bytes",
                remedy="set TMPDIR to a larger disk, or mount the model as a folder",
            )
        target = scratch / "verifier"
        with ThreadPoolExecutor(_PARALLEL_DOWNLOADS) as pool:
            done = [
                pool.submit(self.store.get_file, info.path, target / info.path) for info in infos
            ]
            for download in done:
                download.result()
        return target


def open_files(source: str, revision: str | None = None) -> VerifierFiles:
    """The files behind a folder, an fsspec URL or a hub id.

    Raises ConfigError for a folder that is not there, PermissionRefused or ServiceUnavailable
    for a repository that cannot be had.
    """
    if "://" in source:
        return VerifierFiles(store=open_store(source))
    folder = Path(source).expanduser()
    if folder.is_dir():
        return VerifierFiles(store=open_store(str(folder)))
    if not _HUB_ID.fullmatch(source):
        raise ConfigError(
            "verifier.source",
            wanted="a folder, a hub id (owner/name) or an fsspec URL",
            found=f"{source}, which is no folder here",
            remedy="correct the path",
        )
    root = _snapshot(source, revision, allow=list(_SMALL_FILES))
    # A snapshot's folder is named after its commit: what is read later is of the same one.
    return VerifierFiles(store=open_store(str(root)), repo=source, revision=root.name)


def _is_never_needed(path: str) -> bool:
    return any(fnmatch(path, pattern) for pattern in _NEVER_NEEDED)


def _snapshot(repo: str, revision: str | None, *, allow: list[str] | None) -> Path:
    """The folder of a repository's snapshot, with at least the files that match `allow`."""
    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=allow,
                ignore_patterns=list(_NEVER_NEEDED) if allow is None else None,
            )
        )
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
