"""Text to ids, without encoding the beginning of a growing conversation again and again.

Every turn of a conversation is rendered with its whole history, so that encoding each render
from its start costs the square of the length. A special token cuts a text in two that do not
influence each other, in nearly every tokenizer; where that is proven for a stop token, only what
comes after the last known answer is encoded.
"""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

# What may follow a stop token. Tokenizers differ in what they do to the start of a text: a space
# added, spaces swallowed, a line break merged, a mark composed with the letter before it.
_SUFFIXES = ("a b", " a", "  a", "\n", "\n\n a", "\t", "1", "\u0301a", "é", "<a>", "[x]")


class Encoder:
    """Encodes texts as a tokenizer does, special tokens included and none added.

    Args:
        tokenizer: any, slow ones too.
        stop_ids: tokens at which a text may be cut, as far as that is proven.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._cuts = {i: text for i in stop_ids if (text := self._provably_cut(i)) is not None}
        self._text = ""
        self._ids: list[int] = []

    def ids(self, text: str) -> list[int]:
        """The ids of a text, equal to those of encoding it whole."""
        if self._text and text.startswith(self._text):
            return [*self._ids, *self._encode(text[len(self._text) :])]
        return self._encode(text)

    def know(self, text: str, start: int, ids: list[int]) -> None:
        """Learn the ids of a text's beginning, for texts that continue it.

        Args:
            start: where the answer begins in the text.
            ids: of the text to the end of the answer; the last of them is its stop token.
        """
        token = self._cuts.get(ids[-1])
        end = text.find(token, start) if token is not None else -1
        if token is not None and end >= 0:
            self._text, self._ids = text[: end + len(token)], ids

    def _encode(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        assert isinstance(ids, list)
        return ids

    def _provably_cut(self, token_id: int) -> str | None:
        """The token's text when whatever follows it is encoded as if it stood alone."""
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        assert isinstance(token, str)
        before = self._encode(f"a b{token}")
        for suffix in (*_SUFFIXES, token):
            whole = self._encode(f"a b{token}{suffix}")
            if before[-1:] != [token_id] or whole != [*before, *self._encode(suffix)]:
                return None
        return token
