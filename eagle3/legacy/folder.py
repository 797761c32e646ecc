"""A folder of version 1: its manifest, its samples and its counts, each checked as it is read."""

from __future__ import annotations

import hashlib
import io
import pickle
import re
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TypeGuard

import msgspec
import torch

from eagle3 import strict_json
from eagle3.capture import CapturedRow, check_states
from eagle3.errors import CaptureInvalid, ManifestInvalid, ShardInvalid
from eagle3.manifest import MANIFEST_NAME, SourceFile, VerifierFacts
from eagle3.store import Store, open_store
from eagle3.vocab import Mapping, check_mapping, mapping_sha256

COUNTS_NAME, T2D_NAME, D2T_NAME = "token_freq.pt", "t2d.pt", "d2t.pt"
CONVENTION = "output_of_layer"
_ROW = re.compile(r"data_(0|[1-9]\d*)\.pt")
_NUM_LAYERS = 4
# What torch.load raises for bytes that are no file of its own, or that hold more than tensors.
_UNREADABLE = (
    pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, AttributeError,
    TypeError, AssertionError, struct.error, OverflowError, ImportError,
)  # fmt: skip
# Samples hashed at a time; each is read in pieces of a few megabytes.
_READERS = 8
_MASKS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class OldManifest(msgspec.Struct, frozen=True, kw_only=True):
    """`data_config.json` of version 1."""

    model_path: str
    layer_ids: tuple[int, ...]
    max_seq_len: int
    tp_size: int
    total_samples: int
    total_tokens: int
    total_time_seconds: float
    data_format_version: int
    hidden_size: int
    num_layers_captured: int


@dataclass(frozen=True, kw_only=True, eq=False)
class OldRow:
    """A sample: ids and mask int64 [T], states bfloat16 [T, L, H]; `reason` to leave it out."""

    number: int
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden_states: torch.Tensor
    reason: str


def inputs_of(layer_ids: tuple[int, ...], num_hidden_layers: int, where: str) -> tuple[int, ...]:
    """Ids that count layers' outputs from 0, as ours: the output of layer k enters layer k + 1.

    [2, 30, 58, 60] of 61 layers are [3, 31, 59, 61]. Raises ManifestInvalid where the last one
    does not come out as the number of layers, and for ids that do not rise.
    """
    ids = tuple(i + 1 for i in layer_ids)
    rising = len(ids) == _NUM_LAYERS and ids[0] > 0 and list(ids) == sorted(set(ids))
    if not rising or ids[-1] != num_hidden_layers:
        raise ManifestInvalid(
            f"{where}: layer_ids",
            wanted=f"three outputs of layers, rising, and the last layer's, "
            f"{num_hidden_layers - 1} of {num_hidden_layers} layers",
            found=list(layer_ids),
            remedy="name the verifier that these states are of, or extract them again",
        )
    return ids


