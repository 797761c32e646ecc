"""The rows that a training sees: where each lies, and the data set folder that upstream wants.

Upstream reads token ids and masks from a folder written by `datasets`, and asks a hidden-states
backend for the states of row i. Both come from the same shards, in the order of the manifest, so
that row i is the same row in both.

Upstream's targets are the verifier's logits over the draft vocabulary alone, renormalised. Where
the token that follows is outside of it, that is a distribution over tokens none of which is right,
and whatever is drafted there gets rejected: such positions are taken out of the mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import datasets
import msgspec
import torch

from eagle3.artifact import Artifact
from eagle3.errors import ConfigError, ManifestInvalid
from eagle3.manifest import FileEntry
from eagle3.shards import SampleRef, ShardReader, TokenRow, read_tokens
from eagle3.store import Store, open_store

INDEX_NAME = "rows.json"
# Requests in flight; a request is a few kilobytes.
_READERS = 16
_BATCH = 4096


class RowIndex(msgspec.Struct, frozen=True, kw_only=True):
    """Where every row of a training lies: the shards' prefix, and a reference for each row."""

    url: str
    refs: tuple[SampleRef, ...]

    def open(self) -> Store:
        """The store that the references are below."""
        return open_store(self.url)

    def save(self, folder: Path) -> None:
        """Write it into the data set folder, where the backend of a loader worker finds it."""
        (folder / INDEX_NAME).write_bytes(msgspec.json.encode(self))

    @classmethod
    def load(cls, folder: Path) -> RowIndex:
        """Read what `save` wrote."""
        return msgspec.json.decode((folder / INDEX_NAME).read_bytes(), type=cls)


@dataclass(frozen=True, kw_only=True)
class Split:
    """How many rows train; the rest, at the end, only measure the validation loss.

    `ratio` is what upstream is given: int(rows * ratio) is `num_train` in its arithmetic.
    """

    num_train: int
    num_validation: int
    ratio: float


def index_rows(states: Artifact) -> RowIndex:
    """References to every row of an `extract/` artefact, from the shards' headers.

    Raises ShardInvalid, and ManifestInvalid where the shards hold other rows than it says.
    """
    files = [entry for entry in states.manifest.files if entry.samples]
    with ThreadPoolExecutor(_READERS) as pool:
        shards = list(pool.map(lambda entry: _refs_of(states, entry), files))
    for entry, refs in zip(files, shards, strict=True):
        found = (len(refs), sum(ref.num_tokens for ref in refs))
        if found != (entry.samples, entry.tokens):
            raise ManifestInvalid(
                f"{states.store.url}/{entry.path}",
                wanted=f"{entry.samples} samples of {entry.tokens} tokens, as its manifest says",
                found=f"{found[0]} of {found[1]}",
                remedy="run extract again under a prefix of its own",
            )
    index = RowIndex(url=states.store.url, refs=tuple(ref for refs in shards for ref in refs))
    names = [ref.row for ref in index.refs]
    if len(set(names)) != len(names):
        raise ManifestInvalid(
            f"{states.store.url}: rows",
            wanted="each row once",
            found=f"{len(names) - len(set(names))} rows twice",
            remedy="run extract again under a prefix of its own",
        )
    return index


def _refs_of(states: Artifact, entry: FileEntry) -> list[SampleRef]:
    reader, identity = ShardReader(states.store, entry.path), states.manifest.identity
    return reader.refs(header_sha256=entry.header_sha256, identity=identity)


def check_rows(index: RowIndex, *, layers: int, hidden_size: int, total_seq_len: int) -> None:
    """Every row has the states' shape and fits into a step. Raises ConfigError, ManifestInvalid.

    Upstream cuts a longer row at `total_seq_len` without a word.
    """
    for ref in index.refs:
        if (ref.num_layers, ref.hidden_size) != (layers, hidden_size):
            raise ManifestInvalid(
                f"{index.url}/{ref.path}: {ref.row}",
                wanted=f"hidden states [T, {layers}, {hidden_size}]",
                found=f"[T, {ref.num_layers}, {ref.hidden_size}]",
                remedy="run extract again under a prefix of its own",
            )
        if ref.num_tokens > total_seq_len:
            raise ConfigError(
                "train.total_seq_len",
                wanted=f"at least {ref.num_tokens}, the tokens of row {ref.row}",
                found=total_seq_len,
                remedy="raise it, since longer rows would be cut without a word",
            )


