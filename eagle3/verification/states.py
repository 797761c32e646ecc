"""The contents of hidden states: every sample, and that it is of the row that it says."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Mapping
from functools import cached_property

from eagle3.artifact import Artifact
from eagle3.errors import DataInvalid
from eagle3.manifest import FileEntry
from eagle3.shards import Sample, ShardReader, TokenRow, rows_of
from eagle3.store import Store
from eagle3.verification.contents import Check, Contents, Sources


class OnePass(Store):
    """A store that hashes one object while it is read from its start to its end, in ranges.

    Ranges may overlap what was read before, and may not leave a gap.
    """

    def __init__(self, store: Store) -> None:
        self.__setstate__(store.__getstate__())
        self._clients = store._clients
        self._digest = hashlib.sha256()
        self.at = 0

    def read_range(self, path: str, start: int, end: int) -> bytes:
        """As `Store.read_range`."""
        data = super().read_range(path, start, end)
        assert start <= self.at, "ranges follow each other"
        self._digest.update(data[self.at - start :])
        self.at = max(self.at, start + len(data))
        return data

    @property
    def sha256_so_far(self) -> str:
        """Hash of the bytes up to `at`."""
        return self._digest.hexdigest()


class StatesContents(Contents):
    """Shards of hidden states, read once, a row at a time."""

    def __init__(
        self, artifact: Artifact, inputs: Mapping[str, Artifact], sources: Sources
    ) -> None:
        super().__init__(artifact, inputs, sources)
        self._lock = threading.Lock()
        self._names: list[str] = []
        if "rows" not in self.inputs:
            self.notes.append(f"{self.artifact.store.url}: its rows could not be compared")

    def check_object(self, entry: FileEntry) -> None:
        """Every row's checksum, shape, type, mask and finiteness; then the whole object's hash."""
        store = OnePass(self.artifact.store)
        if entry.samples:
            # What lies inside is told only of bytes that are the manifest's.
            try:
                names, tokens = self._read(store, entry)
            except DataInvalid:
                super().check_object(entry)
                raise
            found, wanted = (len(names), tokens), (entry.samples, entry.tokens)
            if found != wanted:
                raise self.differs(entry.path, f"(rows, tokens) {wanted}", found)
            with self._lock:
                self._names += names
        while store.read_range(entry.path, store.at, store.at + 2**23):
            pass
        self.artifact.check_bytes(entry, store.at, store.sha256_so_far)

    def whole(self) -> Iterable[Check]:
        """Every row of the input was captured once, or is counted as rejected."""
        manifest = self.artifact.manifest
        yield lambda: self.says("rows_kept", len(set(self._names)), manifest.rows_kept)
        if "rows" in self.inputs:
            yield lambda: self.says("rows_in", len(self._tokens), manifest.rows_in)

    def _read(self, store: OnePass, entry: FileEntry) -> tuple[list[str], int]:
        manifest = self.artifact.manifest
        wanted = (len(manifest.layer_ids or ()), manifest.hidden_size)
        reader, names, tokens = ShardReader(store, entry.path), [], 0
        proof = entry.header_sha256 or None
        for ref in reader.refs(header_sha256=proof, identity=manifest.identity):
            sample = reader.read(ref, finite=True)
            found = (ref.num_layers, ref.hidden_size)
            if found != wanted:
                where = f"{entry.path}: {ref.row}"
                raise self.differs(where, f"(layers, hidden size) {wanted}", found)
            if "rows" in self.inputs:
                self._check_row(entry, sample)
            names.append(ref.row)
            tokens += ref.num_tokens
        return names, tokens

    def _check_row(self, entry: FileEntry, sample: Sample) -> None:
        with self._lock:
            prepared = self._tokens.get(sample.row)
        if prepared != _tokens_of(sample):
            raise self.differs(
                f"{entry.path}: {sample.row}",
                "the ids and the mask of that row of its input",
                "others" if prepared else "a row that the input does not have",
            )

    @cached_property
    def _tokens(self) -> dict[str, bytes]:
        """Row -> hash of its ids and mask, of every row of the input: 16 bytes a row."""
        rows = self.inputs["rows"]
        shards = [entry.path for entry in rows.manifest.files if entry.samples]
        return {row.row: _tokens_of(row) for path in shards for row in rows_of(rows, path)}


def _tokens_of(row: TokenRow | Sample) -> bytes:
    digest = hashlib.blake2b(row.input_ids.numpy().tobytes(), digest_size=16)
    digest.update(row.loss_mask.numpy().tobytes())
    return digest.digest()


CONTENTS = {"extract": StatesContents}
