"""The samples of version 1 as version-2 objects: token rows for `prepare/`, states for `extract/`.

The same folder gives the same bytes, so that a take-over that was killed goes over the folder again
and finds its own objects. Nothing is committed here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from eagle3 import artifact as artifacts
from eagle3.conversations import HELDOUT_NAME, RowRecord
from eagle3.conversations.records import encode_lines
from eagle3.errors import ManifestInvalid, ShardInvalid
from eagle3.legacy.folder import COUNTS_NAME as OLD_COUNTS_NAME
from eagle3.legacy.folder import OldFolder
from eagle3.manifest import FileEntry
from eagle3.shards import Sample, TokenRow, encode_rows, encode_samples, header_sha256_of
from eagle3.store import Store
from eagle3.vocab import COUNTS_NAME, encode_counts, supervised_counts


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What a take-over wrote: the objects of both artefacts, and the counts of their manifests."""

    rows: tuple[FileEntry, ...]
    states: tuple[FileEntry, ...]
    rows_in: int
    rejected: dict[str, int]
    longest_row: int
    supervised_tokens: int


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How the objects are cut, and how many samples may be left out: fields of the run's config."""

    shard_rows: int
    unit_rows: int
    unit_bytes: int
    max_rejected_share: float


class _Group:
    """Samples in order, cut into objects of at most so many rows and bytes of states."""

    def __init__(self, most_rows: int, most_bytes: int | None = None) -> None:
        self._most_rows = most_rows
        self._most_bytes = most_bytes
        self._bytes = 0
        self.samples: list[Sample] = []
        self.number = 0

    def is_full_for(self, sample: Sample) -> bool:
        """Whether the sample has to wait for the next object."""
        if not self.samples:
            return False
        more = self._bytes + sample.hidden_states.nbytes
        too_large = self._most_bytes is not None and more > self._most_bytes
        return len(self.samples) == self._most_rows or too_large

    def add(self, sample: Sample) -> None:
        self._bytes += sample.hidden_states.nbytes
        self.samples.append(sample)

    def empty(self) -> None:
        self.samples, self._bytes, self.number = [], 0, self.number + 1


class _Writer:
    """Writes both artefacts' objects as their groups fill."""

    def __init__(
        self, rows: Store, states: Store, identity: str, groups: tuple[_Group, _Group]
    ) -> None:
        self._rows_store, self._states_store, self._identity = rows, states, identity
        self._rows_group, self._states_group = groups
        self.rows: list[FileEntry] = []
        self.states: list[FileEntry] = []

    def add(self, sample: Sample) -> None:
        for group, flush in self._both():
            if group.is_full_for(sample):
                flush()
                group.empty()
            group.add(sample)

    def close(self, counts: torch.Tensor) -> None:
        """Write what is left, and what stands beside the rows of a prepare artefact."""
        for group, flush in self._both():
            if group.samples:
                flush()
                group.empty()
        beside = {COUNTS_NAME: encode_counts(counts), HELDOUT_NAME: b""}
        self.rows += [artifacts.put(self._rows_store, name, data) for name, data in beside.items()]

    def _both(self) -> tuple[tuple[_Group, Callable[[], None]], ...]:
        return (
            (self._rows_group, self._flush_rows),
            (self._states_group, self._flush_states),
        )

    def _flush_rows(self) -> None:
        samples = self._rows_group.samples
        name = f"rows-{self._rows_group.number:06d}"
        rows = [TokenRow(row=s.row, input_ids=s.input_ids, loss_mask=s.loss_mask) for s in samples]
        # Nobody knows the conversations: an empty id is none, and lineage says so.
        lines = encode_lines(
            RowRecord(row=row.row, conversation="", source=0, messages=[]) for row in rows
        )
        entry = artifacts.put(
            self._rows_store,
            f"{name}.safetensors",
            encode_rows(rows),
            samples=len(rows),
            tokens=_tokens(samples),
        )
        self.rows += [entry, artifacts.put(self._rows_store, f"{name}.jsonl", lines)]

    def _flush_states(self) -> None:
        samples, number = self._states_group.samples, self._states_group.number
        data = encode_samples(samples, identity=self._identity)
        entry = artifacts.put(
            self._states_store,
            f"hidden-{number:06d}.safetensors",
            data,
            samples=len(samples),
            tokens=_tokens(samples),
        )
        self.states.append(msgspec.structs.replace(entry, header_sha256=header_sha256_of(data)))


