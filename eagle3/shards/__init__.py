"""Shards: many rows in one object, of which one ranged read fetches one row.

A shard is a valid safetensors file. Its own writer orders tensors by dtype, which would scatter
a sample over the file; ours keeps the tensors of one sample together, in the order `input_ids`,
`loss_mask`, `hidden_states`, named `<row>/<part>`. The header's `__metadata__` holds the CRC-32
of each sample's bytes, so that a ranged read can tell a flipped bit or a short answer, which the
manifest's sha256 of the whole object cannot. Beside these stands the identity under which a unit
was done, so that one of other settings, which a process left that was taken for dead, is known for
what it is. The same rows give the same bytes, always.

A token shard is read whole, so `rows_of` proves it by the manifest's sha256. Shards of hidden
states are read row by row, for hashing terabytes before the first step would read all of them
twice: the manifest's sha256 of the header proves that, and the header's CRC-32 each row.

Layout: 8 bytes, the header's length as little-endian unsigned integer; the header, JSON padded
with spaces to a multiple of 8; then the tensors without gaps (`data_offsets` count from there).
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3.artifact import Artifact
from eagle3.shards.header import (
    ALIGNMENT,
    DTYPES,
    LENGTH_BYTES,
    PARTS,
    Entry,
    Header,
    SampleRef,
    decode_header,
    encode_header,
    header_length,
    invalid,
)
from eagle3.store import Store

__all__ = [
    "Sample",
    "SampleRef",
    "ShardReader",
    "TokenRow",
    "decode_rows",
    "encode_rows",
    "encode_samples",
    "header_of",
    "header_sha256_of",
    "read_rows",
    "read_sample",
    "read_tokens",
    "rows_of",
    "same_tokens",
]

# Enough for the header of some 200 rows, so that one request reads it.
_FIRST_READ = 64 * 1024


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenRow:
    """A row of tokens: `input_ids` and `loss_mask` are int64 [T]; a mask of 1 is supervised."""

    row: str
    input_ids: Tensor
    loss_mask: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """A row with its hidden states: bf16 [T, L, H], L layers in ascending order of their ids."""

    row: str
    input_ids: Tensor
    loss_mask: Tensor
    hidden_states: Tensor


def same_tokens(first: TokenRow | Sample, second: TokenRow | Sample) -> bool:
    """Whether two rows have the same ids and the same mask."""
    return torch.equal(first.input_ids, second.input_ids) and torch.equal(
        first.loss_mask, second.loss_mask
    )


def encode_rows(rows: Iterable[TokenRow], *, unanswered: bool = False, identity: str = "") -> bytes:
    """A shard of token rows. Raises ShardInvalid for a row that is not what TokenRow says.

    Args:
        identity: that of the inputs and settings which the rows were made with; empty where the
            same ones give the same bytes, so that the bytes themselves tell.
        unanswered: whether a row may have nothing supervised, as a prompt has before regenerate
            answers it. Whoever reads such a row to train on it gets ShardInvalid.
    """
    named = [(row.row, (row.input_ids, row.loss_mask)) for row in rows]
    return _encode(named, identity, unanswered=unanswered)


def encode_samples(samples: Iterable[Sample], *, identity: str = "") -> bytes:
    """A shard of samples. Raises ShardInvalid for a sample that is not what Sample says."""
    named = [(s.row, (s.input_ids, s.loss_mask, s.hidden_states)) for s in samples]
    return _encode(named, identity)


def header_of(shard: bytes, path: str) -> Header:
    """What a shard's header says. Raises ShardInvalid."""
    end = LENGTH_BYTES + header_length(shard, path)
    return decode_header(shard[LENGTH_BYTES:end], path)


def header_sha256_of(shard: bytes) -> str:
    """The sha256, in hex, of a shard's header."""
    end = LENGTH_BYTES + header_length(shard, "a shard")
    return hashlib.sha256(shard[LENGTH_BYTES:end]).hexdigest()


