"""Which conversations are kept away from training: decided by the text of the first prompt alone.

Two conversations that begin with the same prompt, in whatever case or spacing, are always on the
same side, in this run and in every other. A prompt that first comes up in a later turn, or in
other words, is not found by this.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence

from eagle3.conversations.messages import Message

_HEX_DIGITS = 32


def conversation_id(messages: Sequence[Message]) -> str:
    """Name of a conversation: the first 128 bits, in hex, of its normalised prompt's sha256.

    Args: messages: normalised ones, at least one of them the user's.
    """
    prompt = next(message["content"] for message in messages if message["role"] == "user")
    # ASCII is its own normal form, and finding that out costs less than making it.
    normal = prompt if prompt.isascii() else unicodedata.normalize("NFKC", prompt)
    text = " ".join(normal.casefold().split())
    return hashlib.sha256(text.encode()).hexdigest()[:_HEX_DIGITS]


def is_heldout(conversation: str, share: float) -> bool:
    """Whether a conversation of that id belongs to the held-out share.

    A larger share holds out all that a smaller one does.
    """
    return int(conversation, 16) < share * (1 << 4 * _HEX_DIGITS)
