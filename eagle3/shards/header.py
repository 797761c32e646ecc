"""The header of a shard: which rows lie where, their checksums, and whose work the shard is.

A safetensors header: its length in 8 bytes, then JSON padded with spaces. What it says of the
rows is checked against itself before any byte after it is believed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from eagle3 import strict_json
from eagle3.errors import IdentityConflict, ShardInvalid

PARTS = ("input_ids", "loss_mask", "hidden_states")
DTYPES = {"input_ids": "I64", "loss_mask": "I64", "hidden_states": "BF16"}
ALIGNMENT = 8
LENGTH_BYTES = 8
# safetensors itself refuses a longer header.
_MAX_HEADER = 100_000_000
# Beside the rows' checksums; no row has a name with a slash.
_IDENTITY = "eagle3/identity"


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


class Entry(msgspec.Struct, frozen=True):
    """A tensor in a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def encode_header(
    entries: Mapping[str, Entry], checksums: Mapping[str, str], identity: str
) -> bytes:
    """The header with its length before it. An empty identity is left out."""
    said = {**checksums, _IDENTITY: identity} if identity else checksums
    text = msgspec.json.encode({"__metadata__": said, **entries})
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def header_length(data: bytes, path: str) -> int:
    """The bytes of the header, by a shard's first eight. Raises ShardInvalid."""
    length = int.from_bytes(data[:LENGTH_BYTES], "little")
    if len(data) < LENGTH_BYTES or not 2 <= length <= _MAX_HEADER:
        raise invalid(path, "header", "a safetensors header", "other or too few bytes")
    return length


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a header says: the rows in file order, and the identity under which it was written,
    empty where it names none."""

    refs: list[SampleRef]
    identity: str

    def refuse_other(self, identity: str, path: str, *, unnamed: bool = False) -> None:
        """Raises IdentityConflict for a shard of other inputs or settings, or that names none.

        Args: unnamed: whether one that names none may pass, as it does where its manifest names it.
        """
        if self.identity != identity and not (unnamed and not self.identity):
            raise IdentityConflict(
                path,
                wanted=f"an object of these inputs and settings ({identity[:16]})",
                found=f"one of {self.identity[:16] or 'others, or of an older eagle3'}",
                remedy="stop the process that wrote it, delete the object, and run again",
            )


def decode_header(header: bytes, path: str) -> Header:
    """Read a header, after checking that its rows fill the file without gaps.

    Raises ShardInvalid.
    """
    try:
        raw = strict_json.decode(header, dict[str, msgspec.Raw])
        checksums = strict_json.decode(raw.pop("__metadata__"), dict[str, str])
        identity = checksums.pop(_IDENTITY, "")
        entries = {name: strict_json.decode(value, Entry) for name, value in raw.items()}
        crcs = {row: int(value, 16) for row, value in checksums.items()}
    except (msgspec.DecodeError, ValueError, KeyError) as error:
        raise invalid(path, "header", "a header of ours", error) from error
    base = LENGTH_BYTES + len(header)
    refs = [_ref_of(path, row, crcs.get(row), parts, base) for row, parts in _by_row(entries, path)]
    if not refs or len(refs) != len(crcs):
        raise invalid(path, "header", f"{len(crcs)} rows, at least one", f"{len(refs)} rows")
    refs.sort(key=lambda ref: ref.offset)
    expected = base
    for ref in refs:
        if ref.offset != expected:
            raise invalid(path, ref.row, f"its bytes at {expected}", f"at {ref.offset}")
        expected += ref.nbytes
    return Header(refs=refs, identity=identity)


def _by_row(
    entries: Mapping[str, Entry], path: str
) -> Iterator[tuple[str, list[tuple[str, Entry]]]]:
    rows: dict[str, list[tuple[str, Entry]]] = {}
    for name, entry in entries.items():
        row, _, part = name.rpartition("/")
        if part not in PARTS or entry.dtype != DTYPES[part]:
            raise invalid(path, name, f"one of {', '.join(PARTS)} of its dtype", entry.dtype)
        rows.setdefault(row, []).append((part, entry))
    yield from rows.items()


def _ref_of(
    path: str, row: str, crc: int | None, parts: list[tuple[str, Entry]], base: int
) -> SampleRef:
    """One row's place, after checking that its tensors belong together and lie side by side."""
    parts = sorted(parts, key=lambda named: named[1].data_offsets)
    names = tuple(name for name, _ in parts)
    shapes = [entry.shape for _, entry in parts]
    tokens = shapes[0][0] if shapes[0] else 0
    wanted = [(tokens,), (tokens,), (tokens, *shapes[-1][1:])][: len(shapes)]
    if crc is None or names not in (PARTS[:2], PARTS) or shapes != wanted or tokens < 1:
        raise invalid(path, row, "ids [T], mask [T] and states [T, L, H]", f"{names} {shapes}")
    if len(parts) == 3 and len(shapes[2]) != 3:
        raise invalid(path, row, "hidden states [T, L, H]", shapes[2])
    layers, hidden = shapes[2][1:] if len(parts) == 3 else (0, 0)
    sizes = (8 * tokens, 8 * tokens, 2 * tokens * layers * hidden)[: len(parts)]
    start = parts[0][1].data_offsets[0]
    cursor = start
    for (_, entry), size in zip(parts, sizes, strict=True):
        if entry.data_offsets != (cursor, cursor + size) or size == 0:
            raise invalid(path, row, f"{size} bytes at {cursor}", entry.data_offsets)
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


def invalid(path: str, part: str, wanted: object, found: object) -> ShardInvalid:
    """The error of a shard that is not what it should be in one of its parts."""
    return ShardInvalid(
        f"{path}: {part}",
        wanted=wanted,
        found=found,
        remedy="run the stage that wrote it again under a prefix of its own",
    )