class ShardReader:
    """Reads rows of one shard, each by one ranged request. Can be pickled."""

    def __init__(self, store: Store, path: str) -> None:
        self._store = store
        self._path = path

    def refs(
        self, *, header_sha256: str | None = None, identity: str | None = None
    ) -> list[SampleRef]:
        """Every row of the shard in file order, from its header alone.

        Args:
            header_sha256: what `header_sha256_of` gave, which proves the header.
            identity: that of the shard's artefact; a header that names another is refused.

        Raises ShardInvalid, IdentityConflict.
        """
        first = self._store.read_range(self._path, 0, _FIRST_READ)
        length = header_length(first, self._path)
        header = first[LENGTH_BYTES:]
        if len(header) < length:
            end = LENGTH_BYTES + length
            header += self._store.read_range(self._path, len(first), end)
        found = hashlib.sha256(header[:length]).hexdigest()
        if header_sha256 is not None and found != header_sha256:
            raise invalid(self._path, "header", header_sha256, f"{found}, another shard")
        told = decode_header(header[:length], self._path)
        if identity is not None:
            told.refuse_other(identity, f"{self._store.url}/{self._path}", unnamed=True)
        return told.refs

    def read(self, ref: SampleRef, *, finite: bool = False) -> Sample:
        """One sample; `finite` looks for NaN and infinity too. Raises ShardInvalid."""
        return read_sample(self._store, ref, finite=finite)


def read_sample(store: Store, ref: SampleRef, *, finite: bool = False) -> Sample:
    """One sample by one ranged request, checked. Raises ShardInvalid."""
    data = store.read_range(ref.path, ref.offset, ref.offset + ref.nbytes)
    if not ref.num_layers:
        raise invalid(ref.path, ref.row, "hidden states", "a token row")
    ids, mask, states = _decode(data, ref)
    if finite and not bool(torch.isfinite(states).all()):
        raise invalid(ref.path, ref.row, "finite hidden states", "NaN or infinity")
    return Sample(row=ref.row, input_ids=ids, loss_mask=mask, hidden_states=states)


def read_tokens(store: Store, ref: SampleRef) -> TokenRow:
    """One row's ids and mask by one ranged request for their bytes alone.

    The checksum covers the whole sample, so it is `read_sample` that proves them.
    """
    data = store.read_range(ref.path, ref.offset, ref.offset + 16 * ref.num_tokens)
    if len(data) != 16 * ref.num_tokens:
        raise invalid(ref.path, ref.row, f"{16 * ref.num_tokens} bytes", f"{len(data)} bytes")
    both = torch.frombuffer(bytearray(data), dtype=torch.int64).reshape(2, ref.num_tokens)
    _check_row(ref.path, ref.row, (both[0], both[1]))
    return TokenRow(row=ref.row, input_ids=both[0], loss_mask=both[1])


def read_rows(store: Store, path: str) -> list[TokenRow]:
    """Every token row of a shard (hidden states are left out), checked. Raises ShardInvalid."""
    return decode_rows(store.read_bytes(path), path)


def rows_of(artifact: Artifact, path: str) -> list[TokenRow]:
    """The same of a committed shard, of the manifest's bytes and identity.

    Raises ManifestInvalid and IdentityConflict too.
    """
    header = header_of(data := artifact.read(path), path)
    where = f"{artifact.store.url}/{path}"
    header.refuse_other(artifact.manifest.identity, where, unnamed=True)
    return decode_rows(data, path)


def decode_rows(data: bytes, path: str, *, unanswered: bool = False) -> list[TokenRow]:
    """The same of a shard's bytes; `path` names it in an error, `unanswered` as `encode_rows`."""
    refs = header_of(data, path).refs
    end = refs[-1].offset + refs[-1].nbytes
    if len(data) != end:
        raise invalid(path, "object", f"{end} bytes, as its header says", f"{len(data)} bytes")
    rows = []
    for ref in refs:
        part = data[ref.offset : ref.offset + ref.nbytes]
        ids, mask = _decode(part, ref, unanswered=unanswered)[:2]
        rows.append(TokenRow(row=ref.row, input_ids=ids, loss_mask=mask))
    return rows