def take_over(
    old: OldFolder,
    *,
    rows: Store,
    states: Store,
    identity: str,
    settings: Cut,
    told: Callable[[], None],
) -> Taken:
    """Write every good sample of a folder into the prefixes of the two artefacts.

    Args: identity: that of the states, which their objects name.

    A sample without a supervised token, with a number that is not finite, or with a state of zeros
    is left out and counted. Raises ShardInvalid for any other fault of a sample and where more
    than `settings.max_rejected_share` of them are left out, ManifestInvalid where tokens or token
    counts are not those that the folder says, IdentityConflict where other objects lie in a prefix.
    """
    groups = _Group(settings.shard_rows), _Group(settings.unit_rows, settings.unit_bytes)
    writer = _Writer(rows, states, identity, groups)
    counted = torch.zeros(len(old.counts), dtype=torch.int64)
    kept = torch.zeros_like(counted)
    rejected: Counter[str] = Counter()
    num_tokens = longest = 0
    for row in old.rows():
        name = f"{row.number:09d}.0"
        tokens = TokenRow(row=name, input_ids=row.input_ids, loss_mask=row.loss_mask)
        counts = supervised_counts([tokens], len(counted))
        counted += counts
        num_tokens += len(row.input_ids)
        if row.reason:
            rejected[row.reason] += 1
            _refuse_too_many(old, rejected, settings.max_rejected_share)
        else:
            kept += counts
            longest = max(longest, len(row.input_ids))
            writer.add(
                Sample(
                    row=name,
                    input_ids=row.input_ids,
                    loss_mask=row.loss_mask,
                    hidden_states=row.hidden_states,
                )
            )
        told()
    _check_totals(old, num_tokens, counted)
    writer.close(kept)
    return Taken(
        rows=tuple(sorted(writer.rows, key=lambda entry: entry.path)),
        states=tuple(writer.states),
        rows_in=old.manifest.total_samples,
        rejected=dict(sorted(rejected.items())),
        longest_row=longest,
        supervised_tokens=int(kept.sum()),
    )


def _check_totals(old: OldFolder, num_tokens: int, counted: torch.Tensor) -> None:
    """All tokens and all supervised ones are as many as the folder says."""
    if num_tokens != old.manifest.total_tokens:
        raise ManifestInvalid(
            f"{old.where()}: total_tokens",
            wanted=f"{num_tokens}, the tokens of all samples",
            found=old.manifest.total_tokens,
            remedy="copy the folder again, whole",
        )
    other = (counted != old.counts).nonzero().flatten()
    if len(other):
        token = int(other[0])
        raise ManifestInvalid(
            f"{old.where(OLD_COUNTS_NAME)}: token {token}",
            wanted=f"{int(counted[token])}, as often as the samples supervise it",
            found=f"{int(old.counts[token])}, and {len(other) - 1} more tokens differ",
            remedy="copy the folder again, whole: these counts are of other samples",
        )


def _refuse_too_many(old: OldFolder, rejected: Counter[str], max_share: float) -> None:
    if rejected.total() > max_share * old.manifest.total_samples:
        raise ShardInvalid(
            f"{old.store.url}: samples",
            wanted=f"at most {max_share:.1%} of {old.manifest.total_samples} left out",
            found=", ".join(f"{count} {reason}" for reason, count in sorted(rejected.items())),
            remedy="extract the hidden states again, or raise extract.max_rejected_share",
        )


def _tokens(samples: list[Sample]) -> int:
    return sum(len(sample.input_ids) for sample in samples)
