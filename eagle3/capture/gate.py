"""The numeric gate: once, before anything is kept, the captured states are proven.

Three things are proven on rows of the input. The last captured state is the one from which the
engine computes its own log-probabilities, with the three tensors that later stages use. It still
is when rounded as shards hold it. And the engine's own model names the layers that were asked
for: one list and one rule decide where it takes states, so that what is proven of the last id,
`num_hidden_layers`, holds for the others: each is the residual stream entering its layer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from eagle3.capture.checks import as_stored, check_states, logprobs_of
from eagle3.capture.protocols import Capture, CapturedRow
from eagle3.errors import CaptureInvalid

GATE_MAX_NATS = {torch.bfloat16: 0.05, torch.float32: 0.001}
"""Largest mean difference between recomputed and reported log-probabilities, by the type of the
states. Right states in bfloat16 gave 0.022 nats, right states in float32 1.4e-5, a wrong layer
about 4."""

GATE_ROW_FACTOR = 3.0
"""How much worse than that a single row may be: a short one's mean is a rough one."""

GATE_MIN_RATIO = 20.0
"""How many times worse each other captured layer must be."""

GATE_MIN_TOKENS = 8
"""Shortest prompt for the gate; a mean over less says little."""

GATE_ROWS = 4
"""Prompts of the gate, of different lengths."""

GATE_MAX_TOKENS = 2048
"""Of a longer row its beginning: the engine holds the logits of a whole prompt at once, with a
vocabulary of 163,840 that is 1.3 GB in float32."""

GATE_POSITIONS = 128
"""Positions judged in each prompt, evenly spaced: one walk over lm_head costs about
positions * layers * vocabulary * width * 2 operations."""


