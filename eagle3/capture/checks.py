"""Nothing that an engine hands over is believed: each row's states, and the gate of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from eagle3.capture.protocols import Capture, CapturedRow
from eagle3.errors import CaptureInvalid

GATE_MAX_NATS = {torch.bfloat16: 0.05, torch.float32: 0.001}
"""Largest mean difference between recomputed and reported log-probabilities, by the engine's
type. Right states in bfloat16 gave 0.022 nats, right states in float32 1.4e-5, a wrong layer
about 4."""

GATE_MIN_RATIO = 20.0
"""How many times worse each other captured layer must be."""

GATE_MIN_TOKENS = 8
"""Shortest prompt for the gate; a mean over less says little."""

VOCAB_CHUNK = 8192
"""Rows of lm_head multiplied at once: keeps the gate's logits of a 163,840-token vocabulary
at 8192 * 4 bytes a position."""


def check_states(
    row: CapturedRow, ids: Sequence[int], *, num_layers: int, hidden_size: int
) -> str | None:
    """Look at one captured row before it is packed.

    Returns None when it is good, or the reason for which this one row is to be rejected and
    counted: `"non_finite"` or `"zero_state"`.

    Raises:
        CaptureInvalid: for what is never one row's bad luck: other token ids than were sent
            (a cached prefix left out, a file of another request), another number of layers or
            width, float16, or two layers with the same states.
    """
    states = row.hidden_states
    if row.token_ids.tolist() != list(ids):
        raise CaptureInvalid(
            "captured token_ids",
            wanted=f"the {len(ids)} ids that were sent",
            found=f"{len(row.token_ids)} ids, not the same",
            remedy="switch the engine's prefix caching off and use one directory per engine",
        )
    wanted_shape = (len(ids), num_layers, hidden_size)
    if tuple(states.shape) != wanted_shape:
        raise CaptureInvalid(
            "captured hidden_states",
            wanted=f"shape [tokens, layers, hidden] = {list(wanted_shape)}",
            found=list(states.shape),
            remedy="check extract.layer_ids and the verifier's config",
        )
    if states.dtype not in (torch.bfloat16, torch.float32):
        raise CaptureInvalid(
            "captured hidden_states",
            wanted="bfloat16 or float32 (float16 overflows on real models)",
            found=states.dtype,
            remedy="set extract.engine.dtype to bfloat16",
        )
    if not bool(torch.isfinite(states).all()):
        return "non_finite"
    if not bool(states.any(dim=-1).all()):
        return "zero_state"
    for first in range(num_layers):
        for second in range(first + 1, num_layers):
            if torch.equal(states[:, first], states[:, second]):
                raise CaptureInvalid(
                    "captured hidden_states",
                    wanted="different states in every layer",
                    found=f"the same in layers number {first} and {second}",
                    remedy="check extract.layer_ids for an id that the engine does not know",
                )
    return None


def as_stored(states: torch.Tensor) -> torch.Tensor | None:
    """The states in bfloat16, as shards hold them, or None where one is too large for it."""
    stored = states.to(torch.bfloat16)
    return stored if bool(torch.isfinite(stored).all()) else None


def next_token_logprobs(
    states: torch.Tensor,
    ids: torch.Tensor,
    *,
    norm_weight: torch.Tensor,
    lm_head: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """log_softmax(lm_head(rmsnorm(states)))[next id], in float32.

    Args:
        states: `[T, H]`, one layer's states, before the final norm.
        ids: `[T]` int64.
        norm_weight: `[H]`, the weight of the verifier's final RMSNorm.
        lm_head: `[V, H]`.
        eps: the epsilon of that norm.

    Returns:
        float32 `[T - 1]`, in nats. The vocabulary is walked in pieces of `VOCAB_CHUNK` rows.
    """
    hidden = states[:-1].float()
    scale = torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + eps)
    normed = hidden * scale * norm_weight.float()
    following = ids[1:]
    chosen = (normed * lm_head[following].float()).sum(dim=-1)
    total = torch.full_like(chosen, -math.inf)
    for start in range(0, lm_head.shape[0], VOCAB_CHUNK):
        logits = normed @ lm_head[start : start + VOCAB_CHUNK].float().T
        total = torch.logaddexp(total, logits.logsumexp(dim=-1))
    return chosen - total


class GateFigures(NamedTuple):
    """What the numeric gate measured, in nats per token."""

    num_tokens: int
    mean_difference: float
    max_difference: float
    other_layers: tuple[float, ...]
    """Mean difference that each other captured layer would give, in order of layer ids."""


def numeric_gate(
    capture: Capture,
    ids: Sequence[int],
    *,
    norm_weight: torch.Tensor,
    lm_head: torch.Tensor,
    eps: float,
) -> GateFigures:
    """Prove on a real prompt that the last captured state is the verifier's pre-norm output.

    Recomputes the engine's own prompt log-probabilities from the captured states and the three
    tensors that later stages use. The bar is numerical, since a wrong tensor can agree on 96 %
    of the most probable tokens: at most `GATE_MAX_NATS` on average, and each other captured
    layer at least `GATE_MIN_RATIO` times worse. The second part also refuses a verifier on which
    the first proves nothing because all its layers predict alike.

    Raises:
        CaptureInvalid: when the prompt is too short or either bar is missed.
    """
    if len(ids) < GATE_MIN_TOKENS:
        raise CaptureInvalid(
            "numeric gate",
            wanted=f"a prompt of at least {GATE_MIN_TOKENS} tokens",
            found=len(ids),
            remedy="give the stage longer rows",
        )
    (row,) = capture.capture([ids])
    reported = capture.prompt_logprobs(ids)
    differences = [
        (
            next_token_logprobs(
                row.hidden_states[:, layer],
                row.token_ids,
                norm_weight=norm_weight,
                lm_head=lm_head,
                eps=eps,
            )
            - reported
        ).abs()
        for layer in range(row.hidden_states.shape[1])
    ]
    means = [float(difference.mean()) for difference in differences]
    figures = GateFigures(len(ids), means[-1], float(differences[-1].max()), tuple(means[:-1]))
    _judge(figures, GATE_MAX_NATS.get(row.hidden_states.dtype, 0.0))
    return figures


def _judge(figures: GateFigures, max_nats: float) -> None:
    """Raise CaptureInvalid unless the figures pass; a NaN or an unknown type never passes."""
    if not figures.mean_difference < max_nats:
        raise CaptureInvalid(
            "numeric gate",
            wanted=f"log-probabilities within {max_nats} nats of the engine's own",
            found=f"{figures.mean_difference:.4f} nats on average",
            remedy="check the last layer id (num_hidden_layers, pre-norm) and that norm and"
            " lm_head belong to this verifier",
        )
    closest = min(figures.other_layers, default=math.inf)
    if not figures.mean_difference * GATE_MIN_RATIO < closest:
        raise CaptureInvalid(
            "numeric gate",
            wanted=f"every other layer to be {GATE_MIN_RATIO:.0f} times worse than the last",
            found=f"{figures.mean_difference:.4f} nats for the last, {closest:.4f} for another",
            remedy="check extract.layer_ids, and the gate's prompt",
        )