class OldFolder:
    """A folder of version 1. Files are read when they are asked for, and hashed on the way."""

    def __init__(self, url: str) -> None:
        """Raises ManifestInvalid for anything but a whole folder of version 1."""
        self.store: Store = open_store(url)
        self._hashes: dict[str, SourceFile] = {}
        self._measured: dict[str, str] = {}
        self.manifest = self._manifest()
        self._refuse_other_files()

    def where(self, name: str = MANIFEST_NAME) -> str:
        """A file's URL, for an error."""
        return f"{self.store.url}/{name}"

    @property
    def sources(self) -> tuple[SourceFile, ...]:
        """URL, bytes and sha256 of what has been read so far, the samples in their order."""
        return tuple(self._hashes.values())

    def measure(self, told: Callable[[], None]) -> str:
        """Hash of all samples' bytes, by which one folder is told from another.

        States that were extracted again have the same names and sizes. What is read of a sample
        from now on must be what was hashed. Args: told: called after each sample.
        """
        names = [f"data_{number}.pt" for number in range(self.manifest.total_samples)]
        with ThreadPoolExecutor(_READERS) as readers:
            for name, sha256 in zip(names, readers.map(self._sha256_of, names), strict=True):
                self._measured[name] = sha256
                told()
        lines = "".join(f"{name} {self._measured[name]}\n" for name in names)
        return hashlib.sha256(lines.encode()).hexdigest()

    @cached_property
    def counts(self) -> torch.Tensor:
        """Supervised tokens of all samples by id, int64 [V], as the old tool counted them."""
        found = self._tensor(COUNTS_NAME)
        if (
            found.ndim != 1
            or found.dtype not in (torch.int64, torch.int32)
            or bool((found < 0).any())
        ):
            raise self._invalid(COUNTS_NAME, "counts [V], integers from 0", _kind(found))
        return found.to(torch.int64)

    def mapping_sha256(self) -> str:
        """Hash of t2d and d2t, after the invariants I1 to I4 have been checked of them.

        They are not taken over, since they may leave out a special id: `vocab` builds its own.
        Raises MappingInvalid.
        """
        t2d, d2t = self._tensor(T2D_NAME), self._tensor(D2T_NAME)
        mapping = Mapping(t2d=t2d, d2t=d2t)
        size = len(self.counts)
        check_mapping(mapping, vocab_size=size, required_ids=(), where=self.where(T2D_NAME))
        return mapping_sha256(mapping)

    def check_verifier(self, facts: VerifierFacts) -> None:
        """The verifier can be the one that these states are of. Raises ManifestInvalid."""
        found = {"hidden_size": self.manifest.hidden_size, "vocab_size": len(self.counts)}
        for field, value in found.items():
            if value != getattr(facts, field):
                raise ManifestInvalid(
                    self.where(MANIFEST_NAME if field == "hidden_size" else COUNTS_NAME),
                    wanted=f"{field} {getattr(facts, field)}, the verifier's",
                    found=value,
                    remedy="name the verifier that these states are of as verifier.source",
                )

    def rows(self) -> Iterator[OldRow]:
        """Every sample in order, each checked in full. Raises ShardInvalid."""
        for number in range(self.manifest.total_samples):
            yield self.row(number)

    def _manifest(self) -> OldManifest:
        try:
            data = self._read(MANIFEST_NAME)
            found = strict_json.decode(data, OldManifest)
        except FileNotFoundError as error:
            raise self._no_manifest("no such file") from error
        except msgspec.DecodeError as error:
            raise self._no_manifest(error) from error
        if found.data_format_version != 1:
            raise self._no_manifest(f"version {found.data_format_version}")
        if found.num_layers_captured != len(found.layer_ids) or found.total_samples < 1:
            raise self._no_manifest(
                f"{found.total_samples} samples of {found.num_layers_captured} layers, ids "
                f"{list(found.layer_ids)}"
            )
        return found

    def _no_manifest(self, found: object) -> ManifestInvalid:
        return ManifestInvalid(
            self.where(),
            wanted="the ten fields of version 1, and at least one sample",
            found=found,
            remedy="name a folder of version 1; a version 2 artefact is named under inputs",
        )

    def _refuse_other_files(self) -> None:
        """Each sample once, no more and no fewer than the manifest says."""
        names = [info.path for info in self.store.list()]
        numbers = {int(match[1]) for name in names if (match := _ROW.fullmatch(name))}
        wanted = set(range(self.manifest.total_samples))
        if numbers != wanted:
            at = min(numbers ^ wanted)
            raise ManifestInvalid(
                self.where(),
                wanted=f"data_0.pt to data_{len(wanted) - 1}.pt, total_samples of them",
                found=f"{len(numbers)} such files, {'no' if at in wanted else 'also'} data_{at}.pt",
                remedy="copy the folder again, whole",
            )

    def row(self, number: int) -> OldRow:
        name = f"data_{number}.pt"
        found = self._load(name)
        if not isinstance(found, dict) or not {"input_ids", "loss_mask", "hidden_states"} <= set(
            found
        ):
            raise self._invalid(
                name, "a dict of input_ids, loss_mask and hidden_states", _kind(found)
            )
        ids, mask = self._tokens(name, found["input_ids"], found["loss_mask"])
        states = self._states(name, found["hidden_states"], len(ids))
        try:
            reason = check_states(
                CapturedRow(ids, states),
                ids.tolist(),
                num_layers=_NUM_LAYERS,
                hidden_size=self.manifest.hidden_size,
            )
        except CaptureInvalid as error:
            raise self._invalid(name, error.wanted, error.found) from error
        if not bool(mask.any()):
            reason = "no_supervised_tokens"
        return OldRow(
            number=number,
            input_ids=ids,
            loss_mask=mask,
            hidden_states=states,
            reason=reason or "",
        )

    def _tokens(self, name: str, ids: object, mask: object) -> tuple[torch.Tensor, torch.Tensor]:
        most, vocab_size = self.manifest.max_seq_len, len(self.counts)
        if not _is_plain(ids) or ids.dtype != torch.int64 or not 0 < len(ids) <= most:
            raise self._invalid(name, f"input_ids int64 [T], T up to {most}", _kind(ids))
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab_size:
            raise self._invalid(name, f"input_ids below {vocab_size}", f"{low} to {high}")
        if not _is_plain(mask) or mask.dtype not in _MASKS or mask.shape != ids.shape:
            raise self._invalid(name, f"loss_mask of integers [{len(ids)}]", _kind(mask))
        plain = mask.to(torch.int64)
        if bool(((plain != 0) & (plain != 1)).any()):
            raise self._invalid(name, "a loss_mask of 0 and 1", sorted(set(plain.tolist()))[:5])
        return ids.contiguous(), plain

    def _states(self, name: str, layers: object, num_tokens: int) -> torch.Tensor:
        shape = (num_tokens, self.manifest.hidden_size)
        wanted = f"{_NUM_LAYERS} hidden_states bfloat16 {list(shape)}"
        if not isinstance(layers, list | tuple) or len(layers) != _NUM_LAYERS:
            raise self._invalid(name, wanted, _kind(layers))
        for layer in layers:
            right = isinstance(layer, torch.Tensor) and layer.layout == torch.strided
            if not right or layer.dtype != torch.bfloat16 or tuple(layer.shape) != shape:
                raise self._invalid(name, wanted, _kind(layer))
        return torch.stack(list(layers), dim=1)

    def _tensor(self, name: str) -> torch.Tensor:
        found = self._load(name)
        if not _is_plain(found):
            raise self._invalid(name, "a tensor of one dimension", _kind(found))
        return found

    def _load(self, name: str) -> object:
        """What a file of torch.save holds, where that is plain values and tensors."""
        try:
            found: object = torch.load(
                io.BytesIO(self._read(name)), weights_only=True, map_location="cpu"
            )
        except FileNotFoundError as error:
            raise self._invalid(name, "a file", "none of that name") from error
        except _UNREADABLE as error:
            first = (str(error).strip().splitlines() or [""])[0]
            raise self._invalid(
                name,
                "a file of torch.save that holds tensors and nothing that runs",
                f"{type(error).__name__}: {first[:200]}",
            ) from error
        return found

    def _sha256_of(self, name: str) -> str:
        try:
            return self.store.sha256(name)
        except FileNotFoundError as error:
            raise self._invalid(name, "a file", "none of that name") from error

    def _read(self, name: str) -> bytes:
        data = self.store.read_bytes(name)
        sha256 = hashlib.sha256(data).hexdigest()
        if sha256 != self._measured.get(name, sha256):
            raise self._invalid(name, f"sha256 {self._measured[name][:16]}, as before", sha256[:16])
        self._hashes[name] = SourceFile(url=self.where(name), bytes=len(data), sha256=sha256)
        return data

    def _invalid(self, name: str, wanted: object, found: object) -> ShardInvalid:
        return ShardInvalid(
            self.where(name),
            wanted=wanted,
            found=found,
            remedy="copy the file again, or extract the hidden states again",
        )


def _is_plain(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and value.ndim == 1


def _kind(value: object) -> str:
    """What a value is, in few words."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
