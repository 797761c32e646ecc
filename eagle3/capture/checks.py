"""Nothing that an engine hands over is believed: each row's states, and what they predict."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from eagle3.capture.protocols import CapturedRow
from eagle3.errors import CaptureInvalid

VOCAB_CHUNK = 8192
"""Rows of lm_head multiplied at once: keeps the logits of a 163,840-token vocabulary at
8192 * 4 bytes a position."""


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
    return logprobs_of(states[:-1], ids[1:], norm_weight=norm_weight, lm_head=lm_head, eps=eps)


def logprobs_of(
    states: torch.Tensor,
    following: torch.Tensor,
    *,
    norm_weight: torch.Tensor,
    lm_head: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """The same for any positions: states `[P, H]` and the id that follows each, int64 `[P]`.

    Returns float32 `[P]`.
    """
    hidden = states.float()
    scale = torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + eps)
    normed = hidden * scale * norm_weight.float()
    chosen = (normed * lm_head[following].float()).sum(dim=-1)
    total = torch.full_like(chosen, -math.inf)
    for start in range(0, lm_head.shape[0], VOCAB_CHUNK):
        logits = normed @ lm_head[start : start + VOCAB_CHUNK].float().T
        total = torch.logaddexp(total, logits.logsumexp(dim=-1))
    return chosen - total
