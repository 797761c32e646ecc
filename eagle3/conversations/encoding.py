"""Text to ids, piece by piece: between special tokens, many at once, none of them twice.

Every turn of a conversation is rendered with its whole history, so that encoding each render from
its start costs the square of the length. A special token cuts a text in two that do not influence
each other, in nearly every tokenizer. Where that is proven, pieces are encoded by themselves, and
what comes after the last known answer is all that is looked at. Tokenizers in Python may cut a text
by its length too, counted from its start: long texts of theirs are encoded whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase

# What may stand beside a special token. Tokenizers differ in what they do to the start of a text:
# a space added, spaces swallowed, a line break merged, a mark composed with the letter before it.
_SUFFIXES = ("a b", " a", "  a", "\n", "\n\n a", "\t", "1", "\u0301a", "é", "<a>", "[x]")
_PREFIXES = ("a b", "a ", "a  ", "a\n", "a \n\n", "\t", "1", "é", "</a>", "[x]", "日")
_MOST_REMEMBERED = 4096
# Those that wrap tiktoken (Kimi's, the first of Llama 3) cut a text every 400,000 characters, and
# every 25,000 of one run with or without white space, since it fails or crawls on more. Below half
# of either nothing is cut.
_LONG_TEXT = 200_000
_LONG_RUN = re.compile(r"\S{12500}|\s{12500}")


class Encoder:
    """Encodes texts as a tokenizer does, special tokens included and none added.

    Args:
        tokenizer: any, slow ones too.
        cut_ids: tokens at which a text may be cut, as far as that is proven.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, cut_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        added = [token.content for token in tokenizer.added_tokens_decoder.values()]
        found = {i: text for i in cut_ids if (text := self._provably_cut(i, added)) is not None}
        self._cuts = found
        self._cut_ids = {text: i for i, text in found.items()}
        texts = sorted(self._cut_ids, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None
        self._batches = self._find_batches()
        self._pieces: dict[str, list[int]] = {}
        self._text = ""
        self._ids: list[int] = []

    def learn(self, texts: Iterable[str]) -> None:
        """Encode the pieces of texts that will be asked for, all at once; forget earlier ones."""
        self._pieces = {}
        if self._cut is None:
            return
        found = dict.fromkeys(piece for text in texts for piece in self._cut.split(text)[::2])
        found.pop("", None)
        if found:
            self._pieces = dict(zip(found, self._encode_all(list(found)), strict=True))

    def ids(self, text: str) -> list[int]:
        """The ids of a text, equal to those of encoding it whole."""
        if not self.is_piecewise(text):
            return self._encode(text)
        if self._text and text.startswith(self._text):
            return [*self._ids, *self.pieces(text[len(self._text) :])]
        return self.pieces(text)

    def is_piecewise(self, text: str) -> bool:
        """Whether a text's length lets it be encoded in pieces; `split` and `pieces` do not ask."""
        if self._tokenizer.is_fast:
            return True
        return len(text) <= _LONG_TEXT and _LONG_RUN.search(text) is None

    def know(self, text: str, start: int, ids: list[int]) -> None:
        """Learn the ids of a text's beginning, for texts that continue it.

        Args:
            start: where the answer begins in the text.
            ids: of the text to the end of the answer; the last of them is its stop token.
        """
        end = self.end_of(text, ids[-1], start)
        if end is not None:
            self._text, self._ids = text[:end], ids

    def end_of(self, text: str, token_id: int, start: int) -> int | None:
        """Where a token ends that is first met after `start`, if a text may be cut there."""
        token = self._cuts.get(token_id)
        at = text.find(token, start) if token is not None else -1
        return None if token is None or at < 0 else at + len(token)

    def split(self, text: str, start: int) -> tuple[list[int], list[int]] | None:
        """(ids to `start`, ids from there) of a text, both of a text that begins at a cut.

        None where the ids of the text to `start` alone are others.
        """
        parts = self._parts(text[:start])
        last = parts[-1]
        ends = self._piece(last) if last else []
        before = [*self._ids_of(parts[:-1]), *ends]
        rest = self.pieces(text[start - len(last) :])
        if rest[: len(ends)] != ends:
            return None
        return before, rest[len(ends) :]

    def pieces(self, text: str) -> list[int]:
        """The ids of a text that begins where another was cut."""
        return self._ids_of(self._parts(text))

    def _parts(self, text: str) -> list[str]:
        """Pieces, and between them tokens at which the text may be cut."""
        return self._cut.split(text) if self._cut is not None else [text]

    def _ids_of(self, parts: list[str]) -> list[int]:
        ids: list[int] = []
        for at, piece in enumerate(parts):
            if at % 2:
                ids.append(self._cut_ids[piece])
            elif piece:
                known = self._pieces.get(piece)
                ids += self._piece(piece) if known is None else known
        return ids

    def _piece(self, piece: str) -> list[int]:
        ids = self._pieces.get(piece)
        if ids is None:
            ids = self._encode(piece)
            if len(self._pieces) < _MOST_REMEMBERED:
                self._pieces[piece] = ids
        return ids

    def _encode(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        assert isinstance(ids, list)
        return ids

    def _encode_all(self, texts: list[str]) -> list[list[int]]:
        # One in Python gains nothing by a batch, and may have an `encode` of its own alone.
        if self._batches is None:
            return [self._encode(text) for text in texts]
        return [found.ids for found in self._batches(texts, add_special_tokens=False)]

    def _find_batches(self) -> Any:
        """The library's call that leaves offsets out, where it gives what `encode` gives."""
        if not self._tokenizer.is_fast:
            return None
        # Asking for one text also turns padding and truncation off, which files may bring.
        wanted = [self._encode(text) for text in (*_PREFIXES, *_SUFFIXES)]
        batches = self._tokenizer.backend_tokenizer.encode_batch_fast
        found = [one.ids for one in batches([*_PREFIXES, *_SUFFIXES], add_special_tokens=False)]
        return batches if found == wanted else None

    def _provably_cut(self, token_id: int, added: list[str]) -> str | None:
        """The token's text when whatever stands beside it is encoded as if it stood alone."""
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(token, str) or any(_overlap(token, other) for other in added):
            return None
        for prefix in _PREFIXES:
            before = self._encode(f"{prefix}{token}")
            if before != [*self._encode(prefix), token_id]:
                return None
        for suffix in (*_SUFFIXES, token):
            whole = self._encode(f"a b{token}{suffix}")
            if whole != [*self._encode(f"a b{token}"), *self._encode(suffix)]:
                return None
        return token


def _overlap(token: str, other: str) -> bool:
    """Whether a text can hold both so that they share characters."""
    if token == other:
        return False
    if token in other or other in token:
        return True
    shared = range(1, min(len(token), len(other)))
    return any(token.endswith(other[:n]) or other.endswith(token[:n]) for n in shared)
