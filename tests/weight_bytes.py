"""How many bytes of a checkpoint's weights a verifier may read, told from the files alone."""

import json
from pathlib import Path

PIECE = 16 * 1024


def headers(folder: Path) -> dict[str, dict[str, int]]:
    """File -> tensor -> bytes, as its header says; the header's own are under the empty name."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            entries = json.loads(file.read(length))
        sizes = {key: entry["data_offsets"] for key, entry in entries.items() if key[:2] != "__"}
        found[path.name] = {"": 8 + length, **{key: e - s for key, (s, e) in sizes.items()}}
    return found


def three(folder: Path, keys: tuple[str, ...]) -> int:
    """Bytes of these tensors."""
    return sum(sizes.get(key, 0) for sizes in headers(folder).values() for key in keys)


def identity(folder: Path, keys: tuple[str, ...]) -> int:
    """Bytes that tell which weights they are: headers, these tensors, a piece of every tensor.

    Of files with at most 128 tensors: of larger ones only some have a piece.
    """
    found = headers(folder)
    assert all(len(sizes) <= 128 + 1 for sizes in found.values())
    pieces = sum(min(PIECE, n) for sizes in found.values() for key, n in sizes.items() if key)
    return sum(sizes[""] for sizes in found.values()) + three(folder, keys) + pieces
