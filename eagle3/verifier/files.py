"""Where a verifier's files are: a folder, any fsspec URL, or a repository of the hub.

A hub repository's small files are read from a snapshot in huggingface_hub's own cache, its
weights by ranges, so that nothing is downloaded whole before an engine needs it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from eagle3.config import HUB_ID
from eagle3.errors import ConfigError, EnvironmentMisconfigured, ServiceUnavailable, VerifierInvalid
from eagle3.store import Store, expanded, open_store
from eagle3.verifier import hub

_SMALL_FILES = (
    "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "additional_chat_templates/*",
)  # fmt: skip
_PARALLEL_DOWNLOADS = 8
# Set in a stage's pod: bytes that TMPDIR's volume may hold before the pod is evicted, however large
# the disk.
SCRATCH_BYTES = "EAGLE3_SCRATCH_BYTES"


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
        """Whether the file is there; on the hub only small files are."""
        return self.store.exists(name)

    def size(self, name: str) -> int:
        """Bytes of a file. Raises VerifierInvalid where there is none of that name."""
        try:
            if (at := self._only_on_hub(name)) is not None:
                return hub.size(*at, name)
            return self.store.size(name)
        except FileNotFoundError as error:
            raise self._missing(name) from error

    def sha256(self, name: str) -> str:
        """Hash of a small file's bytes."""
        return self.store.sha256(name)

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Bytes start to end (exclusive) by one ranged request, all of them.

        Raises VerifierInvalid for a missing file, and for one that gives more or fewer bytes.
        """
        try:
            if (at := self._only_on_hub(name)) is not None:
                return hub.read_range(*at, name, start, end)
            data = self.store.read_range(name, start, end)
        except FileNotFoundError as error:
            raise self._missing(name) from error
        if len(data) != end - start:
            raise VerifierInvalid(
                f"{self.where}/{name}",
                wanted=f"the {end - start} bytes from byte {start}",
                found=f"{len(data)} bytes",
                remedy="complete the download of the model, and read it without a proxy that"
                " ignores ranges",
            )
        return data

    def read_json(self, name: str) -> dict[str, Any]:
        """A JSON object. Raises VerifierInvalid for a missing file or for anything else in it."""
        try:
            value = json.loads(self.store.read_bytes(name))
        except FileNotFoundError as error:
            raise self._missing(name) from error
        except (ValueError, RecursionError) as error:
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
            missing = hub.missing_bytes(self.repo, self.revision)
            _check_room(self.where, missing, hub.cache())
            return hub.snapshot(self.repo, self.revision, allow=None)
        if (folder := self.store.local_path()) is not None:
            return folder
        infos = [info for info in self.store.list() if not _is_never_needed(info.path)]
        _check_room(self.where, sum(info.bytes for info in infos), scratch)
        target = scratch / "verifier"
        with ThreadPoolExecutor(_PARALLEL_DOWNLOADS) as pool:
            done = [
                pool.submit(self.store.get_file, info.path, target / info.path) for info in infos
            ]
            for download in done:
                download.result()
        return target

    def _only_on_hub(self, name: str) -> tuple[str, str] | None:
        """(repository, commit) of a file that is not in the snapshot yet."""
        if self.repo is None or self.revision is None or self.store.exists(name):
            return None
        return self.repo, self.revision

    def _missing(self, name: str) -> VerifierInvalid:
        return VerifierInvalid(
            f"{self.where}/{name}",
            wanted="this file of the verifier",
            found="no such file",
            remedy="complete the download of the model",
        )


def open_files(source: str, revision: str | None = None) -> VerifierFiles:
    """The files behind a folder, an fsspec URL or a hub id.

    Raises ConfigError for what is neither a folder nor a repository, PermissionRefused or
    ServiceUnavailable for a repository that cannot be had.
    """
    if "://" in source:
        return VerifierFiles(store=open_store(source))
    folder = expanded(source)
    if folder.is_dir():
        return VerifierFiles(store=open_store(str(folder)))
    if not HUB_ID.fullmatch(source):
        raise ConfigError(
            "verifier.source",
            wanted="a folder, a hub id (owner/name) or an fsspec URL",
            found=f"{source}, which is no folder here",
            remedy="correct the path",
        )
    try:
        root = hub.snapshot(source, revision, allow=list(_SMALL_FILES))
    except ServiceUnavailable as error:
        if folder.parent == Path() or not folder.parent.is_dir():
            raise
        # The first half is a folder here: more likely a path than a repository.
        raise ConfigError(
            f"verifier.source: {source}",
            wanted="a local folder of that name, or the hub",
            found=f"no such folder in {folder.parent}, and no answer from the hub",
            remedy="correct the path, or let this machine reach the hub",
        ) from error
    # A snapshot's folder is named after its commit: what is read later is of the same one.
    return VerifierFiles(store=open_store(str(root)), repo=source, revision=root.name)


def _is_never_needed(path: str) -> bool:
    return any(fnmatch(path, pattern) for pattern in hub.NEVER_NEEDED)


def _check_room(where: str, needed: int, folder: Path) -> None:
    """Raises EnvironmentMisconfigured where so many bytes do not fit, before one is read."""
    place = next(one for one in (folder, *folder.parents) if one.exists())
    room, whose = shutil.disk_usage(place).free, "free on its disk"
    remedy = "use a larger disk (TMPDIR, of the hub HF_HOME), or mount the model as a folder"
    limit = _pod_limit()
    # A claim that is mounted elsewhere has no limit but its own size.
    if limit is not None and limit < room and _mount(place) == _mount(Path(tempfile.gettempdir())):
        room, whose = limit, "before its pod is evicted"
        remedy = "raise stages.<stage>.scratch of the chart, or mount the model by weights.claim"
    if needed > room:
        raise EnvironmentMisconfigured(
            str(folder),
            wanted=f"room for {needed} bytes of {where}",
            found=f"{room} bytes {whose}",
            remedy=remedy,
        )


def _pod_limit() -> int | None:
    told = os.environ.get(SCRATCH_BYTES)
    if told is None:
        return None
    if not told.isdecimal():
        raise EnvironmentMisconfigured(
            SCRATCH_BYTES, wanted="a number of bytes", found=told, remedy="correct it, or unset it"
        )
    return int(told)


def _mount(folder: Path) -> Path:
    return next(one for one in (folder, *folder.parents) if one.is_mount())
