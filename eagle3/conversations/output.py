"""What prepare writes: shards of token rows, the lines beside them, prompts, token counts."""

from __future__ import annotations

from array import array

import torch

from eagle3 import artifact as artifacts
from eagle3.config import PrepareConfig
from eagle3.conversations.convert import HeldOut, Kept
from eagle3.conversations.messages import Rejected
from eagle3.conversations.records import (
    HELDOUT_NAME,
    REJECTED_NAME,
    RowRecord,
    encode_lines,
)
from eagle3.conversations.seen import Seen
from eagle3.conversations.tally import HeldoutPrompts, Tally
from eagle3.errors import ConversationsInvalid
from eagle3.manifest import FileEntry, Manifest, totals
from eagle3.shards import TokenRow, encode_rows
from eagle3.store import Store
from eagle3.vocab import COUNTS_NAME, encode_counts, supervised_counts


class RowWriter:
    """Token rows to shards of `shard_rows` rows each, with their lines; one shard is in memory.

    Attributes:
        files: entries of what has been written.
        longest_row: in tokens.
        counts: int64 [V], supervised tokens of all rows by token id.
    """

    def __init__(self, store: Store, *, shard_rows: int, vocab_size: int) -> None:
        self.files: list[FileEntry] = []
        self.longest_row = 0
        self.counts = torch.zeros(vocab_size, dtype=torch.int64)
        self._store = store
        self._shard_rows = shard_rows
        self._shards = 0
        self._rows: list[TokenRow] = []
        self._records: list[RowRecord] = []

    def add(self, kept: Kept, *, source_row: int, source: int) -> None:
        """Append the token rows of one conversation, named `<source_row>.<piece>`."""
        for piece, (ids, mask) in enumerate(kept.rows):
            name = f"{source_row:09d}.{piece}"
            row = TokenRow(row=name, input_ids=_tensor(ids), loss_mask=_tensor(mask))
            self._rows.append(row)
            self._records.append(
                RowRecord(
                    row=name,
                    conversation=kept.conversation,
                    source=source,
                    messages=[] if piece else kept.messages,
                    tools=None if piece else kept.tools,
                )
            )
            self.longest_row = max(self.longest_row, len(ids))
            if len(self._rows) == self._shard_rows:
                self._flush()

    def close(self) -> None:
        """Write the last shard and the token counts."""
        if self._rows:
            self._flush()
        self.write(COUNTS_NAME, encode_counts(self.counts))

    def write(self, path: str, data: bytes, *, samples: int = 0, tokens: int = 0) -> None:
        """Create an object and enter it. Raises IdentityConflict where other bytes lie there."""
        entry = artifacts.put(self._store, path, data, samples=samples, tokens=tokens)
        self.files.append(entry)

    def _flush(self) -> None:
        name = f"rows-{self._shards:06d}"
        tokens = sum(len(row.input_ids) for row in self._rows)
        self.counts += supervised_counts(self._rows, len(self.counts))
        self.write(
            f"{name}.safetensors",
            encode_rows(self._rows, unanswered=True),
            samples=len(self._rows),
            tokens=tokens,
        )
        self.write(f"{name}.jsonl", encode_lines(self._records))
        self._shards += 1
        self._rows, self._records = [], []


def _tensor(numbers: list[int]) -> torch.Tensor:
    """int64 [T], in a third of the time that `torch.tensor` takes for a list."""
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)


class Preparation:
    """A prepare artefact in the making: takes one outcome per row and accounts for all of them.

    Args:
        store: the artefact's prefix.
        rows: how many rows will come.
        vocab_size: rows of lm_head.
    """

    def __init__(self, store: Store, config: PrepareConfig, *, rows: int, vocab_size: int) -> None:
        self._config = config
        self._rows = rows
        self._tally = Tally()
        self._heldout = HeldoutPrompts(config.max_heldout)
        self._writer = RowWriter(store, shard_rows=config.shard_rows, vocab_size=vocab_size)
        self._seen = Seen()
        self._facts = dict.fromkeys(
            ("conversations", "turns", "turns_too_long", "clipped", "rows_too_short"), 0
        )

    def take(self, outcome: Kept | HeldOut | Rejected, *, where: str, source: int) -> None:
        """Account for the next row.

        Args:
            where: its file and line, for an example.
            source: which of the sources it is from.

        Raises ConversationsInvalid as soon as too many rows are rejected.
        """
        source_row = self._tally.rows_in
        self._tally.rows_in += 1
        if isinstance(outcome, Rejected):
            self._tally.reject(outcome, where, source)
            self._tally.check(self._config.max_rejected_share, self._rows)
        elif not self._seen.add(outcome.digest):
            self._tally.reject(Rejected("duplicate"), where, source)
        else:
            self._add(outcome, source_row, source)

    def finish(self) -> Manifest:
        """Write what is left; returns the manifest as far as the rows decide it.

        Raises ConversationsInvalid when there is nothing to train on.
        """
        if not self._facts["conversations"]:
            reasons = self._tally.told()
            raise ConversationsInvalid(
                "prepare.data",
                wanted="at least one conversation to train on",
                found=f"none in {self._tally.rows_in} rows{reasons and ', rejected: ' + reasons}",
                remedy="correct these rows, or take a verifier whose template renders them"
                if reasons
                else "give more conversations, or hold out a smaller share",
            )
        prompts = self._heldout.chosen()
        if surplus := self._heldout.offered - len(prompts):
            self._tally.rejected["heldout_surplus"] = surplus
        self._writer.write(HELDOUT_NAME, encode_lines(prompts))
        if self._tally.rows:
            self._writer.write(REJECTED_NAME, encode_lines(self._tally.rows))
        self._writer.close()
        files = tuple(sorted(self._writer.files, key=lambda entry: entry.path))
        samples, tokens = totals(files)
        self._seen.close()
        return Manifest(
            artifact="prepare",
            identity="",
            files=files,
            rows_in=self._tally.rows_in,
            rows_kept=self._tally.rows_kept,
            rejected=dict(sorted(self._tally.rejected.items())),
            total_samples=samples,
            total_tokens=tokens,
            max_seq_len=self._config.max_seq_len,
            facts={
                **self._facts,
                "growth": round(tokens / self._facts["tokens_once"], 4),
                "heldout_prompts": len(prompts),
                "longest_row": self._writer.longest_row,
                "supervised_tokens": int(self._writer.counts.sum()),
                "rejected_lines": self._tally.lines(),
            },
        )

    def _add(self, outcome: Kept | HeldOut, source_row: int, source: int) -> None:
        if isinstance(outcome, HeldOut):
            self._heldout.add(outcome, source_row=source_row)
            return
        self._writer.add(outcome, source_row=source_row, source=source)
        self._facts["conversations"] += 1
        for name, count in outcome.counts.items():
            self._facts[name] = self._facts.get(name, 0) + count
