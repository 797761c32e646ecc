"""Upstream's metric records: read, checked, and kept as the training's curve.

Upstream logs a record for every step and every validation. A loss that is not finite, an
accuracy outside [0, 1] or a sample that was left out of a batch would all train on to the end;
here each of them stops the run before the next checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from eagle3 import strict_json
from eagle3.errors import DraftInvalid, ShardInvalid

_ROUNDING = 1e-6


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of `metrics.jsonl`.

    Attributes:
        kind: `train` for a step, `validation` for a pass over the validation rows.
        step: optimizer steps taken when it was written, from 1 for the first.
        loss: summed over the training-time-test steps.
        losses: the loss of each training-time-test step.
        accuracy: share of supervised tokens, of those followed by one that the draft vocabulary
            holds, where this and every earlier step agree with the verifier's greedy token, for
            each step: an upper bound of serving's acceptance.
        conditional_accuracy: the same among those where every earlier step agreed.
        learning_rate: optimizer name -> rate (train only).
        seconds: since the training began, earlier processes included.
    """

    kind: str
    step: int
    epoch: int
    loss: float
    losses: tuple[float, ...]
    accuracy: tuple[float, ...]
    conditional_accuracy: tuple[float, ...]
    seconds: float
    learning_rate: dict[str, float] = {}


def read_record(record: Mapping[str, Any], *, step: int, seconds: float) -> CurvePoint | None:
    """The point that a record of the logger `speculators.metrics` stands for.

    Args:
        record: as upstream logs it; records that are no metrics (the configuration) give None.
        step: steps taken so far, for a validation record, which has none of its own.
        seconds: since the training began.

    Raises DraftInvalid for a value that no sound training has, ShardInvalid where upstream left
    a sample out of a batch.
    """
    if "train" in record:
        values = dict(record["train"])
        step = int(record["global_step"]) + 1
        rates = record["lr"]
        learning_rate = dict(rates) if isinstance(rates, Mapping) else {"lr": float(rates)}
    elif "val" in record:
        values = {name.removesuffix("_epoch"): value for name, value in record["val"].items()}
        learning_rate = {}
    else:
        return None
    where = f"step {step}"
    _check_whole(values, where, record)
    point = CurvePoint(
        kind="train" if "train" in record else "validation",
        step=step,
        epoch=int(record["epoch"]),
        loss=values["loss"],
        losses=_series(values, "loss"),
        accuracy=_series(values, "full_acc"),
        conditional_accuracy=_series(values, "cond_acc"),
        seconds=round(seconds, 3),
        learning_rate=learning_rate,
    )
    _check(point, where)
    return point


def encode_curve(points: list[CurvePoint]) -> bytes:
    """The curve as JSON lines."""
    return msgspec.json.Encoder().encode_lines(points)


def decode_curve(data: bytes) -> list[CurvePoint]:
    """Read what `encode_curve` wrote."""
    return strict_json.decode_lines(data, CurvePoint)


def _series(values: Mapping[str, float], name: str) -> tuple[float, ...]:
    """`name_0`, `name_1` and so on, for as many training-time-test steps as there are."""
    found: list[float] = []
    while f"{name}_{len(found)}" in values:
        found.append(values[f"{name}_{len(found)}"])
    return tuple(found)


def _check_whole(values: Mapping[str, float], where: str, record: Mapping[str, Any]) -> None:
    """No sample was left out of the batch, and there was a batch."""
    if values.get("error_records"):
        raise ShardInvalid(
            f"train: {where}",
            wanted="every sample of the batch",
            found=f"{values['error_records']:g} left out by the loader",
            remedy="verify the extract artefact, whose ids changed while it was read",
        )
    if "loss" not in values:
        raise DraftInvalid(
            f"train: {where}", wanted="a loss", found=record, remedy="give every process rows"
        )


def _check(point: CurvePoint, where: str) -> None:
    if not all(map(math.isfinite, (point.loss, *point.losses))):
        raise DraftInvalid(
            f"train: {point.kind} loss at {where}",
            wanted="a finite number",
            found=point.loss,
            remedy="lower train.learning_rate under a prefix of its own; "
            "checkpoints before this step are sound",
        )
    shares = (*point.accuracy, *point.conditional_accuracy)
    if not all(-_ROUNDING <= share <= 1 + _ROUNDING for share in shares):
        raise DraftInvalid(
            f"train: {point.kind} accuracy at {where}",
            wanted="shares between 0 and 1",
            found=list(shares),
            remedy="report it: a tensor was reduced twice",
        )
