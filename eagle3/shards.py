"""Shards: many rows in one object, of which one ranged read fetches one row.

A shard is a valid safetensors file. Its own writer orders tensors by dtype, which would scatter
a sample over the file; ours keeps the tensors of one sample together, in the order `input_ids`,
`loss_mask`, `hidden_states`, named `<row>/<part>`. The header's `__metadata__` holds the CRC-32
of each sample's bytes, so that a ranged read can tell a flipped bit or a short answer, which the
manifest's sha256 of the whole object cannot. The same rows give the same bytes, always.

A token shard is read whole, so `rows_of` proves it by the manifest's sha256. Shards of hidden
states are read row by row, for hashing terabytes before the first step would read all of them
twice: the manifest's sha256 of the header proves that, and the header's CRC-32 each row.

Layout: 8 bytes, the header's length as little-endian unsigned integer; the header, JSON padded
with spaces to a multiple of 8; then the tensors without gaps (`data_offsets` count from there).
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from eagle3.artifact import Artifact
from eagle3.errors import ShardInvalid
from eagle3.store import Store

_PARTS = ("input_ids", "loss_mask", "hidden_states")
_DTYPES = {"input_ids": "I64", "loss_mask": "I64", "hidden_states": "BF16"}
_ALIGNMENT = 8
_LENGTH_BYTES = 8
# safetensors itself refuses a longer header.
_MAX_HEADER = 100_000_000
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


@dataclass(frozen=True, kw_only=True)
class SampleRef:
    """Where one row lies: all that a ranged read needs. Both sizes are 0 in a token shard.

    `offset` and `nbytes` are the row's place in the object; `crc32` that of its bytes.
    """

    path: str
    row: str
    num_tokens: int
    offset: int
    nbytes: int
    crc32: int
    num_layers: int = 0
    hidden_size: int = 0


def encode_rows(rows: Iterable[TokenRow], *, unanswered: bool = False) -> bytes:
    """A shard of token rows. Raises ShardInvalid for a row that is not what TokenRow says.

    Args:
        unanswered: whether a row may have nothing supervised, as a prompt has before regenerate
            answers it. Whoever reads such a row to train on it gets ShardInvalid.
    """
    named = [(row.row, (row.input_ids, row.loss_mask)) for row in rows]
    return _encode(named, unanswered=unanswered)


def encode_samples(samples: Iterable[Sample]) -> bytes:
    """A shard of samples. Raises ShardInvalid for a sample that is not what Sample says."""
    return _encode([(s.row, (s.input_ids, s.loss_mask, s.hidden_states)) for s in samples])


def header_sha256_of(shard: bytes) -> str:
    """The sha256, in hex, of a shard's header."""
    end = _LENGTH_BYTES + _header_length(shard, "a shard")
    return hashlib.sha256(shard[_LENGTH_BYTES:end]).hexdigest()


class ShardReader:
    """Reads rows of one shard, each by one ranged request. Can be pickled."""

    def __init__(self, store: Store, path: str) -> None:
        self._store = store
        self._path = path

    def refs(self, *, header_sha256: str | None = None) -> list[SampleRef]:
        """Every row of the shard in file order, from its header alone, which is proven where
        `header_sha256` is what `header_sha256_of` gave. Raises ShardInvalid."""
        first = self._store.read_range(self._path, 0, _FIRST_READ)
        length = _header_length(first, self._path)
        header = first[_LENGTH_BYTES:]
        if len(header) < length:
            end = _LENGTH_BYTES + length
            header += self._store.read_range(self._path, len(first), end)
        found = hashlib.sha256(header[:length]).hexdigest()
        if header_sha256 is not None and found != header_sha256:
            raise _invalid(self._path, "header", header_sha256, f"{found}, another shard")
        return _refs(header[:length], self._path)

    def read(self, ref: SampleRef, *, finite: bool = False) -> Sample:
        """One sample; `finite` looks for NaN and infinity too. Raises ShardInvalid."""
        return read_sample(self._store, ref, finite=finite)


def read_sample(store: Store, ref: SampleRef, *, finite: bool = False) -> Sample:
    """One sample by one ranged request, checked. Raises ShardInvalid."""
    data = store.read_range(ref.path, ref.offset, ref.offset + ref.nbytes)
    if not ref.num_layers:
        raise _invalid(ref.path, ref.row, "hidden states", "a token row")
    ids, mask, states = _decode(data, ref)
    if finite and not bool(torch.isfinite(states).all()):
        raise _invalid(ref.path, ref.row, "finite hidden states", "NaN or infinity")
    return Sample(row=ref.row, input_ids=ids, loss_mask=mask, hidden_states=states)


