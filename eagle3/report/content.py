"""The sentences, tables and captions of the report, as plain values for its template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eagle3.acceptance import Divergence, DraftFigures, Figures
from eagle3.report import plots
from eagle3.report.plots import CoveragePoint, LossPoint

_LOSS_ROWS = 12
_SHARES = (0.9, 0.95, 0.99, 0.999)

Table = dict[str, Any]


def headline(figures: Figures) -> str:
    """The one figure that the evaluation was made for."""
    return f"{figures.trained.mean_length:.2f} tokens per verifier step"


def lead(figures: Figures) -> str:
    """How it was measured, and whether training is what brought it."""
    measured = (
        f"Measured in vLLM on {figures.heldout_prompts:,} held-out prompts, greedy, up to "
        f"{figures.max_new_tokens} tokens each, {figures.num_speculative_tokens} drafted tokens "
        f"a step, {figures.dtype}. Without a draft a step yields exactly 1 token."
    )
    if figures.comparison is None:
        return measured
    difference = figures.comparison
    low, high = difference.interval
    verdict = (
        "training is what brought it"
        if low > 0
        else "which does not show that training brought anything"
    )
    return (
        f"{measured} Against the untrained draft on the same prompts: "
        f"{difference.difference:+.2f} (95 % interval {low:+.2f} to {high:+.2f}); {verdict}."
    )


def tiles(figures: Figures) -> list[dict[str, Any]]:
    """The figures to see first."""
    trained = figures.trained
    found: list[dict[str, Any]] = [
        {
            "value": f"{trained.mean_length:.2f}",
            "what": "mean acceptance length",
            "more": f"95 % interval {_span(trained.interval)}",
        }
    ]
    if figures.untrained is not None:
        found.append(
            {
                "value": f"{figures.untrained.mean_length:.2f}",
                "what": "untrained draft",
                "more": f"95 % interval {_span(figures.untrained.interval)}",
            }
        )
    found += [
        {
            "value": f"{speed.speedup:.2f}×",
            "what": "speed, one at a time" if speed.batch == 1 else f"speed, {speed.batch} at once",
            "more": f"{speed.without:.0f} → {speed.with_draft:.0f} tokens/s",
        }
        for speed in figures.speed
    ]
    found.append(
        {
            "value": "lossless",
            "what": f"{figures.lossless_prompts} answers compared",
            "more": _ties(figures),
            "good": True,
        }
    )
    return [{"good": False, **tile} for tile in found]


def acceptance_chart(figures: Figures) -> dict[str, Any]:
    """Acceptance by position: picture, words for those who do not see it, and the table."""
    trained = figures.trained
    shares = ", ".join(
        f"position {at}: {share:.0%}" for at, share in enumerate(trained.per_position, start=1)
    )
    alt = f"Bar chart of acceptance by position in the draft. Trained draft: {shares}."
    if figures.untrained is not None:
        others = ", ".join(f"{share:.0%}" for share in figures.untrained.per_position)
        alt += f" Untrained draft: {others}."
    return {
        "title": "Acceptance by position",
        "text": "How often the draft's first, second and later guesses were the verifier's own"
        " tokens. A guess counts only when all before it in the step were right.",
        "alt": alt,
        "svg": plots.acceptance_by_position(figures),
        "caption": f"{trained.drafts:,} drafts, {trained.accepted:,} accepted tokens. "
        f"{trained.repeated_4gram_share:.1%} of the answers' 4-grams had stood in the same answer "
        "before; repetition is easy to draft.",
        "table": acceptance_table(figures),
        "open": True,
    }


def acceptance_table(figures: Figures) -> Table:
    """Acceptance of each draft: length, interval and positions."""
    positions = range(1, len(figures.trained.per_position) + 1)
    drafts = [("trained", figures.trained), ("untrained", figures.untrained)]
    rows = [_draft_row(name, draft) for name, draft in drafts if draft is not None]
    if figures.comparison is not None:
        low, high = figures.comparison.interval
        rows.append(
            [
                "difference",
                f"{figures.comparison.difference:+.3f}",
                f"{low:+.2f} to {high:+.2f}",
                *([""] * (len(positions) + 1)),
            ]
        )
    return {
        "caption": "Acceptance length with its 95 % interval over prompts, acceptance at each"
        " position, and the share of repeated 4-grams",
        "columns": [
            "draft",
            "length",
            "95 % interval",
            *(f"at {at}" for at in positions),
            "repeated",
        ],
        "rows": rows,
    }


def loss_chart(points: Sequence[LossPoint]) -> dict[str, Any]:
    """The loss curve, with a table of evenly spaced points and all validations."""
    training = [point for point in points if not point.validation]
    validation = [point for point in points if point.validation]
    first, last = (training or validation)[0], (training or validation)[-1]
    stride = max(1, -(-len(training) // _LOSS_ROWS))
    shown = [*training[::stride], *([training[-1]] if training else []), *validation]
    unique = {(point.step, point.validation): point for point in shown}
    alt = (
        f"Line chart of the loss: {first.loss:.3g} at step {first.step}, "
        f"{last.loss:.3g} at step {last.step}."
    )
    if validation:
        alt += f" Validation ends at {validation[-1].loss:.3g}."
    return {
        "title": "Training loss",
        "text": "The loss that speculators' trainer reported. It can keep falling after acceptance"
        " has stopped rising: judge a draft by acceptance.",
        "alt": alt,
        "svg": plots.loss_curve(points),
        "caption": f"{len(training):,} training steps recorded, {len(validation)} validations.",
        "table": {
            "caption": "Loss by step",
            "columns": ["step", "loss", "of"],
            "rows": [
                [
                    f"{point.step:,}",
                    f"{point.loss:.4f}",
                    "validation" if point.validation else "training",
                ]
                for _, point in sorted(unique.items())
            ],
        },
        "open": False,
    }


def coverage_chart(points: Sequence[CoveragePoint], chosen: CoveragePoint) -> dict[str, Any]:
    """Coverage by size of the draft vocabulary."""
    return {
        "title": "Vocabulary coverage",
        "text": "The draft proposes only the most frequent tokens. A token outside its vocabulary"
        " can never be accepted, so coverage bounds acceptance.",
        "alt": f"Line chart of coverage by draft vocabulary size. The draft's {chosen.size:,} "
        f"tokens cover {chosen.coverage:.1%} of the supervised tokens; the curve runs from "
        f"{points[0].coverage:.0%} at {points[0].size:,} to {points[-1].coverage:.1%} at "
        f"{points[-1].size:,}.",
        "svg": plots.coverage_curve(points, chosen),
        "caption": f"{chosen.size:,} tokens cover {chosen.coverage:.2%} of the supervised tokens."
        + _fewest(points),
        "table": {
            "caption": "Coverage by size",
            "columns": ["tokens", "coverage"],
            "rows": [[f"{point.size:,}", f"{point.coverage:.2%}"] for point in points],
        },
        "open": False,
    }


def _fewest(points: Sequence[CoveragePoint]) -> str:
    """The first size on the curve for each usual share; vocab puts the fewest tokens there."""
    fewest = {
        share: next((point.size for point in points if point.coverage >= share), None)
        for share in _SHARES
    }
    told = [f"{size:,} for {share:.4g}" for share, size in fewest.items() if size is not None]
    return f" The fewest tokens on the curve: {', '.join(told)}." if told else ""


def speed_table(figures: Figures) -> Table:
    """Tokens per second at each batch size."""
    return {
        "caption": "Generated tokens per second",
        "columns": ["batch", "prompts", "without", "with draft", "speedup", "95 % interval"],
        "rows": [
            [
                f"{speed.batch}",
                f"{speed.prompts}",
                f"{speed.without:.1f}",
                f"{speed.with_draft:.1f}",
                f"{speed.speedup:.2f}×",
                _span(speed.interval) if speed.interval else "one block only",
            ]
            for speed in figures.speed
        ],
    }


def speed_warning(figures: Figures) -> str:
    """Why the rates cannot be, empty where they can.

    A verifier's step is no cheaper for the guesses that it checks, so that one answer at a time
    is never sped up by more than the tokens of a step. Engines are timed one after the other.
    """
    most = figures.trained.interval[1]
    for speed in figures.speed:
        least = speed.interval[0] if speed.interval else speed.speedup
        if speed.batch == 1 and least > most:
            return (
                f"The speedup at batch 1 cannot be above the acceptance length, {most:.2f}: other "
                "work on this machine slowed one engine and not the other. Measure it again."
            )
    return ""


def lossless_text(figures: Figures) -> str:
    """What was compared, and with which outcome."""
    compared = (
        f"{figures.lossless_prompts} greedy answers with the draft were compared token by token "
        "with the verifier's own."
    )
    if not figures.divergences:
        return f"{compared} All are equal."
    return (
        f"{compared} {len(figures.divergences)} part at a near tie: two tokens whose "
        f"log-probabilities differ by less than {figures.near_tie} nats, where verifying several "
        f"tokens at once in {figures.dtype} rounds the other way. No other differs."
    )


def divergence_table(figures: Figures) -> Table:
    """Every divergence that was allowed."""
    return {
        "caption": "Answers that part at a near tie",
        "columns": ["prompt", "token", "verifier's id", "id with the draft", "gap in nats"],
        "rows": [_divergence_row(item) for item in figures.divergences],
    }


def _draft_row(name: str, draft: DraftFigures) -> list[str]:
    return [
        name,
        f"{draft.mean_length:.3f}",
        _span(draft.interval),
        *(f"{share:.1%}" for share in draft.per_position),
        f"{draft.repeated_4gram_share:.1%}",
    ]


def _divergence_row(item: Divergence) -> list[str]:
    gap = "" if item.gap is None else f"{item.gap:.4f}"
    return [
        f"{item.prompt}",
        f"{item.position}",
        f"{item.verifier_token}",
        f"{item.draft_token}",
        gap,
    ]


def _span(interval: tuple[float, float]) -> str:
    low, high = interval
    return f"{low:.2f} to {high:.2f}"


def _ties(figures: Figures) -> str:
    if not figures.divergences:
        return "equal token for token"
    return f"{len(figures.divergences)} part at a near tie"
