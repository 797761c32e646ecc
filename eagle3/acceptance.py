"""What an evaluation says: acceptance with intervals, speed, and whether the output changed.

Pure arithmetic over what the engines answered; no engine is started here. Words:

* a *draft* is one verify step of vLLM that had draft tokens to check;
* *acceptance length* is the tokens that such a step yields: its accepted draft tokens and the
  one that the verifier adds itself. The mean is 1 + accepted / drafts, over all steps;
* acceptance at position i is the share of drafts whose tokens 0 to i were all accepted.

Intervals are percentile bootstraps over prompts (Efron and Tibshirani 1993, section 13.3): steps
of one answer resemble each other, prompts do not. Two drafts measured on the same prompts are
compared under the same resamples, so that what the prompts share cancels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from eagle3.errors import AcceptanceInvalid

RESAMPLES = 4000
NGRAM = 4
_CONFIDENCE = 0.95
_RESAMPLE_CELLS = 2**22


class PromptResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine answered to one prompt.

    Attributes:
        prompt: its place among the held-out prompts, from 0.
        output_ids: the answer's token ids.
        drafts: verify steps that had a draft; 0 without a draft.
        accepted: accepted tokens at each position of the draft.
    """

    prompt: int
    output_ids: tuple[int, ...]
    drafts: int = 0
    accepted: tuple[int, ...] = ()


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """Prompts that one engine answered together, and the wall-clock seconds that it took.

    Attributes:
        host: the machine that it ran on; seconds of two machines make no ratio.
        attempt: the process that asked, since an evaluation may take several.
    """

    engine: str
    seconds: float
    host: str
    attempt: str
    results: tuple[PromptResult, ...]

    @property
    def key(self) -> tuple[int, ...]:
        """Its prompts: blocks of two engines with the same key timed the same work."""
        return tuple(result.prompt for result in self.results)

    @property
    def num_tokens(self) -> int:
        """Tokens that the engine generated."""
        return sum(len(result.output_ids) for result in self.results)


class DraftFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How one draft was accepted. `interval` is the 95 % interval of `mean_length`."""

    mean_length: float
    interval: tuple[float, float]
    per_position: tuple[float, ...]
    drafts: int
    accepted: int
    tokens: int
    repeated_4gram_share: float


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Trained minus untrained acceptance length on the same prompts, with its 95 % interval."""

    difference: float
    interval: tuple[float, float]


class SpeedFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Generated tokens per second on the same prompts with and without the draft.

    `interval` is the 95 % interval of `speedup`, over blocks; None where there is one block. All
    of it was timed on `host`, by so many processes, one after the other.
    """

    host: str
    attempts: int
    batch: int
    prompts: int
    with_draft: float
    without: float
    speedup: float
    interval: tuple[float, float] | None = None


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """Where an answer with the draft left the verifier's own.

    `gap`: log-probability of the verifier's token minus that of the other, in nats, both scored
    by the verifier without a draft behind the same tokens; None where one answer ended.
    """

    prompt: int
    position: int
    verifier_token: int | None
    draft_token: int | None
    gap: float | None = None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that `acceptance.json` holds but the list of prompts."""

    heldout_prompts: int
    max_new_tokens: int
    num_speculative_tokens: int
    dtype: str
    trained: DraftFigures
    untrained: DraftFigures | None
    comparison: Comparison | None
    speed: tuple[SpeedFigures, ...]
    lossless: bool
    lossless_prompts: int
    near_tie: float
    divergences: tuple[Divergence, ...]


def draft_figures(results: Sequence[PromptResult]) -> DraftFigures:
    """Acceptance over the answers of one draft.

    Raises AcceptanceInvalid when no step had a draft: the figure would be 1 for any model.
    """
    drafts, accepted = _counts(results)
    total = int(drafts.sum())
    if total == 0:
        raise AcceptanceInvalid(
            "evaluate: drafts",
            wanted="at least one verify step with draft tokens",
            found=f"none in {len(results)} answers",
            remedy="check that the engine was started with the draft and that answers are longer"
            " than one token",
        )
    positions = np.array([result.accepted for result in results if result.drafts], dtype=np.int64)
    return DraftFigures(
        mean_length=1 + float(accepted.sum()) / total,
        interval=_interval(_resampled_lengths(drafts, accepted)[0]),
        per_position=tuple(float(share) for share in positions.sum(axis=0) / total),
        drafts=total,
        accepted=int(accepted.sum()),
        tokens=sum(len(result.output_ids) for result in results),
        repeated_4gram_share=repeated_ngram_share([result.output_ids for result in results]),
    )


