"""Object storage: a prefix at any fsspec URL, and the few operations that the stages need.

The only importer of fsspec. What the rest of the package may rely on:

* A write is whole or absent. Bytes are finished before anything is sent, since a file handle
  of s3fs publishes what it has when an exception closes it.
* `create_*` is exclusive: of two writers one wins and the other gets FileExistsError. Finding
  one's own bytes already there is success (a request that was retried after it had worked).
* Listings and look-ups are never cached: other pods write into the same prefix.
* A store can be pickled into a spawned process; each process opens its own client, because
  s3fs refuses to work in a forked one.

Faults of a backend become errors of `eagle3.errors`. A path that is not there stays
FileNotFoundError, and a path that is taken stays FileExistsError: callers decide what they mean.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eagle3.errors import ConfigError, EnvironmentMisconfigured
from eagle3.store import faults, local, parts, s3_listing, s3_object
from eagle3.store.objects import PROBE, ObjectInfo, is_probe, sha256_of_file
from eagle3.store.urls import EXCLUSIVE_BY_BACKEND, expanded, open_client, split_url

__all__ = ["ObjectInfo", "Store", "expanded", "is_probe", "open_store", "sha256_of_file"]

# The memory store, which checks and writes in two steps.
_MEMORY_LOCK = threading.Lock()
_HASH_CHUNK = 8 * 2**20
# An object of twice this or more goes up in parts; S3 has a least of 5 MiB, and 10,000 parts.
_PART_BYTES = 50 * 2**20


class Store:
    """A prefix in object storage. Paths are relative to it, with forward slashes."""

    def __init__(self, url: str) -> None:
        """Args: url: any fsspec URL, or a local path. Raises ConfigError for an unknown scheme."""
        scheme, root = split_url(url)
        self.scheme = scheme
        self._root = root
        self._clients: dict[int, Any] = {}

    @property
    def url(self) -> str:
        """The prefix as a full URL, without a trailing slash."""
        return self._root if "://" in self._root else f"{self.scheme}://{self._root}"

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def __getstate__(self) -> dict[str, str]:
        return {"scheme": self.scheme, "root": self._root}

    def __setstate__(self, state: dict[str, str]) -> None:
        self.scheme = state["scheme"]
        self._root = state["root"]
        self._clients = {}

    def child(self, name: str) -> Store:
        """The store of a prefix below this one."""
        below = Store.__new__(Store)
        below.__setstate__({"scheme": self.scheme, "root": self._path(name)})
        below._clients = self._clients
        return below

    def local_path(self, path: str = "") -> Path | None:
        """Where the path lies on this machine, or None in any other kind of store."""
        return Path(self._path(path)) if self.scheme == "file" else None

    def read_bytes(self, path: str) -> bytes:
        """The whole object. Raises FileNotFoundError."""
        with self._translated(path):
            try:
                data: bytes = self._fs.cat_file(self._path(path))
            except FileNotFoundError as error:
                # s3fs looks by a HEAD before it reads, and tells of that.
                if self.scheme in EXCLUSIVE_BY_BACKEND and error.__cause__ is None:
                    s3_object.prove_missing(self._fs, self._path(path))
                raise
            return data

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """Bytes start to end (exclusive) by one ranged request; fewer where the object ends first.

        Raises FileNotFoundError.
        """
        with self._translated(path):
            try:
                data: bytes = self._fs.cat_file(self._path(path), start=start, end=end)
            except OSError as error:
                if not faults.is_range_past_end(error):
                    raise
                return b""
            return data

    def write_bytes(self, path: str, data: bytes) -> None:
        """Write or replace an object, whole or not at all."""
        with self._translated(path, writing=True):
            if self.scheme == "file":
                local.write(Path(self._path(path)), data, exclusive=False)
            else:
                self._fs.pipe_file(self._path(path), data)

    def create_bytes(self, path: str, data: bytes) -> None:
        """Write an object that must not be there yet.

        Raises FileExistsError when another writer was first and its bytes differ.
        """
        self._create_or_find(
            path, lambda: self._create(path, data), lambda: self.read_bytes(path) == data
        )

    def create_file(self, source: Path, path: str) -> None:
        """Upload a finished local file to a path that must not be there yet.

        Raises FileExistsError when another writer was first and its bytes differ.
        """
        self._create_or_find(
            path,
            lambda: self._create_from_file(source, path),
            lambda: self.sha256(path) == sha256_of_file(source),
        )

    def put_file(self, source: Path, path: str) -> None:
        """Upload a finished local file, replacing what was there."""
        with self._translated(path, writing=True):
            if self.scheme == "file":
                local.copy(source, Path(self._path(path)), exclusive=False)
            else:
                self._fs.put_file(str(source), self._path(path))

    def get_file(self, path: str, target: Path) -> None:
        """Download an object to a local file, which appears whole. Raises FileNotFoundError."""
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")
        try:
            with self._translated(path):
                self._fs.get_file(self._path(path), str(partial))
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)

    def size(self, path: str) -> int:
        """The object's size in bytes. Raises FileNotFoundError."""
        with self._translated(path):
            if self.scheme in EXCLUSIVE_BY_BACKEND:
                return s3_object.size(self._fs, self._path(path))
            info = self._fs.info(self._path(path))
            if info["type"] != "file":
                raise FileNotFoundError(path)
        return faults.size_told(info["size"], f"{self.url}/{path}")

    def exists(self, path: str) -> bool:
        """Whether an object (never a prefix) stands at the path, asked of the backend itself."""
        try:
            self.size(path)
        except FileNotFoundError:
            return False
        return True

    def list(self, prefix: str = "", *, splits: Sequence[str] = ()) -> list[ObjectInfo]:
        """Every object below a prefix, by path. Empty where there is none.

        Args: splits: some of the paths below the prefix, ascending, where a long listing may be
            split into parts that are asked for at the same time.
        """
        try:
            with self._translated(prefix):
                found = self._sizes(prefix, splits)
        except FileNotFoundError:
            return []
        infos = [ObjectInfo(path=path, bytes=size) for path, size in found if path]
        infos.sort(key=lambda info: info.path)
        return infos

    def _sizes(self, prefix: str, splits: Sequence[str]) -> Sequence[tuple[str, int]]:
        """(path below the store's own prefix, bytes) of every object. Raises FileNotFoundError."""
        if self.scheme in EXCLUSIVE_BY_BACKEND:
            below = f"{prefix}/" if prefix else ""
            found = s3_listing.sizes(self._fs, self._path(prefix), splits)
            return [(below + path, size) for path, size in found]
        start = len(self._fs._strip_protocol(self._root)) + 1
        infos = self._fs.find(self._path(prefix), detail=True).items()
        named = ((self._fs._strip_protocol(name)[start:], info) for name, info in infos)
        return [(path, int(info["size"])) for path, info in named if not local.is_partial(path)]

    def folders(self, prefix: str = "") -> tuple[str, ...]:
        """The names right below a prefix that objects lie under, by a listing of that level alone.

        A local disk, and some servers, name a folder from which all objects are gone too.
        """
        try:
            with self._translated(prefix):
                found = self._fs.ls(self._path(prefix), detail=True)
        except FileNotFoundError:
            return ()
        below = (info["name"] for info in found if info["type"] == "directory")
        return tuple(sorted(posixpath.basename(name.rstrip("/")) for name in below))

    def delete(self, path: str) -> None:
        """Remove one object; nothing happens when it is not there."""
        with contextlib.suppress(FileNotFoundError), self._translated(path):
            self._fs.rm_file(self._path(path))

    def tidy(self) -> None:
        """On a local disk, remove the empty folders below the prefix, itself included, and what
        killed writers left there; elsewhere there are none of either."""
        if self.scheme == "file":
            with self._translated("", writing=True):
                local.tidy(Path(self._root))

    def sha256(self, path: str) -> str:
        """Hash of the object's bytes, read in ranges so that memory stays small."""
        digest = hashlib.sha256()
        total = self.size(path)
        for start in range(0, total, _HASH_CHUNK):
            end = min(start + _HASH_CHUNK, total)
            data = self.read_range(path, start, end)
            digest.update(faults.all_of(data, end - start, f"{self.url}/{path}"))
        return digest.hexdigest()

    def probe(self) -> None:
        """Prove that this prefix can be written, read and deleted, before costly work starts.

        Of two writers only the first may win, in one request and, on S3, in several parts: large
        objects go up in parts, and some servers know the condition for whole objects only. Raises
        PermissionRefused, ServiceUnavailable or EnvironmentMisconfigured.
        """
        path = f"{PROBE}{secrets.token_hex(8)}"
        self._probe_writing(path)
        try:
            if self.read_bytes(path) != b"first":
                raise EnvironmentMisconfigured(
                    self.url,
                    wanted="a store that returns what was written",
                    found="other bytes",
                    remedy="use another store",
                )
            self._probe_exclusion(self._create, path, "an object")
            if self.scheme in EXCLUSIVE_BY_BACKEND:
                self._probe_exclusion(self._create_in_parts, path, "an object of several parts")
        finally:
            self.delete(path)

    def _probe_writing(self, path: str) -> None:
        try:
            self.create_bytes(path, b"first")
        except (NotImplementedError, TypeError, AttributeError) as error:
            raise ConfigError(
                self.url,
                wanted="a store that can be written",
                found=f"a backend ({self.scheme}) that cannot",
                remedy="use file:// or s3://",
            ) from error

    def _probe_exclusion(self, create: Callable[[str, bytes], None], path: str, what: str) -> None:
        try:
            with self._translated(path, writing=True):
                create(path, b"second")
        except FileExistsError:
            return
        raise EnvironmentMisconfigured(
            self.url,
            wanted=f"a store where only one of two writers can create {what}",
            found=f"a backend ({self.scheme}) where both did",
            remedy="use file, memory or an S3 store that honours If-None-Match",
        )

    def _path(self, path: str) -> str:
        if path.startswith("/") or ".." in path.split("/"):
            raise ConfigError(
                path,
                wanted="a path below the store's prefix",
                found="one that leaves it",
                remedy="name it relative to the prefix",
            )
        return posixpath.join(self._root, path) if path else self._root

    @property
    def _fs(self) -> Any:
        client = self._clients.get(os.getpid())
        if client is None:
            client = self._clients[os.getpid()] = open_client(self.scheme)
        return client

    def _create(self, path: str, data: bytes) -> None:
        if self.scheme == "file":
            local.write(Path(self._path(path)), data, exclusive=True)
        elif self.scheme == "memory":
            with _MEMORY_LOCK:
                self._fs.pipe_file(self._path(path), data, mode="create")
        else:
            of = {"chunksize": _PART_BYTES} if self.scheme in EXCLUSIVE_BY_BACKEND else {}
            with faults.refused_precondition_is_exists(path):
                self._fs.pipe_file(self._path(path), data, mode="create", **of)

    def _create_or_find(
        self, path: str, create: Callable[[], None], is_ours: Callable[[], bool]
    ) -> None:
        """Create, or find one's own bytes; what goes away in between is told as being taken."""
        try:
            with self._translated(path, writing=True):
                faults.create_again_on_conflict(create)
        except FileExistsError as error:
            with contextlib.suppress(FileNotFoundError):
                if is_ours():
                    return
            raise FileExistsError(path) from error

    def _create_in_parts(self, path: str, data: bytes) -> None:
        with faults.refused_precondition_is_exists(path):
            parts.create(self._fs, self._path(path), data)

    def _create_from_file(self, source: Path, path: str) -> None:
        if self.scheme == "file":
            local.copy(source, Path(self._path(path)), exclusive=True)
        elif self.scheme in EXCLUSIVE_BY_BACKEND:
            with faults.refused_precondition_is_exists(path):
                self._fs.put_file(
                    str(source), self._path(path), mode="create", chunksize=_PART_BYTES
                )
        else:
            self._create(path, source.read_bytes())

    def _translated(
        self, path: str, *, writing: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        where = f"{self.url}/{path}" if path else self.url
        return faults.translated(where, writing=writing)


def open_store(url: str) -> Store:
    """The store at an fsspec URL or a local path. Raises ConfigError for an unknown scheme."""
    return Store(url)
