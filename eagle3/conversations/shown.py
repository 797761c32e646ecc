"""A token row as a person looks at it: its text in stretches, supervised or not, special or not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from eagle3.conversations.messages import visible
from eagle3.verifier.tokenizer import special_ids

_OPEN, _CLOSE = "[[", "]]"


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Neighbouring tokens of one kind.

    Attributes:
        text: what they spell, with nothing in it that a terminal would obey.
        supervised: whether the draft is trained on them.
        special: whether they are special tokens.
    """

    text: str
    supervised: bool
    special: bool


def stretches(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], mask: Sequence[int]
) -> list[Stretch]:
    """A row's text in stretches; together they hold every token."""
    special = special_ids(tokenizer)
    kinds = [(bool(one), token in special) for token, one in zip(ids, mask, strict=True)]
    found = []
    end = 0
    for (supervised, marked), run in itertools.groupby(kinds):
        start, end = end, end + len(list(run))
        text = visible(_spelt(tokenizer, ids, start, end))
        found.append(Stretch(text=text, supervised=supervised, special=marked))
    return found


def bracketed(parts: Sequence[Stretch]) -> str:
    """The same as plain text: `[[` and `]]` stand around what is supervised."""
    said = []
    for supervised, run in itertools.groupby(parts, key=lambda part: part.supervised):
        text = "".join(part.text for part in run)
        said.append(f"{_OPEN}{text}{_CLOSE}" if supervised else text)
    return "".join(said)


def _spelt(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], start: int, end: int) -> str:
    """What tokens spell where they stand: some tokenizers drop the space that begins a text."""
    before, whole = (_decoded(tokenizer, ids[:to]) for to in (start, end))
    # Where a character is cut between two tokens the beginnings differ.
    return whole[len(before) :] if whole.startswith(before) else _decoded(tokenizer, ids[start:end])


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))
