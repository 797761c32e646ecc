"""What a story may ask of an engine, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


class CapturedRow(NamedTuple):
    """What the engine says about one prompt: `token_ids [T]` int64 as the engine saw them, and
    `hidden_states [T, L, H]` in the engine's dtype, L in ascending order of layer ids."""

    token_ids: torch.Tensor
    hidden_states: torch.Tensor


class Capture(Protocol):
    """An engine that shows hidden states."""

    def capture(self, rows: Sequence[Sequence[int]]) -> Iterator[CapturedRow]:
        """Run the rows as one unit of work and yield one `CapturedRow` each, in order.

        The result is a function of the rows alone: a unit captured again, by another process,
        has the same bytes.
        """

    def layer_ids(self) -> tuple[int, ...]:
        """Where the engine's own model says that it takes states, ascending."""

    def prompt_logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        """The engine's own log-probability of each next prompt token: float32 `[T - 1]`, nats."""

    def close(self) -> None:
        """Stop the engine and give its memory back."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are drawn."""

    max_tokens: int
    """Longest answer, in tokens."""
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Draw from the k most probable tokens; 0 is all of them."""
    seed: int = 0
    """The engine's random state is set to this before the call: the same prompts, sampling and
    seed give the same answers."""
    ignore_end: bool = False
    """Go on to `max_tokens` whatever the verifier says."""
    num_top_logprobs: int = 0
    """Report the log-probabilities of so many most probable tokens at each position."""


class Completion(NamedTuple):
    """One answer: its token ids (the end-of-turn token included when it came), why it ended
    (`"stop"` or `"length"`), and at each position, if asked for, `{token id: log-probability}`
    of the most probable tokens and of the chosen one.

    `accepted_histogram` is the engine's own count of this answer's verify steps with a draft, by
    how many draft tokens each accepted: entry j is the steps that accepted j. Empty without one.
    """

    token_ids: tuple[int, ...]
    finish_reason: str
    top_logprobs: tuple[dict[int, float], ...] = ()
    accepted_histogram: tuple[int, ...] = ()


class SpecCounters(NamedTuple):
    """What speculative decoding did since the engine started."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_pos: tuple[int, ...]

    def since(self, earlier: SpecCounters) -> SpecCounters:
        """The difference to an earlier reading of the same engine."""
        return SpecCounters(
            self.num_drafts - earlier.num_drafts,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted_tokens - earlier.num_accepted_tokens,
            tuple(
                now - then
                for now, then in zip(self.accepted_per_pos, earlier.accepted_per_pos, strict=True)
            ),
        )


Told = Callable[[int], None]
"""Hears how many of what was asked for are done by now."""


def nobody(count: int) -> None:
    """For `Told`, where nobody wants to hear it."""


class Generator(Protocol):
    """An engine that answers prompts."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, told: Told = nobody
    ) -> list[Completion]:
        """Answer the prompts as one unit of work; one `Completion` each, in order.

        `told` hears on the way how many are answered.
        """

    def close(self) -> None:
        """Stop the engine and give its memory back."""


class SpeculativeGenerator(Generator, Protocol):
    """An engine that answers prompts with the help of a draft."""

    def counters(self) -> SpecCounters:
        """What the draft's proposals came to since the engine started."""
