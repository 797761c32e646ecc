"""Counting rows out by reason, and choosing the held-out prompts: small state over all rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from eagle3.conversations.convert import HeldOut
from eagle3.conversations.messages import Rejected
from eagle3.conversations.records import HeldoutPrompt, RejectedRow
from eagle3.errors import ConversationsInvalid

# A duplicate or a prompt too many is left out, and yet nothing is wrong with it.
_NO_FAULTS = frozenset({"duplicate", "heldout_surplus"})
# Where no row is anything else, it is the file that is of another kind, and not its rows.
_NO_RECORDS = frozenset({"not_json", "not_an_object"})
_EXAMPLES = 3
_KEPT_ROWS = 50
_LONGEST_DETAIL = 500
_MOST_REASONS = 40
_REASONS_TOLD = 5


def rejected_in_words(rejected: Mapping[str, int]) -> str:
    """How many rows were rejected, and for which reasons the most."""
    counts = Counter(rejected)
    parts = [f"{count} {reason}" for reason, count in counts.most_common(_REASONS_TOLD)]
    if others := counts.total() - sum(count for _, count in counts.most_common(_REASONS_TOLD)):
        parts.append(f"{others} of other reasons")
    return f"{counts.total()} rejected" + (f" ({', '.join(parts)})" if parts else "")


class Tally:
    """Counts of rows in and of rows rejected, by reason, with some of each.

    Attributes: rows: the first rejected rows of each reason, in order.
    """

    def __init__(self) -> None:
        self.rows_in = 0
        self.rejected: Counter[str] = Counter()
        self.rows: list[RejectedRow] = []
        self._examples: dict[str, list[str]] = {}

    @property
    def rows_kept(self) -> int:
        """rows_in = rows_kept + the sum of rejected, by construction."""
        return self.rows_in - self.rejected.total()

    def reject(self, rejected: Rejected, where: str, source: int = 0) -> None:
        """Count a row out. `where` is its file and line, `source` the number of the file."""
        reason = rejected.reason
        if reason not in self.rejected and len(self.rejected) >= _MOST_REASONS:
            reason = reason.partition(":")[0]
        self.rejected[reason] += 1
        detail = " ".join(rejected.detail.split())
        if self.rejected[reason] <= _EXAMPLES:
            told = f"{where} ({detail[:120]})" if detail else where
            self._examples.setdefault(reason, []).append(told)
        if self.rejected[reason] <= _KEPT_ROWS:
            line = int(where.rpartition(":")[2])
            self.rows.append(
                RejectedRow(
                    source=source,
                    line=line,
                    reason=reason,
                    detail=detail[:_LONGEST_DETAIL],
                    text=rejected.text,
                )
            )

    def lines(self) -> dict[str, list[str]]:
        """Reason -> `<number of the file>:<line>` of its first rows."""
        found: dict[str, list[str]] = {}
        for row in self.rows:
            places = found.setdefault(row.reason, [])
            if len(places) < _EXAMPLES:
                places.append(f"{row.source}:{row.line}")
        return found

    def told(self) -> str:
        """The reasons that are faults of rows, with counts and examples."""
        return ", ".join(
            f"{reason} {count} (as {'; '.join(self._examples[reason])})"
            for reason, count in self.rejected.most_common()
            if reason not in _NO_FAULTS
        )

    def check(self, max_share: float, rows: int) -> None:
        """Raises ConversationsInvalid when more than this share of all rows is rejected."""
        faults = sum(n for reason, n in self.rejected.items() if reason not in _NO_FAULTS)
        if faults <= max_share * rows:
            return
        no_records = sum(self.rejected[reason] for reason in _NO_RECORDS)
        raise ConversationsInvalid(
            "prepare.data",
            wanted=f"at most {max_share:.1%} of {rows} rows rejected",
            found=f"{faults} rejected: {self.told()}",
            remedy="write the data as one JSON object a line, or as Parquet"
            if no_records == self.rows_in
            else "correct these rows or the settings that reject them, "
            "or raise prepare.max_rejected_share",
        )


class HeldoutPrompts:
    """The held-out prompts to record: each text once, and at most `limit` of them.

    Where there are more, those with the smallest ids stay, which is a random choice and the
    same in every run; the order in the files does not matter to it.

    Attributes: offered: how many were offered, repetitions included.
    """

    def __init__(self, limit: int) -> None:
        self.offered = 0
        self._limit = limit
        self._prompts: dict[str, HeldoutPrompt] = {}

    def add(self, held: HeldOut, *, source_row: int) -> None:
        """Offer a prompt."""
        self.offered += 1
        self._prompts.setdefault(
            held.conversation,
            HeldoutPrompt(
                row=f"{source_row:09d}.0",
                conversation=held.conversation,
                messages=held.messages,
                tools=held.tools,
                input_ids=held.input_ids,
            ),
        )
        if len(self._prompts) >= 2 * self._limit + 100:
            self._drop()

    def chosen(self) -> list[HeldoutPrompt]:
        """The recorded prompts, by row."""
        self._drop()
        return sorted(self._prompts.values(), key=lambda prompt: prompt.row)

    def _drop(self) -> None:
        self._prompts = {name: self._prompts[name] for name in sorted(self._prompts)[: self._limit]}
