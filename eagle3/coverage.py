"""What a draft vocabulary covers: the share of supervised tokens that are among its own.

A token outside the draft's vocabulary can never be accepted, while every token inside makes the
draft's lm_head larger. So the share is told at several sizes, with the smallest size for each
usual share, and a size is suggested where the configured one is far off.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from eagle3.vocab import Mapping, by_preference, check_counts

_SMALLEST_POWER = 256
_PERMILLE = (900, 950, 990, 999)
# Below this share the vocabulary is too small; then the size for the next one is suggested.
_TOO_SMALL, _WANTED, _AMPLE = 0.95, 0.99, 0.999
# Kernels like round sizes, and nobody needs a closer one.
_ROUND = 256


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """The configured size among others.

    Attributes:
        size, share: tokens of the draft's vocabulary, and what they cover, 0 to 1.
        curve: (size, share) ascending: powers of two from 256, the configured size, the whole
            vocabulary, and the sizes of `smallest`.
        smallest: share -> the fewest tokens that cover so much.
        seen_once: tokens that occur exactly once.
        suggested: a size that fits better, where the configured one is far off.
    """

    size: int
    share: float
    curve: tuple[tuple[int, float], ...]
    smallest: dict[float, int]
    seen_once: int
    suggested: int | None

    def as_json(self) -> dict[str, Any]:
        """What `coverage.json` holds of it."""
        return {
            "curve": [list(point) for point in self.curve],
            "smallest": {str(share): size for share, size in self.smallest.items()},
            "seen_once": self.seen_once,
            "suggested_size": self.suggested,
        }


def coverage(counts: torch.Tensor, mapping: Mapping) -> float:
    """Share of the counted tokens, int64 [V], that the draft can propose, 0 to 1."""
    check_counts(counts)
    return float(counts[mapping.t2d].sum()) / max(float(counts.sum()), 1.0)


def coverage_by_size(
    counts: torch.Tensor, draft_vocab_size: int, required_ids: Iterable[int] = ()
) -> Coverage:
    """What the configured size and others cover, each as `build_mapping` would choose its tokens.

    Args:
        counts: supervised tokens by id, int64 [V], some above 0.
        draft_vocab_size: the configured size, from the number of required ids to V.
        required_ids: special and stop ids, which every size holds.

    Raises MappingInvalid for counts that are no counts.
    """
    required = sorted(set(required_ids))
    # covered[k]: occurrences of the k + 1 tokens that a vocabulary of that size takes.
    covered = counts[by_preference(counts, required)].cumsum(0)
    total, vocab_size, least = int(covered[-1]), int(counts.numel()), max(1, len(required))
    smallest = {
        permille / 1000: max(least, 1 + int((covered * 1000 < permille * total).sum()))
        for permille in _PERMILLE
    }
    powers = {2**k for k in range(vocab_size.bit_length()) if 2**k >= _SMALLEST_POWER}
    sizes = {*powers, draft_vocab_size, vocab_size, *smallest.values()}
    share = int(covered[draft_vocab_size - 1]) / max(total, 1)
    seen_once = int((counts == 1).sum())
    return Coverage(
        size=draft_vocab_size,
        share=share,
        curve=tuple(
            (size, int(covered[size - 1]) / max(total, 1))
            for size in sorted(sizes)
            if size >= least
        ),
        smallest=smallest,
        seen_once=seen_once,
        suggested=_suggested(
            draft_vocab_size, share, smallest, vocab_size, new_share=seen_once / max(total, 1)
        ),
    )


def _suggested(
    size: int, share: float, smallest: dict[float, int], vocab_size: int, *, new_share: float
) -> int | None:
    """A better size, or None.

    Args:
        new_share: tokens seen once over all, which is how often text of this kind brings a token
            that was not seen yet (Good and Turing). With few rows that is often, and what
            suffices for them would not suffice for others: then no smaller size is suggested.
    """
    if share < _TOO_SMALL:
        return _rounded(smallest[_WANTED], vocab_size)
    ample = _rounded(smallest[_AMPLE], vocab_size)
    if 2 * ample <= size and new_share <= 1 - _AMPLE:
        return ample
    return None


def _rounded(size: int, vocab_size: int) -> int:
    return min(-(-size // _ROUND) * _ROUND, vocab_size)


def advice(size: int, suggested: int | None) -> str:
    """The suggestion as the end of a sentence; empty where there is none."""
    if suggested is None:
        return ""
    much = f"{_WANTED:.0%}" if suggested > size else f"{_AMPLE:.1%}"
    return f"; vocab.draft_vocab_size {suggested} would cover {much}"


def show(found: Coverage, console: Console) -> None:
    """Print the curve as a table, with the configured size and the smallest ones marked."""
    table = Table(
        title="Supervised tokens inside the draft vocabulary",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("tokens", justify="right", no_wrap=True)
    table.add_column("coverage", justify="right", no_wrap=True)
    table.add_column("")
    # Where one size is the smallest for several shares, the last and largest stands.
    marks = {size: [f"the smallest for {share:.4g}"] for share, size in found.smallest.items()}
    for size, share in found.curve:
        chosen = size == found.size
        notes = ", ".join([*(["configured"] if chosen else []), *marks.get(size, [])])
        table.add_row(f"{size:,}", f"{share:.2%}", notes, style="bold" if chosen else None)
    console.print(table)
