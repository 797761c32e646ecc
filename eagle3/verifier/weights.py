"""Single tensors out of safetensors files, by ranged reads.

Of a checkpoint of hundreds of gigabytes only the index, the headers, three tensors and a few
pieces of others are read, from a folder, the hub and object storage alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import msgspec
import torch

from eagle3 import strict_json
from eagle3.errors import VerifierInvalid
from eagle3.verifier.files import VerifierFiles

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_CHUNK = 64 * 2**20
_HEADER_LIMIT = 100 * 2**20  # that of the safetensors library
_Count = Annotated[int, msgspec.Meta(ge=0)]
_WeightMap = Annotated[dict[str, str], msgspec.Meta(min_length=1)]
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor's bytes are: `start` and `end` count from the start of the file."""

    key: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class WeightFile:
    """A safetensors file: its size in bytes, its header as it stands, its tensors by place."""

    path: str
    size: int
    header: bytes
    tensors: tuple[StoredTensor, ...]


class Weights:
    """The tensors of a checkpoint by key.

    Attributes:
        index: the bytes that say what the checkpoint holds: the weight index, or the header of
            the only file.
        paths: key -> file.
        file: the `WeightFile` at a path, read once. Raises VerifierInvalid.
    """

    def __init__(self, files: VerifierFiles) -> None:
        """Raises VerifierInvalid for a layout that cannot be read, or one with files missing."""
        self._files = files
        self.file = lru_cache(maxsize=None)(self._read_file)
        names = set(files.names())
        if files.has(INDEX_NAME):
            self.index, self.paths = self._read_index(names)
        else:
            self.index, self.paths = self._read_single(names)

    def find(self, key: str) -> StoredTensor | None:
        """Where a tensor is, or None where the checkpoint has no such key."""
        path = self.paths.get(key)
        if path is None:
            return None
        found = next((tensor for tensor in self.file(path).tensors if tensor.key == key), None)
        if found is None:
            raise VerifierInvalid(
                f"{self._files.where}/{path}: {key}",
                wanted="this tensor, as the index says",
                found="none in the file's header",
                remedy="download the file and the index again",
            )
        return found

    def chunks(self, tensor: StoredTensor) -> Iterator[bytes]:
        """The tensor's bytes in pieces of at most 64 MiB."""
        for start in range(tensor.start, tensor.end, _CHUNK):
            end = min(start + _CHUNK, tensor.end)
            yield self._files.read_range(tensor.path, start, end)

    def load(self, tensor: StoredTensor) -> torch.Tensor:
        """The tensor; float16 becomes float32, which holds each of its values exactly.

        Raises VerifierInvalid where the file has more or fewer bytes for it than its shape takes.
        """
        data = bytearray(tensor.end - tensor.start)
        filled = 0
        for chunk in self.chunks(tensor):
            data[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
        dtype = _DTYPES[tensor.dtype]
        wanted = math.prod(tensor.shape) * dtype.itemsize
        if not filled == len(data) == wanted:
            raise VerifierInvalid(
                f"{self._files.where}/{tensor.path}: {tensor.key}",
                wanted=f"{wanted} bytes, for shape {list(tensor.shape)}",
                found=filled,
                remedy="download the file again",
            )
        values = torch.frombuffer(data, dtype=dtype).reshape(tensor.shape)
        return values.float() if values.dtype == torch.float16 else values

    def _read_index(self, names: set[str]) -> tuple[bytes, dict[str, str]]:
        where = f"{self._files.where}/{INDEX_NAME}"
        told = self._files.read_json(INDEX_NAME).get("weight_map")
        try:
            weight_map: dict[str, str] = msgspec.convert(told, _WeightMap)
        except msgspec.ValidationError as error:
            raise VerifierInvalid(
                f"{where}: weight_map",
                wanted="tensor name -> file",
                found="an empty map" if told == {} else error,
                remedy="download the index again",
            ) from error
        # On the hub a file that is not listed here may still be there.
        absent = sorted(set(weight_map.values()) - names) if self._files.repo is None else []
        if absent:
            raise VerifierInvalid(
                where,
                wanted=f"the {len(set(weight_map.values()))} files that it names",
                found=f"no {absent[0]}" + (f" and {len(absent) - 1} more" if absent[1:] else ""),
                remedy="complete the download of the model",
            )
        if SINGLE_NAME in names and SINGLE_NAME not in weight_map.values():
            raise VerifierInvalid(
                f"{self._files.where}/{SINGLE_NAME}",
                wanted=f"either this file or {INDEX_NAME}",
                found="both, and the index does not name the file",
                remedy="delete the one that is out of date",
            )
        return self._files.store.read_bytes(INDEX_NAME), weight_map

    def _read_single(self, names: set[str]) -> tuple[bytes, dict[str, str]]:
        if SINGLE_NAME not in names and self._files.repo is None:
            others = sorted(n for n in names if n.endswith((".safetensors", ".bin", ".gguf")))
            raise VerifierInvalid(
                self._files.where,
                wanted=f"{INDEX_NAME} or {SINGLE_NAME}",
                found=others[0] if others else "no weights",
                remedy="bring the checkpoint in the Hugging Face layout, as safetensors",
            )
        beside = sorted(n for n in names if "/" not in n and n.endswith(".safetensors"))
        if others := [name for name in beside if name != SINGLE_NAME]:
            raise VerifierInvalid(
                f"{self._files.where}/{others[0]}",
                wanted=f"{SINGLE_NAME} alone, where there is no {INDEX_NAME}",
                found="this file too, which an engine would load over it",
                remedy="move it away",
            )
        found = self.file(SINGLE_NAME)
        return found.header, {tensor.key: SINGLE_NAME for tensor in found.tensors}

    def _read_file(self, path: str) -> WeightFile:
        """A file's header, and that the file is as long as it says. Raises VerifierInvalid."""
        files, where = self._files, f"{self._files.where}/{path}"
        size = files.size(path)
        length = int.from_bytes(files.read_range(path, 0, 8), "little") if size >= 8 else 0
        if not 2 <= length <= min(_HEADER_LIMIT, size - 8):
            raise VerifierInvalid(
                where,
                wanted="a safetensors file",
                found=f"{size} bytes with a header of {length}",
                remedy="download the file again; a Git LFS pointer is not the file",
            )
        header = files.read_range(path, 8, 8 + length)
        try:
            raw = strict_json.decode(header, dict[str, msgspec.Raw])
            raw.pop("__metadata__", None)
            tensors = [_stored(key, path, 8 + length, entry) for key, entry in raw.items()]
        except (msgspec.DecodeError, ValueError) as error:
            raise VerifierInvalid(
                where,
                wanted="a safetensors header",
                found=f"{type(error).__name__}: {error}",
                remedy="download the file again",
            ) from error
        end = max((tensor.end for tensor in tensors), default=8 + length)
        if end != size:
            raise VerifierInvalid(
                where,
                wanted=f"{end} bytes, as its header says",
                found=size,
                remedy="download the file again",
            )
        tensors.sort(key=lambda tensor: tensor.start)
        return WeightFile(path=path, size=size, header=header, tensors=tuple(tensors))


class _Entry(msgspec.Struct, frozen=True):
    """A tensor in a safetensors header; the offsets count from the header's end."""

    dtype: str
    shape: tuple[_Count, ...]
    data_offsets: tuple[_Count, _Count]


def _stored(key: str, path: str, data: int, raw: msgspec.Raw) -> StoredTensor:
    entry = strict_json.decode(raw, _Entry)
    begin, end = entry.data_offsets
    if begin > end:
        raise ValueError(f"{key} ends at {end}, before its start at {begin}")
    return StoredTensor(
        key=key,
        path=path,
        dtype=entry.dtype,
        shape=entry.shape,
        start=data + begin,
        end=data + end,
    )
