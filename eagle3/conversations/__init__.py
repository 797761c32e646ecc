"""Conversations: a row of data to messages, messages to token rows with loss masks.

`reading` reads files, `messages` tells their form and normalises them, `rendering` finds where
answers begin, `split` keeps prompts away from training, `convert` puts these together for one
row, `pool` for all, `output` and `records` are what lies in a prepare artefact, `tally` counts.
"""

from eagle3.conversations.convert import Converter, FormOfFile, HeldOut, Kept
from eagle3.conversations.messages import Conversation, Message, Rejected, visible
from eagle3.conversations.output import Preparation
from eagle3.conversations.pool import outcomes, parallel_outcomes
from eagle3.conversations.reading import RawRow, Source, open_sources
from eagle3.conversations.records import (
    HELDOUT_NAME,
    HeldoutPrompt,
    RejectedRow,
    RowRecord,
    read_heldout,
    read_rejected,
    read_row_records,
)
from eagle3.conversations.rendering import Renderer
from eagle3.conversations.row_builder import RowBuilder
from eagle3.conversations.shown import Stretch, bracketed, stretches
from eagle3.conversations.tally import rejected_in_words

__all__ = [
    "HELDOUT_NAME",
    "Conversation",
    "Converter",
    "FormOfFile",
    "HeldOut",
    "HeldoutPrompt",
    "Kept",
    "Message",
    "Preparation",
    "RawRow",
    "Rejected",
    "RejectedRow",
    "Renderer",
    "RowBuilder",
    "RowRecord",
    "Source",
    "Stretch",
    "bracketed",
    "open_sources",
    "outcomes",
    "parallel_outcomes",
    "read_heldout",
    "read_rejected",
    "read_row_records",
    "rejected_in_words",
    "stretches",
    "visible",
]