def read_tokens(store: Store, ref: SampleRef) -> TokenRow:
    """One row's ids and mask by one ranged request for their bytes alone.

    The checksum covers the whole sample, so it is `read_sample` that proves them.
    """
    data = store.read_range(ref.path, ref.offset, ref.offset + 16 * ref.num_tokens)
    if len(data) != 16 * ref.num_tokens:
        raise _invalid(ref.path, ref.row, f"{16 * ref.num_tokens} bytes", f"{len(data)} bytes")
    both = torch.frombuffer(bytearray(data), dtype=torch.int64).reshape(2, ref.num_tokens)
    _check_row(ref.path, ref.row, (both[0], both[1]))
    return TokenRow(row=ref.row, input_ids=both[0], loss_mask=both[1])


def read_rows(store: Store, path: str) -> list[TokenRow]:
    """Every token row of a shard (hidden states are left out), checked. Raises ShardInvalid."""
    return decode_rows(store.read_bytes(path), path)


def rows_of(artifact: Artifact, path: str) -> list[TokenRow]:
    """The same of a committed shard, of the manifest's bytes. Raises ManifestInvalid too."""
    return decode_rows(artifact.read(path), path)


def decode_rows(data: bytes, path: str, *, unanswered: bool = False) -> list[TokenRow]:
    """The same of a shard's bytes; `path` names it in an error, `unanswered` as `encode_rows`."""
    length = _header_length(data, path)
    refs = _refs(data[_LENGTH_BYTES : _LENGTH_BYTES + length], path)
    end = refs[-1].offset + refs[-1].nbytes
    if len(data) != end:
        raise _invalid(path, "object", f"{end} bytes, as its header says", f"{len(data)} bytes")
    rows = []
    for ref in refs:
        part = data[ref.offset : ref.offset + ref.nbytes]
        ids, mask = _decode(part, ref, unanswered=unanswered)[:2]
        rows.append(TokenRow(row=ref.row, input_ids=ids, loss_mask=mask))
    return rows


