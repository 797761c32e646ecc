"""Single tensors out of safetensors files, by ranged reads.

Of a checkpoint of hundreds of gigabytes only the index, a few headers and three tensors are
read, from a folder and from object storage alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from eagle3.errors import VerifierInvalid
from eagle3.verifier.files import VerifierFiles

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_CHUNK = 64 * 2**20
_HEADER_LIMIT = 100 * 2**20  # that of the safetensors library
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


class Weights:
    """The tensors of a checkpoint by key.

    Attributes:
        index: the bytes that say what the checkpoint holds: the weight index, or the header of
            the only file.
        paths: key -> file.
    """

    def __init__(self, files: VerifierFiles) -> None:
        """Raises VerifierInvalid for a layout that cannot be read, or one with files missing."""
        self._files = files
        self._header = lru_cache(maxsize=None)(self._read_header)
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
        start, header, _ = self._header(path)
        entry = header.get(key)
        if entry is None:
            raise VerifierInvalid(
                f"{self._files.where}/{path}: {key}",
                wanted="this tensor, as the index says",
                found="none in the file's header",
                remedy="download the file and the index again",
            )
        begin, end = entry["data_offsets"]
        return StoredTensor(
            key=key,
            path=path,
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            start=start + begin,
            end=start + end,
        )

    def chunks(self, tensor: StoredTensor) -> Iterator[bytes]:
        """The tensor's bytes in pieces of at most 64 MiB."""
        for start in range(tensor.start, tensor.end, _CHUNK):
            end = min(start + _CHUNK, tensor.end)
            yield self._files.store.read_range(tensor.path, start, end)

    def load(self, tensor: StoredTensor) -> torch.Tensor:
        """The tensor; float16 becomes float32, which holds each of its values exactly."""
        data = bytearray(tensor.end - tensor.start)
        filled = 0
        for chunk in self.chunks(tensor):
            data[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
        values = torch.frombuffer(data, dtype=_DTYPES[tensor.dtype]).reshape(tensor.shape)
        return values.float() if values.dtype == torch.float16 else values

    def _read_index(self, names: set[str]) -> tuple[bytes, dict[str, str]]:
        where = f"{self._files.where}/{INDEX_NAME}"
        weight_map = self._files.read_json(INDEX_NAME).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise VerifierInvalid(
                f"{where}: weight_map",
                wanted="tensor name -> file",
                found="an empty map" if weight_map == {} else type(weight_map).__name__,
                remedy="download the index again",
            )
        # On the hub a file comes when it is required; elsewhere a missing one is missing.
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
        self._files.require(SINGLE_NAME)
        _, header, raw = self._header(SINGLE_NAME)
        return raw, {key: SINGLE_NAME for key in header if key != "__metadata__"}

    def _read_header(self, path: str) -> tuple[int, dict[str, Any], bytes]:
        """(where the data starts, the header, its bytes) of a file that is long enough."""
        self._files.require(path)
        store, where = self._files.store, f"{self._files.where}/{path}"
        size = store.size(path)
        length = int.from_bytes(store.read_range(path, 0, 8), "little") if size >= 8 else 0
        if not 2 <= length <= min(_HEADER_LIMIT, size - 8):
            raise VerifierInvalid(
                where,
                wanted="a safetensors file",
                found=f"{size} bytes with a header of {length}",
                remedy="download the file again; a Git LFS pointer is not the file",
            )
        raw = store.read_range(path, 8, 8 + length)
        try:
            header: dict[str, Any] = json.loads(raw)
            ends = [v["data_offsets"][1] for k, v in header.items() if k != "__metadata__"]
        except (ValueError, AttributeError, KeyError, TypeError, IndexError) as error:
            raise VerifierInvalid(
                where,
                wanted="a safetensors header",
                found=f"{type(error).__name__}: {error}",
                remedy="download the file again",
            ) from error
        if 8 + length + max(ends, default=0) != size:
            raise VerifierInvalid(
                where,
                wanted=f"{8 + length + max(ends, default=0)} bytes, as its header says",
                found=size,
                remedy="download the file again",
            )
        return 8 + length, header, raw