def compare(trained: Sequence[PromptResult], untrained: Sequence[PromptResult]) -> Comparison:
    """The paired difference of two drafts. Raises AcceptanceInvalid for different prompts."""
    _same_prompts(trained, untrained)
    ours, theirs = _counts(trained), _counts(untrained)
    first, second = _resampled_lengths(*ours, *theirs)
    return Comparison(
        difference=_mean_length(*ours) - _mean_length(*theirs),
        interval=_interval(first - second),
    )


def repeated_ngram_share(answers: Sequence[Sequence[int]], n: int = NGRAM) -> float:
    """Share of n-grams that stood earlier in the same answer, over all answers; 0 without any.

    Repetition is easy to draft, so a verifier that loops makes any draft look good.
    """
    repeated = total = 0
    for ids in answers:
        grams = [tuple(ids[start : start + n]) for start in range(len(ids) - n + 1)]
        repeated += len(grams) - len(set(grams))
        total += len(grams)
    return repeated / total if total else 0.0


def speed_figures(batch: int, drafted: Sequence[Block], plain: Sequence[Block]) -> SpeedFigures:
    """Tokens per second over the blocks that both engines answered.

    Args:
        batch: prompts answered together, for the record.

    Raises AcceptanceInvalid when there is no such block, and for times of several machines.
    """
    ours = {block.key: block for block in drafted}
    pairs = [(ours[block.key], block) for block in plain if block.key in ours]
    if not pairs:
        raise AcceptanceInvalid(
            f"evaluate: speed at batch {batch}",
            wanted="a block of prompts answered with and without the draft",
            found="none",
            remedy="delete work/evaluate in the store and run evaluate again",
        )
    host = _one_host(batch, pairs)
    tokens = np.array([[block.num_tokens for block in pair] for pair in pairs], dtype=np.float64)
    seconds = np.array([[block.seconds for block in pair] for pair in pairs], dtype=np.float64)
    rates = tokens.sum(axis=0) / seconds.sum(axis=0)
    interval = None
    if len(pairs) > 1:
        weights = _resamples(len(pairs))
        resampled = (weights @ tokens) / (weights @ seconds)
        interval = _interval(resampled[:, 0] / resampled[:, 1])
    return SpeedFigures(
        host=host,
        attempts=len({block.attempt for pair in pairs for block in pair}),
        batch=batch,
        prompts=sum(len(block.results) for _, block in pairs),
        with_draft=float(rates[0]),
        without=float(rates[1]),
        speedup=float(rates[0] / rates[1]),
        interval=interval,
    )


def first_divergence(drafted: PromptResult, plain: PromptResult) -> Divergence | None:
    """Where two answers to one prompt part, or None where they are equal token for token."""
    ours, theirs = drafted.output_ids, plain.output_ids
    if ours == theirs:
        return None
    shared = min(len(ours), len(theirs))
    position = next((at for at in range(shared) if ours[at] != theirs[at]), shared)
    return Divergence(
        prompt=plain.prompt,
        position=position,
        verifier_token=theirs[position] if position < len(theirs) else None,
        draft_token=ours[position] if position < len(ours) else None,
    )


def divergences(
    drafted: Sequence[PromptResult], plain: Sequence[PromptResult]
) -> tuple[Divergence, ...]:
    """The first divergence of every answer that has one. Raises for different prompts."""
    _same_prompts(drafted, plain)
    found = (first_divergence(ours, theirs) for ours, theirs in zip(drafted, plain, strict=True))
    return tuple(divergence for divergence in found if divergence is not None)