def _encode(
    rows: Sequence[tuple[str, tuple[Tensor, ...]]], identity: str, *, unanswered: bool = False
) -> bytes:
    entries: dict[str, Entry] = {}
    checksums: dict[str, str] = {}
    chunks: list[bytes] = []
    start = 0
    for row, tensors in rows:
        if row in checksums or not row or "/" in row:
            raise invalid("a shard being written", row, "a row name of its own", "one in use")
        _check_row("a shard being written", row, tensors, unanswered=unanswered)
        crc = 0
        for part, tensor in zip(PARTS, tensors, strict=False):
            data = _to_bytes(tensor)
            crc = zlib.crc32(data, crc)
            end = start + len(data)
            entries[f"{row}/{part}"] = Entry(DTYPES[part], tuple(tensor.shape), (start, end))
            chunks.append(data)
            start = end
        checksums[row] = f"{crc:08x}"
    if not rows:
        raise invalid("a shard being written", "rows", "at least one row", "none")
    return b"".join([encode_header(entries, checksums, identity), *chunks])


def _check_row(
    where: str, row: str, tensors: tuple[Tensor, ...], *, unanswered: bool = False
) -> None:
    """What must hold of a row on its way in or out. Raises ShardInvalid."""
    ids, mask = tensors[:2]
    if ids.dtype != torch.int64 or mask.dtype != torch.int64:
        raise invalid(where, row, "int64 ids and mask", f"{ids.dtype} and {mask.dtype}")
    if ids.ndim != 1 or not len(ids) or mask.shape != ids.shape:
        raise invalid(where, row, "ids [T] and mask [T]", f"{[*ids.shape]} and {[*mask.shape]}")
    lowest, highest = map(int, mask.aminmax())
    if lowest < 0 or highest > 1 or not (unanswered or highest):
        raise invalid(where, row, "a mask of 0 and 1 with at least one 1", "another mask")
    if (smallest := int(ids.min())) < 0:
        raise invalid(where, row, "token ids from 0", smallest)
    if len(tensors) == 2:
        return
    states = tensors[2]
    if states.dtype != torch.bfloat16 or states.ndim != 3 or states.shape[0] != len(ids):
        raise invalid(
            where,
            row,
            f"hidden states bfloat16 [{len(ids)}, L, H]",
            f"{states.dtype} {[*states.shape]}",
        )
    if not states.numel() or states[0].numel() * states.element_size() % ALIGNMENT:
        # The next row's int64 tensors would not be aligned, and safetensors allows no gaps.
        raise invalid(where, row, "L * H a multiple of 4", f"{[*states.shape[1:]]}")


def _to_bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().tobytes()


def _decode(data: bytes, ref: SampleRef, *, unanswered: bool = False) -> tuple[Tensor, ...]:
    """The two or three tensors of one row from its bytes. Raises ShardInvalid."""
    if len(data) != ref.nbytes:
        raise invalid(ref.path, ref.row, f"{ref.nbytes} bytes", f"{len(data)} bytes")
    if zlib.crc32(data) != ref.crc32:
        raise invalid(
            ref.path, ref.row, f"CRC-32 {ref.crc32:08x}", f"{zlib.crc32(data):08x}, altered bytes"
        )
    # A copy, for torch wants memory that it may write to.
    buffer = bytearray(data)
    tokens = ref.num_tokens
    ids = torch.frombuffer(buffer, dtype=torch.int64, count=tokens)
    mask = torch.frombuffer(buffer, dtype=torch.int64, count=tokens, offset=8 * tokens)
    tensors: tuple[Tensor, ...] = (ids, mask)
    if ref.num_layers:
        flat = torch.frombuffer(buffer, dtype=torch.bfloat16, offset=16 * tokens)
        tensors = (ids, mask, flat.reshape(tokens, ref.num_layers, ref.hidden_size))
    _check_row(ref.path, ref.row, tensors, unanswered=unanswered)
    return tensors