class GateFigures(NamedTuple):
    """What the numeric gate measured, in nats per token."""

    num_rows: int
    num_tokens: int
    """Positions judged, of all rows."""
    mean_difference: float
    max_difference: float
    worst_row: float
    """Mean difference of the row that has the largest."""
    stored_difference: float
    """Mean difference of the states rounded to bfloat16, as shards hold them."""
    other_layers: tuple[float, ...]
    """Mean difference that each other captured layer would give, in order of layer ids."""

    def as_measured(self) -> dict[str, float]:
        """The same as a manifest's `measured` has it."""
        return {
            "gate_rows": self.num_rows,
            "gate_tokens": self.num_tokens,
            "gate_mean_nats": self.mean_difference,
            "gate_max_nats": self.max_difference,
            "gate_worst_row_nats": self.worst_row,
            "gate_stored_nats": self.stored_difference,
            "gate_nearest_other_layer_nats": min(self.other_layers, default=math.inf),
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Head:
    """What turns a last state into logits: norm [H], lm_head [V, H], the norm's epsilon."""

    norm: torch.Tensor
    lm_head: torch.Tensor
    eps: float


def gate_prompts(units: Iterable[Sequence[torch.Tensor]]) -> list[list[int]]:
    """Up to `GATE_ROWS` prompts of different lengths, the longest and the shortest among them.

    Args:
        units: the rows (int64 [T]) of each unit. The prompts are of the first that has a row of
            `GATE_MIN_TOKENS`, whose shorter rows are passed over; later ones are not read.

    Raises CaptureInvalid where none has.
    """
    longest = 0
    for rows in units:
        by_length = {len(row): row for row in rows}
        lengths = sorted(length for length in by_length if length >= GATE_MIN_TOKENS)
        if lengths:
            chosen = _spread(len(lengths), GATE_ROWS)
            return [by_length[lengths[at]][:GATE_MAX_TOKENS].tolist() for at in chosen]
        longest = max([longest, *by_length])
    raise CaptureInvalid(
        "numeric gate",
        wanted=f"a row of at least {GATE_MIN_TOKENS} tokens",
        found=f"rows of at most {longest}",
        remedy="give the stage longer rows",
    )


def numeric_gate(
    capture: Capture, prompts: Sequence[Sequence[int]], layer_ids: Sequence[int], head: Head
) -> GateFigures:
    """Prove on real prompts, captured together, what this module says.

    The bar is numerical, since a wrong tensor can agree on 96 % of the most probable tokens: at
    most `GATE_MAX_NATS` on average, for the engine's states and for the stored ones, no row much
    worse, and each other captured layer at least `GATE_MIN_RATIO` times worse. The last part
    also refuses a verifier on which the first proves nothing, as all its layers predict alike.

    Args:
        prompts: see `gate_prompts`.
        layer_ids: those that were asked for, ascending.

    Raises CaptureInvalid where any of it is missed.
    """
    _judge_layer_ids(capture.layer_ids(), layer_ids)
    captured = list(capture.capture(prompts))
    for row, ids in zip(captured, prompts, strict=True):
        reason = check_states(
            row, ids, num_layers=len(layer_ids), hidden_size=head.lm_head.shape[1]
        )
        if reason:
            raise CaptureInvalid(
                "numeric gate",
                wanted="finite states without zeros",
                found=f"{reason} in a row of {len(ids)} tokens",
                remedy="look at the engine's dtype and kernels",
            )
    reported = [capture.prompt_logprobs(ids) for ids in prompts]
    figures = _measure(captured, reported, head)
    _judge(figures, captured[0].hidden_states.dtype)
    return figures


def _measure(
    captured: Sequence[CapturedRow], reported: Sequence[torch.Tensor], head: Head
) -> GateFigures:
    """All rows and layers in one walk over lm_head."""
    places = [torch.tensor(_spread(len(nats), GATE_POSITIONS)) for nats in reported]
    states = torch.cat([row.hidden_states[at] for row, at in zip(captured, places, strict=True)])
    following = torch.cat([row.token_ids[at + 1] for row, at in zip(captured, places, strict=True)])
    wanted = torch.cat([nats[at] for nats, at in zip(reported, places, strict=True)])
    stored = as_stored(states[:, -1])
    last = states[:, -1] if stored is None else stored
    layers = [*states.unbind(dim=1), last]
    found = logprobs_of(
        torch.cat(layers),
        following.repeat(len(layers)),
        norm_weight=head.norm,
        lm_head=head.lm_head,
        eps=head.eps,
    )
    differences = (found.reshape(len(layers), -1) - wanted).abs()
    *others, mean, stored_mean = differences.mean(dim=1).tolist()
    ends = list(itertools.accumulate(len(at) for at in places))
    rows = [differences[-2][start:end] for start, end in zip([0, *ends], ends, strict=False)]
    return GateFigures(
        num_rows=len(captured),
        num_tokens=len(wanted),
        mean_difference=mean,
        max_difference=float(differences[-2].max()),
        worst_row=max(float(row.mean()) for row in rows),
        stored_difference=math.inf if stored is None else stored_mean,
        other_layers=tuple(others),
    )


def _judge_layer_ids(named: Sequence[int], asked: Sequence[int]) -> None:
    if list(named) != list(asked):
        raise CaptureInvalid(
            "captured layer ids",
            wanted=list(asked),
            found=f"{list(named)}, by the engine's own model",
            remedy="use the vLLM that this version was made for",
        )


def _judge(figures: GateFigures, dtype: torch.dtype) -> None:
    """Raise CaptureInvalid unless the figures pass; a NaN or an unknown type never passes."""
    bar = GATE_MAX_NATS.get(dtype, 0.0)
    stored_bar = GATE_MAX_NATS[torch.bfloat16]
    bars = (
        (figures.mean_difference, bar, "on average"),
        (figures.worst_row, GATE_ROW_FACTOR * bar, "on average in one row"),
        (figures.stored_difference, stored_bar, "on average, when rounded to bfloat16"),
    )
    for found, most, where in bars:
        if not found < most:
            raise CaptureInvalid(
                "numeric gate",
                wanted=f"log-probabilities within {most:g} nats of the engine's own",
                found=f"{found:.4f} nats {where}",
                remedy="check the last layer id (num_hidden_layers, pre-norm) and that norm and"
                " lm_head belong to this verifier",
            )
    closest = min(figures.other_layers, default=math.inf)
    worst = max(figures.mean_difference, figures.stored_difference)
    if not worst * GATE_MIN_RATIO < closest:
        raise CaptureInvalid(
            "numeric gate",
            wanted=f"every other layer to be {GATE_MIN_RATIO:.0f} times worse than the last",
            found=f"{worst:.4f} nats for the last, {closest:.4f} for another",
            remedy="check extract.layer_ids, and the gate's prompts",
        )


def _spread(length: int, most: int) -> list[int]:
    """Up to `most` places of `length`, evenly spaced, the first and the last among them."""
    if length <= most:
        return list(range(length))
    return [at * (length - 1) // (most - 1) for at in range(most)]
