"""Turns of one conversation as token rows."""

from __future__ import annotations

from collections.abc import Sequence


class RowBuilder:
    """Turns of one conversation as token rows.

    Turns share a row as long as the next prompt begins with exactly the ids so far; a new row
    starts where it does not, as when a template drops earlier reasoning. So every row is what
    the verifier would have seen.

    Args: max_tokens: longest row; None is no limit.
    """

    def __init__(self, max_tokens: int | None = None) -> None:
        self._max_tokens = max_tokens
        self._rows: list[tuple[list[int], list[int]]] = []

    def add_turn(self, prompt_ids: list[int], answer_ids: Sequence[int]) -> bool:
        """Add a prompt (the whole history) and its answer; only the answer is supervised.

        Returns False, and changes nothing, where the row would become too long.
        """
        total = len(prompt_ids) + len(answer_ids)
        if self._max_tokens is not None and total > self._max_tokens:
            return False
        ids, mask = self._rows[-1] if self._rows else ([], [])
        if not self._rows or prompt_ids[: len(ids)] != ids:
            ids, mask = [], []
            self._rows.append((ids, mask))
        new = prompt_ids[len(ids) :]
        mask += [0] * len(new)
        mask += [1] * len(answer_ids)
        ids += new
        ids += answer_ids
        return True

    def rows(self) -> list[tuple[list[int], list[int]]]:
        """(input_ids, loss_mask) of each row, in the order of the turns."""
        return self._rows