def changed_outputs(
    found: Sequence[Divergence], *, dtype: str, near_tie: float
) -> list[Divergence]:
    """Those divergences that are no near tie: with none of them the output is lossless.

    Speculative decoding must give the verifier's own greedy output. In float32 exactly. In
    bfloat16 verifying several tokens at once rounds differently from one at a time, so two tokens
    of nearly the same probability may change places: a divergence is allowed where their
    log-probabilities differ by less than `near_tie` nats.
    """
    if dtype != "bfloat16":
        return list(found)
    return [item for item in found if item.gap is None or abs(item.gap) >= near_tie]


def refuse_changed_output(
    found: Sequence[Divergence], *, dtype: str, near_tie: float, compared: int
) -> None:
    """Raises AcceptanceInvalid naming the widest of the `changed_outputs`, where there are any."""
    found = changed_outputs(found, dtype=dtype, near_tie=near_tie)
    if not found:
        return
    worst = max(found, key=lambda item: float("inf") if item.gap is None else abs(item.gap))
    apart = "where one answer ended" if worst.gap is None else f"{abs(worst.gap):.3g} nats apart"
    allowed = f", but for near ties below {near_tie} nats" if dtype == "bfloat16" else ""
    raise AcceptanceInvalid(
        "evaluate: lossless",
        wanted=f"the verifier's own {compared} greedy answers in {dtype}{allowed}",
        found=f"{len(found)} that differ; in prompt {worst.prompt} at token {worst.position}"
        f" {worst.draft_token} instead of {worst.verifier_token}, {apart}",
        remedy="do not serve with this engine and draft; compare the engine's version and its"
        " attention settings with a known good one",
    )


def rounded(value: Any, digits: int = 6) -> Any:
    """The same nested plain value with floats cut to what is worth writing down."""
    if isinstance(value, float):
        return round(value, digits)
    if isinstance(value, Mapping):
        return {key: rounded(below, digits) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(below, digits) for below in value]
    return value


def _one_host(batch: int, pairs: Sequence[tuple[Block, Block]]) -> str:
    hosts = sorted({block.host for pair in pairs for block in pair})
    if len(hosts) > 1:
        raise AcceptanceInvalid(
            f"evaluate: speed at batch {batch}",
            wanted="times of one machine",
            found=f"of {', '.join(hosts)}",
            remedy="run evaluate again, which times them on one",
        )
    return hosts[0]


def _counts(results: Sequence[PromptResult]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    drafts = np.array([result.drafts for result in results], dtype=np.int64)
    accepted = np.array([sum(result.accepted) for result in results], dtype=np.int64)
    return drafts, accepted


def _mean_length(drafts: NDArray[np.int64], accepted: NDArray[np.int64]) -> float:
    return 1 + float(accepted.sum()) / max(float(drafts.sum()), 1.0)


def _resamples(count: int) -> NDArray[np.int64]:
    """[resamples, count]: how often each unit is drawn. The same for the same count."""
    size = max(200, min(RESAMPLES, _RESAMPLE_CELLS // count))
    return np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=size)


def _resampled_lengths(*counts: NDArray[np.int64]) -> list[NDArray[np.float64]]:
    """Mean acceptance lengths [resamples] of each (drafts, accepted) pair, drawn together."""
    weights = _resamples(len(counts[0]))
    pairs = zip(counts[::2], counts[1::2], strict=True)
    return [
        1 + (weights @ accepted) / np.maximum(weights @ drafts, 1) for drafts, accepted in pairs
    ]


def _interval(values: NDArray[np.float64]) -> tuple[float, float]:
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def _same_prompts(first: Sequence[PromptResult], second: Sequence[PromptResult]) -> None:
    ours, theirs = [r.prompt for r in first], [r.prompt for r in second]
    if ours != theirs:
        raise AcceptanceInvalid(
            "evaluate: prompts",
            wanted=f"the same {len(theirs)} prompts of both engines",
            found=f"{len(ours)}, {len(set(ours) ^ set(theirs))} of them not shared",
            remedy="delete work/evaluate in the store and run evaluate again",
        )