def split_rows(num_rows: int, validation_share: float, *, world_size: int = 1) -> Split:
    """Split rows into training and validation: at least one row of each for every process.

    With fewer, upstream makes no step at all and validates nothing, without a word. Raises
    ConfigError.
    """
    if num_rows < 2 * world_size:
        raise ConfigError(
            "train: rows",
            wanted=f"at least {2 * world_size}: one to train on and one to validate for each of "
            f"{world_size} processes",
            found=num_rows,
            remedy="prepare more conversations",
        )
    num_validation = round(num_rows * validation_share)
    num_validation = min(max(num_validation, world_size), num_rows - world_size)
    num_train = num_rows - num_validation
    # In the middle between two counts, so that rounding cannot move the boundary.
    return Split(
        num_train=num_train, num_validation=num_validation, ratio=(num_train + 0.5) / num_rows
    )


@dataclass(frozen=True, kw_only=True)
class Supervision:
    """Tokens whose successor is to be learnt, and how many of them are left out because the draft
    vocabulary lacks that successor."""

    supervised: int
    out_of_vocabulary: int


def save_dataset(index: RowIndex, folder: Path, *, t2d: torch.Tensor) -> Supervision:
    """Write the folder that upstream loads: `input_ids`, `loss_mask` int64 [T], `seq_len`.

    The index goes beside it.

    Args:
        t2d: bool [V], which of the verifier's tokens the draft can propose.

    Raises ShardInvalid, and ManifestInvalid for a token id that the verifier has no row for, and
    for rows that leave nothing to learn.
    """
    columns: dict[str, list[object]] = {"input_ids": [], "loss_mask": [], "seq_len": []}
    supervised = kept = 0
    for row in _read_all(index.open(), index.refs):
        largest = int(row.input_ids.max())
        if largest >= len(t2d):
            raise ManifestInvalid(
                f"{index.url}: {row.row}",
                wanted=f"token ids below {len(t2d)}, the rows of the verifier's lm_head",
                found=largest,
                remedy="take the hidden states and the verifier from the same run",
            )
        mask = within_vocabulary(row.input_ids, row.loss_mask, t2d)
        supervised, kept = supervised + int(row.loss_mask.sum()), kept + int(mask.sum())
        columns["input_ids"].append(row.input_ids.numpy())
        columns["loss_mask"].append(mask.numpy())
        columns["seq_len"].append(len(row.input_ids))
    if not kept:
        raise ManifestInvalid(
            f"{index.url}: loss_mask",
            wanted="supervised tokens that the draft vocabulary holds",
            found=f"none among {supervised}",
            remedy="take the hidden states and the vocab artefact from the same run",
        )
    datasets.disable_progress_bars()
    data = datasets.Dataset.from_dict(columns)
    data.set_format("torch")
    data.save_to_disk(str(folder))
    index.save(folder)
    return Supervision(supervised=supervised, out_of_vocabulary=supervised - kept)


def within_vocabulary(
    input_ids: torch.Tensor, loss_mask: torch.Tensor, t2d: torch.Tensor
) -> torch.Tensor:
    """The mask [T] without the positions whose next token the draft cannot propose.

    Upstream's mask at a token weighs the prediction of the one behind it. What follows the last
    token of a row is not known, so that one stays as it is.
    """
    reachable = torch.ones_like(loss_mask, dtype=torch.bool)
    reachable[:-1] = t2d[input_ids[1:]]
    return loss_mask * reachable


def _read_all(store: Store, refs: Sequence[SampleRef]) -> Iterator[TokenRow]:
    """Ids and masks of every row, in order."""
    waiting = iter(refs)
    with ThreadPoolExecutor(_READERS) as pool:
        while batch := list(islice(waiting, _BATCH)):
            yield from pool.map(lambda ref: read_tokens(store, ref), batch)
