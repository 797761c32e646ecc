"""Conversations that the verifier answers itself: what stands between two calls of its engine.

Of a recorded conversation only what was said to the model is kept; every answer is the
verifier's own, and the next prompt is rendered with it, as a server would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from eagle3.conversations import Message, Rejected, Renderer, RowBuilder
from eagle3.shards import TokenRow


class Chat:
    """One conversation being answered, turn by turn.

    Args:
        name: its source row, the part of a row's name before the piece.
        messages: the recorded conversation.
        tools: the tools that were offered.
        max_seq_len: longest row; a turn is asked only where its longest answer still fits.
        max_new_tokens: longest answer.

    Attributes:
        reason: why the conversation gave no row, or why it ended early; None while all is well.
    """

    def __init__(
        self,
        name: str,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None,
        *,
        max_seq_len: int,
        max_new_tokens: int,
    ) -> None:
        self.reason: str | None = None
        self.name = name
        self._turns = prompts_of(messages)
        self._tools = tools
        self._room = max_seq_len - max_new_tokens
        self._history: list[Message] = []
        self._prompt: list[int] = []
        self._builder = RowBuilder(max_seq_len)

    def next_prompt(self, renderer: Renderer) -> list[int] | None:
        """Token ids to answer next, or None when the conversation is over."""
        if not self._turns or self.reason:
            return None
        self._history.extend(self._turns.pop(0))
        try:
            self._prompt = renderer.prompt_ids(self._history, self._tools)
        except Rejected as rejected:
            self.reason = rejected.reason
            return None
        if len(self._prompt) > self._room:
            self.reason = "too_long"
            return None
        return self._prompt

    def take_answer(self, answer_ids: Sequence[int], text: str) -> None:
        """Take the verifier's answer to the last prompt.

        An answer that says nothing ends the conversation before this turn.

        Args:
            answer_ids: with its stop token, where it came.
            text: the same without special tokens, for the history.
        """
        if not text.strip():
            self.reason = "empty_answer"
            return
        added = self._builder.add_turn(self._prompt, answer_ids)
        assert added, "the prompt left room for the longest answer"
        self._history.append({"role": "assistant", "content": text})

    def rows(self) -> list[TokenRow]:
        """The token rows of all answered turns; only the answers are supervised."""
        return [
            TokenRow(
                row=f"{self.name}.{piece}",
                input_ids=torch.tensor(ids, dtype=torch.int64),
                loss_mask=torch.tensor(mask, dtype=torch.int64),
            )
            for piece, (ids, mask) in enumerate(self._builder.rows())
        ]


def prompts_of(messages: Sequence[Message]) -> list[list[Message]]:
    """What was said to the model before each of its answers, turn by turn.

    A tool's result belongs to a call that the verifier has not made: the turns end before it.
    """
    turns: list[list[Message]] = []
    said: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            break
        if message["role"] != "assistant":
            said.append(message)
        elif said:
            turns.append(said)
            said = []
    if any(message["role"] == "user" for message in said):
        turns.append(said)
    return turns


def answers_in(row: TokenRow, stop_ids: Sequence[int]) -> tuple[int, int]:
    """(answers, clipped answers) of a row: a clipped one was cut before its stop token.

    An answer is an unbroken run of supervised tokens; a prompt lies between any two.
    """
    following = torch.cat([row.loss_mask[1:], torch.zeros(1, dtype=torch.int64)])
    ends = (row.loss_mask == 1) & (following == 0)
    last = row.input_ids[ends]
    stopped = torch.isin(last, torch.tensor(stop_ids, dtype=torch.int64))
    return len(last), int((~stopped).sum())
