"""Which weights a verifier has, wherever they lie, told without reading all of them.

A fingerprint covers config.json, the weight index, every byte of the three tensors that later
stages use, and of each weight file its name, size, header and pieces of its tensors. Fine-tunes
often share all but the pieces: a LoRA merged into the attention leaves the three tensors alone.

Of each file at most 128 pieces of 16 KiB are read, each from the middle of a tensor of its own:
2 MiB and 128 requests a file, or 128 MiB for a checkpoint of 64 files. A file of up to 128
tensors has a piece of every one. Of more, each kind of tensor (keys alike but for their numbers)
has the same share, spread from its first to its last, so that the attention of a layer is seen
among thousands of experts. A tensor without elements has no piece. What this cannot see is a
change to a few tensors of a large file that are not among those, or to a part of a tensor outside
its middle.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from eagle3.verifier.files import VerifierFiles
from eagle3.verifier.text_model import CONFIG_NAME
from eagle3.verifier.weights import StoredTensor, Weights

# Told at the head of a fingerprint, so that one by another formula is not taken for other weights.
_FORMULA = "2"
_PIECES = 128
_PIECE_BYTES = 16 * 1024
_REQUESTS = 16
_NUMBER = re.compile(r"\d+")


def fingerprint_of(files: VerifierFiles, weights: Weights, whole: Iterable[StoredTensor]) -> str:
    """The formula's number, a colon, and the sha256, in hex, of what the module's docstring names.

    Args:
        whole: the tensors that every byte is read of.

    Raises VerifierInvalid for a weight file that is missing or broken.
    """
    digest = hashlib.sha256()
    for part in (files.store.read_bytes(CONFIG_NAME), weights.index):
        digest.update(len(part).to_bytes(8, "little") + part)
    for tensor in whole:
        digest.update(f"{tensor.key} {tensor.dtype} {tensor.shape}".encode())
        for chunk in weights.chunks(tensor):
            digest.update(chunk)
    with ThreadPoolExecutor(_REQUESTS) as pool:
        for found in pool.map(weights.file, sorted(set(weights.paths.values()))):
            digest.update(f"{found.path} {found.size} {len(found.header)} ".encode())
            digest.update(found.header)
            # A request for no bytes at all would be answered with the whole file.
            filled = [tensor for tensor in found.tensors if tensor.end > tensor.start]
            places = [_middle(tensor) for tensor in chosen(filled, _PIECES)]
            for piece in pool.map(lambda at, path=found.path: files.read_range(path, *at), places):
                digest.update(piece)
    return f"{_FORMULA}:{digest.hexdigest()}"


def by_this_formula(fingerprint: str) -> bool:
    """Whether a fingerprint can be compared with one that is taken now."""
    return fingerprint.startswith(f"{_FORMULA}:")


def chosen(tensors: Sequence[StoredTensor], most: int) -> list[StoredTensor]:
    """At most so many of a file's tensors, in their order: of each kind the same share."""
    kinds: dict[str, list[StoredTensor]] = {}
    for tensor in tensors:
        kinds.setdefault(_NUMBER.sub("*", tensor.key), []).append(tensor)
    share = max(1, most // max(1, len(kinds)))
    if len(tensors) <= most:
        share = len(tensors)
    spread = [one for kind in kinds.values() for one in _spread(kind, share)]
    return sorted(_spread(spread, most), key=lambda tensor: tensor.start)


def _spread(tensors: list[StoredTensor], most: int) -> list[StoredTensor]:
    """At most so many, at even distances, the first and the last among them."""
    if len(tensors) <= most:
        return tensors
    step = (len(tensors) - 1) / max(1, most - 1)
    return [tensors[round(i * step)] for i in range(most)]


def _middle(tensor: StoredTensor) -> tuple[int, int]:
    start = tensor.start + max(0, tensor.end - tensor.start - _PIECE_BYTES) // 2
    return start, min(start + _PIECE_BYTES, tensor.end)
