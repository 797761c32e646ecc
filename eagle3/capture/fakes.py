"""Engines without an engine: deterministic, quick, for tests of the stories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from eagle3.capture.checks import next_token_logprobs
from eagle3.capture.protocols import CapturedRow, Completion, Sampling, Told, nobody


class FakeCapture:
    """A `Capture` without an engine: states are a fixed function of ids and layer ids.

    The state at a position is a random vector that belongs to the token and the layer, plus a
    tenth of the previous token's. `prompt_logprobs` follows from the last layer, the norm and
    lm_head as in a real verifier, so that the numeric gate passes with those tensors and fails
    with others.
    """

    def __init__(
        self,
        *,
        layer_ids: Sequence[int],
        norm_weight: torch.Tensor,
        lm_head: torch.Tensor,
        eps: float = 1e-5,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        vocab_size, hidden_size = lm_head.shape
        self._layer_ids = tuple(layer_ids)
        self._norm_weight = norm_weight
        self._lm_head = lm_head
        self._eps = eps
        self._dtype = dtype
        tables = [
            torch.randn(vocab_size, hidden_size, generator=torch.Generator().manual_seed(layer_id))
            for layer_id in layer_ids
        ]
        self._table = torch.stack(tables, dim=1)

    def capture(self, rows: Sequence[Sequence[int]]) -> Iterator[CapturedRow]:
        """See `Capture.capture`."""
        for ids in rows:
            token_ids = torch.tensor(ids, dtype=torch.int64)
            states = self._table[token_ids]
            states[1:] += 0.1 * self._table[token_ids[:-1]]
            yield CapturedRow(token_ids, states.to(self._dtype))

    def layer_ids(self) -> tuple[int, ...]:
        """See `Capture.layer_ids`."""
        return self._layer_ids

    def prompt_logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        """See `Capture.prompt_logprobs`."""
        (row,) = self.capture([ids])
        return next_token_logprobs(
            row.hidden_states[:, -1],
            row.token_ids,
            norm_weight=self._norm_weight,
            lm_head=self._lm_head,
            eps=self._eps,
        )

    def close(self) -> None:
        """Nothing to stop."""


class FakeGenerator:
    """A `Generator` without an engine: the next id is a fixed function of the prompt so far.

    About one answer in `1 / end_share` tokens meets `end_id` and stops; temperature, top_k and
    seed only change which fixed function it is.
    """

    def __init__(self, *, vocab_size: int, end_id: int, end_share: float = 0.05) -> None:
        self._vocab_size = vocab_size
        self._end_id = end_id
        self._end_share = end_share

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, told: Told = nobody
    ) -> list[Completion]:
        """See `Generator.generate`."""
        answers: list[Completion] = []
        for prompt in prompts:
            answers.append(self._answer(prompt, sampling))
            told(len(answers))
        return answers

    def _answer(self, prompt: Sequence[int], sampling: Sampling) -> Completion:
        seed = sampling.seed if sampling.temperature > 0 else 0
        state = torch.Generator().manual_seed(
            sum((place + 1) * token for place, token in enumerate(prompt)) + 1_000_003 * seed
        )
        answer: list[int] = []
        while len(answer) < sampling.max_tokens:
            draw = float(torch.rand((), generator=state))
            token = int(torch.randint(self._vocab_size, (), generator=state))
            if draw < self._end_share and not sampling.ignore_end:
                return Completion((*answer, self._end_id), "stop")
            answer.append(token)
        return Completion(tuple(answer), "length")

    def close(self) -> None:
        """Nothing to stop."""
