"""The contents of token rows, of prepare and of regenerate alike: each row, and all counts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping

import torch

from eagle3.artifact import Artifact
from eagle3.conversations import HELDOUT_NAME, read_heldout, read_row_records
from eagle3.manifest import FileEntry
from eagle3.shards import decode_rows, header_of, header_sha256_of
from eagle3.verification.contents import Check, Contents, Sources
from eagle3.vocab import load_counts, supervised_counts


class RowsContents(Contents):
    """Shards of token rows, the lines beside them, the held-out prompts and the token counts."""

    def __init__(
        self, artifact: Artifact, inputs: Mapping[str, Artifact], sources: Sources
    ) -> None:
        super().__init__(artifact, inputs, sources)
        self._lock = threading.Lock()
        self._names: dict[str, list[str]] = {}
        self._lines: dict[str, list[str]] = {}
        self._counts = torch.zeros(self.vocab_size(), dtype=torch.int64)
        self._longest = 0
        self._conversations = 0

    def check_object(self, entry: FileEntry) -> None:
        """A shard row by row, lines as records, anything else by its bytes."""
        if entry.samples:
            self._check_shard(entry)
        elif entry.path.startswith("rows-") and entry.path.endswith(".jsonl"):
            records = read_row_records(self.artifact, entry.path)
            with self._lock:
                self._lines[entry.path] = [record.row for record in records]
                self._conversations += sum(bool(record.messages) for record in records)
        else:
            super().check_object(entry)

    def whole(self) -> Iterable[Check]:
        """Counts, names and totals, counted again."""
        facts = self.artifact.manifest.facts
        yield self._check_names
        yield self._check_counts
        if self.artifact.named(HELDOUT_NAME) is not None:
            prompts = len(read_heldout(self.artifact))
            yield lambda: self.says("facts.heldout_prompts", prompts, facts.get("heldout_prompts"))
        if "longest_row" in facts:
            yield lambda: self.says("facts.longest_row", self._longest, facts["longest_row"])
        if "conversations" in facts and self._lines:
            told = facts["conversations"]
            yield lambda: self.says("facts.conversations", self._conversations, told)

    def _check_shard(self, entry: FileEntry) -> None:
        data = self.artifact.read(entry.path)
        # A prompt that nobody has answered yet has nothing supervised.
        unanswered = bool(self.artifact.manifest.facts.get("unanswered"))
        rows = decode_rows(data, entry.path, unanswered=unanswered)
        where = f"{self.artifact.store.url}/{entry.path}"
        identity = self.artifact.manifest.identity
        header_of(data, entry.path).refuse_other(identity, where, unnamed=True)
        lengths = [len(row.input_ids) for row in rows]
        found = f"{len(rows)} rows of {sum(lengths)} tokens"
        wanted = f"{entry.samples} rows of {entry.tokens} tokens"
        if found != wanted:
            raise self.differs(entry.path, f"{wanted}, as the manifest says", found)
        if entry.header_sha256 not in ("", header_sha256_of(data)):
            raise self.differs(entry.path, f"header {entry.header_sha256[:16]}", "another")
        highest = max(int(row.input_ids.max()) for row in rows)
        if highest >= self.vocab_size():
            raise self.differs(entry.path, f"token ids below {self.vocab_size()}", highest)
        most = self.artifact.manifest.max_seq_len
        if most is not None and max(lengths) > most:
            raise self.differs(entry.path, f"rows of at most {most} tokens", max(lengths))
        counts = supervised_counts(rows, self.vocab_size())
        with self._lock:
            self._counts += counts
            self._longest = max(self._longest, *lengths)
            self._names[entry.path] = [row.row for row in rows]

    def _check_names(self) -> None:
        """Every row has one name of its own, and its line beside it."""
        seen = Counter(name for names in self._names.values() for name in names)
        doubled = next((name for name, count in seen.items() if count > 1), None)
        if doubled is not None:
            raise self.differs("rows", "each row once", f"{seen[doubled]} rows {doubled}")
        for path, lines in self._lines.items():
            shard = f"{path.removesuffix('.jsonl')}.safetensors"
            if lines != self._names.get(shard):
                raise self.differs(path, f"a line for each row of {shard}, in order", "others")

    def _check_counts(self) -> None:
        told = load_counts(self.artifact, vocab_size=self.vocab_size())
        other = (told != self._counts).nonzero().flatten()
        if other.numel():
            token = int(other[0])
            raise self.differs(
                "token counts",
                f"{int(self._counts[token])} of token {token}, as counted again",
                f"{int(told[token])}, and {other.numel() - 1} more tokens differ",
            )


CONTENTS = {"prepare": RowsContents, "regenerate": RowsContents}
