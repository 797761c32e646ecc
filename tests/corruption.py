"""One thing damaged at random inside the committed artefacts of a run, and put back again."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eagle3.manifest import MANIFEST_NAME
from eagle3.stages import ARTIFACT_KINDS


@dataclass(frozen=True, kw_only=True)
class Damage:
    """What was done.

    Attributes:
        kind: flip, truncate, swap, delete, rename or duplicate.
        paths: the objects that were touched, below the run.
        gate_claims: whether the gate says of itself that it finds this (docs/contract.md).
    """

    kind: str
    paths: tuple[Path, ...]
    gate_claims: bool

    @property
    def artifacts(self) -> set[str]:
        """The artefacts that they belong to, by the name of their folders."""
        return {path.parts[0] for path in self.paths}

    def __str__(self) -> str:
        return f"{self.kind} {' and '.join(map(str, self.paths))}"


class Breaker:
    """Damages one thing of a run on disk at a time; `mend` puts everything back.

    Files are replaced and never written in place, so the run may be made of hard links.
    """

    def __init__(self, run: Path, seed: int) -> None:
        self._run = run
        self._draw = random.Random(seed)
        self._kept: dict[Path, bytes] = {}
        self._made: list[Path] = []
        committed = [run / kind for kind in ARTIFACT_KINDS if (run / kind / MANIFEST_NAME).exists()]
        self._files = sorted(p for folder in committed for p in folder.rglob("*") if p.is_file())

    def damage(self) -> Damage:
        """Do one thing at random."""
        ways = (self._flip, self._truncate, self._swap, self._delete, self._rename, self._duplicate)
        way: Callable[[], tuple[tuple[Path, ...], bool]] = self._draw.choice(ways)
        touched, claimed = way()
        return Damage(
            kind=way.__name__.removeprefix("_"),
            paths=tuple(path.relative_to(self._run) for path in touched),
            gate_claims=claimed or any(path.name == MANIFEST_NAME for path in touched),
        )

    def mend(self) -> None:
        """Put everything back as it was."""
        for path in self._made:
            path.unlink()
        for path, data in self._kept.items():
            self._replace(path, data)
        self._kept, self._made = {}, []

    def _flip(self) -> tuple[tuple[Path, ...], bool]:
        path = self._draw.choice(self._files)
        data = bytearray(self._keep(path))
        bit = self._draw.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        self._replace(path, bytes(data))
        return (path,), False

    def _truncate(self) -> tuple[tuple[Path, ...], bool]:
        path = self._draw.choice(self._files)
        data = self._keep(path)
        self._replace(path, data[: self._draw.randrange(len(data))])
        return (path,), True

    def _swap(self) -> tuple[tuple[Path, ...], bool]:
        """Two objects that differ, of one artefact or of two."""
        while True:
            one, other = self._draw.sample(self._files, 2)
            if one.read_bytes() != other.read_bytes():
                break
        first, second = self._keep(one), self._keep(other)
        self._replace(one, second)
        self._replace(other, first)
        return (one, other), len(first) != len(second)

    def _delete(self) -> tuple[tuple[Path, ...], bool]:
        path = self._draw.choice(self._files)
        self._keep(path)
        path.unlink()
        return (path,), True

    def _rename(self) -> tuple[tuple[Path, ...], bool]:
        path = self._draw.choice(self._files)
        self._replace(self._new_name(path), self._keep(path))
        path.unlink()
        return (path,), True

    def _duplicate(self) -> tuple[tuple[Path, ...], bool]:
        path = self._draw.choice(self._files)
        copy = self._new_name(path)
        self._replace(copy, path.read_bytes())
        # The original is as it was: what the gate reads has not changed, a manifest included.
        return (copy,), False

    def _new_name(self, path: Path) -> Path:
        new = path.with_name(f"{self._draw.choice(('copy-', 'old-', '0'))}{path.name}")
        self._made.append(new)
        return new

    def _keep(self, path: Path) -> bytes:
        return self._kept.setdefault(path, path.read_bytes())

    @staticmethod
    def _replace(path: Path, data: bytes) -> None:
        path.unlink(missing_ok=True)
        path.write_bytes(data)
