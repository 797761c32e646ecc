"""The JSON lines beside the token shards: the messages that a later stage may need again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from eagle3.artifact import Artifact
from eagle3.conversations.messages import Message

HELDOUT_NAME = "heldout.jsonl"
REJECTED_NAME = "rejected.jsonl"


class RowRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Line i of `rows-N.jsonl` belongs to row i of `rows-N.safetensors`.

    Attributes:
        row: the row's name.
        conversation: the id that its first prompt gives it.
        source: which of the manifest's sources it was read from.
        messages: the whole conversation, in the line of its first row only; later rows of the
            same conversation have none, so that nothing meets a conversation twice.
        tools: the tools that were offered.
    """

    row: str
    conversation: str
    source: int
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


class HeldoutPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `heldout.jsonl`: a prompt that no training row begins with.

    Attributes:
        messages: up to the first answer, without it.
        input_ids: the same, rendered with the generation prompt.
    """

    row: str
    conversation: str
    messages: list[Message]
    input_ids: list[int]
    tools: list[dict[str, Any]] | None = None


class RejectedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `rejected.jsonl`: a row that was rejected, one of the first so many of its reason.

    Attributes:
        source: which of the manifest's sources it was read from.
        line: its line there, or its record in a Parquet file, counted from 1.
        detail: what was found.
        text: the beginning of the row.
    """

    source: int
    line: int
    reason: str
    detail: str
    text: str


def encode_lines(records: Iterable[msgspec.Struct]) -> bytes:
    """One JSON object a line; none give no bytes."""
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)


def read_row_records(prepared: Artifact, path: str) -> list[RowRecord]:
    """The lines beside a token shard. Raises ManifestInvalid for what prepare did not write."""
    return prepared.read_lines(path, RowRecord)


def read_rejected(prepared: Artifact) -> list[RejectedRow]:
    """Rejected rows of a prepare artefact, some of each reason. Raises ManifestInvalid."""
    if prepared.named(REJECTED_NAME) is None:
        return []
    return prepared.read_lines(REJECTED_NAME, RejectedRow)


def read_heldout(prepared: Artifact) -> list[HeldoutPrompt]:
    """The held-out prompts of a prepare artefact. Raises ManifestInvalid."""
    return prepared.read_lines(HELDOUT_NAME, HeldoutPrompt)