class _Entry(msgspec.Struct, frozen=True):
    """A tensor in a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _encode(rows: Sequence[tuple[str, tuple[Tensor, ...]]], *, unanswered: bool = False) -> bytes:
    header: dict[str, object] = {}
    checksums: dict[str, str] = {}
    chunks: list[bytes] = []
    start = 0
    for row, tensors in rows:
        if row in checksums or not row or "/" in row:
            raise _invalid("a shard being written", row, "a row name of its own", "one in use")
        _check_row("a shard being written", row, tensors, unanswered=unanswered)
        crc = 0
        for part, tensor in zip(_PARTS, tensors, strict=False):
            data = _to_bytes(tensor)
            crc = zlib.crc32(data, crc)
            end = start + len(data)
            header[f"{row}/{part}"] = _Entry(_DTYPES[part], tuple(tensor.shape), (start, end))
            chunks.append(data)
            start = end
        checksums[row] = f"{crc:08x}"
    if not rows:
        raise _invalid("a shard being written", "rows", "at least one row", "none")
    text = msgspec.json.encode({"__metadata__": checksums, **header})
    text += b" " * (-len(text) % _ALIGNMENT)
    return b"".join([len(text).to_bytes(_LENGTH_BYTES, "little"), text, *chunks])


def _check_row(
    where: str, row: str, tensors: tuple[Tensor, ...], *, unanswered: bool = False
) -> None:
    """What must hold of a row on its way in or out. Raises ShardInvalid."""
    ids, mask = tensors[:2]
    if ids.dtype != torch.int64 or mask.dtype != torch.int64:
        raise _invalid(where, row, "int64 ids and mask", f"{ids.dtype} and {mask.dtype}")
    if ids.ndim != 1 or not len(ids) or mask.shape != ids.shape:
        raise _invalid(where, row, "ids [T] and mask [T]", f"{[*ids.shape]} and {[*mask.shape]}")
    if bool(((mask != 0) & (mask != 1)).any()) or not (unanswered or bool(mask.any())):
        raise _invalid(where, row, "a mask of 0 and 1 with at least one 1", "another mask")
    if bool((ids < 0).any()):
        raise _invalid(where, row, "token ids from 0", int(ids.min()))
    if len(tensors) == 2:
        return
    states = tensors[2]
    if states.dtype != torch.bfloat16 or states.ndim != 3 or states.shape[0] != len(ids):
        raise _invalid(
            where,
            row,
            f"hidden states bfloat16 [{len(ids)}, L, H]",
            f"{states.dtype} {[*states.shape]}",
        )
    if not states.numel() or states[0].numel() * states.element_size() % _ALIGNMENT:
        # The next row's int64 tensors would not be aligned, and safetensors allows no gaps.
        raise _invalid(where, row, "L * H a multiple of 4", f"{[*states.shape[1:]]}")


def _to_bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().tobytes()


def _header_length(data: bytes, path: str) -> int:
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if len(data) < _LENGTH_BYTES or not 2 <= length <= _MAX_HEADER:
        raise _invalid(path, "header", "a safetensors header", "other or too few bytes")
    return length


def _refs(header: bytes, path: str) -> list[SampleRef]:
    """The rows that a header names, after checking that they fill the file without gaps."""
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        checksums = msgspec.json.decode(raw.pop("__metadata__"), type=dict[str, str])
        entries = {name: msgspec.json.decode(value, type=_Entry) for name, value in raw.items()}
        crcs = {row: int(value, 16) for row, value in checksums.items()}
    except (msgspec.DecodeError, ValueError, KeyError) as error:
        raise _invalid(path, "header", "a header of ours", error) from error
    base = _LENGTH_BYTES + len(header)
    refs = [_ref_of(path, row, crcs.get(row), parts, base) for row, parts in _by_row(entries, path)]
    if not refs or len(refs) != len(crcs):
        raise _invalid(path, "header", f"{len(crcs)} rows, at least one", f"{len(refs)} rows")
    refs.sort(key=lambda ref: ref.offset)
    expected = base
    for ref in refs:
        if ref.offset != expected:
            raise _invalid(path, ref.row, f"its bytes at {expected}", f"at {ref.offset}")
        expected += ref.nbytes
    return refs


def _by_row(
    entries: Mapping[str, _Entry], path: str
) -> Iterator[tuple[str, list[tuple[str, _Entry]]]]:
    rows: dict[str, list[tuple[str, _Entry]]] = {}
    for name, entry in entries.items():
        row, _, part = name.rpartition("/")
        if part not in _PARTS or entry.dtype != _DTYPES[part]:
            raise _invalid(path, name, f"one of {', '.join(_PARTS)} of its dtype", entry.dtype)
        rows.setdefault(row, []).append((part, entry))
    yield from rows.items()


def _ref_of(
    path: str, row: str, crc: int | None, parts: list[tuple[str, _Entry]], base: int
) -> SampleRef:
    """One row's place, after checking that its tensors belong together and lie side by side."""
    parts = sorted(parts, key=lambda named: named[1].data_offsets)
    names = tuple(name for name, _ in parts)
    shapes = [entry.shape for _, entry in parts]
    tokens = shapes[0][0] if shapes[0] else 0
    wanted = [(tokens,), (tokens,), (tokens, *shapes[-1][1:])][: len(shapes)]
    if crc is None or names not in (_PARTS[:2], _PARTS) or shapes != wanted or tokens < 1:
        raise _invalid(path, row, "ids [T], mask [T] and states [T, L, H]", f"{names} {shapes}")
    if len(parts) == 3 and len(shapes[2]) != 3:
        raise _invalid(path, row, "hidden states [T, L, H]", shapes[2])
    layers, hidden = shapes[2][1:] if len(parts) == 3 else (0, 0)
    sizes = (8 * tokens, 8 * tokens, 2 * tokens * layers * hidden)[: len(parts)]
    start = parts[0][1].data_offsets[0]
    cursor = start
    for (_, entry), size in zip(parts, sizes, strict=True):
        if entry.data_offsets != (cursor, cursor + size) or size == 0:
            raise _invalid(path, row, f"{size} bytes at {cursor}", entry.data_offsets)
        cursor += size
    return SampleRef(
        path=path,
        row=row,
        num_tokens=tokens,
        offset=base + start,
        nbytes=cursor - start,
        crc32=crc,
        num_layers=layers,
        hidden_size=hidden,
    )


def _decode(data: bytes, ref: SampleRef, *, unanswered: bool = False) -> tuple[Tensor, ...]:
    """The two or three tensors of one row from its bytes. Raises ShardInvalid."""
    if len(data) != ref.nbytes:
        raise _invalid(ref.path, ref.row, f"{ref.nbytes} bytes", f"{len(data)} bytes")
    if zlib.crc32(data) != ref.crc32:
        raise _invalid(
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


def _invalid(path: str, part: str, wanted: object, found: object) -> ShardInvalid:
    return ShardInvalid(
        f"{path}: {part}",
        wanted=wanted,
        found=found,
        remedy="run the stage that wrote it again under a prefix of its own",
    )
