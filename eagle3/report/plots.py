"""The report's pictures: SVG to stand inside an HTML page, in the page's own colours.

Matplotlib draws with marker colours that stand for names; they are replaced by CSS variables, so
that one picture fits a light and a dark page. Text stays text. The bytes depend on the figures
alone: no date, no random ids.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

import matplotlib as mpl
import msgspec
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from eagle3.acceptance import Figures

# Marker colour -> the variable of the page's style sheet that takes its place.
_INK, _MUTED, _GRID, _TRAINED, _UNTRAINED = (f"#01020{digit}" for digit in range(1, 6))
_VARIABLES = {
    _INK: "var(--ink)",
    _MUTED: "var(--muted)",
    _GRID: "var(--line)",
    _TRAINED: "var(--trained)",
    _UNTRAINED: "var(--untrained)",
}
_STYLE = {
    "axes.edgecolor": _GRID,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": _MUTED,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.axisbelow": True,
    "font.size": 9.5,
    "grid.color": _GRID,
    "grid.linewidth": 1,
    "legend.frameon": False,
    "legend.labelcolor": _INK,
    "svg.fonttype": "none",
    "text.color": _INK,
    "xtick.color": _GRID,
    "xtick.labelcolor": _MUTED,
    "ytick.color": _GRID,
    "ytick.labelcolor": _MUTED,
    "ytick.major.size": 0,
}
_PROLOG = re.compile(r"^.*?(?=<svg)", re.DOTALL)
_METADATA = re.compile(r"\s*<metadata>.*?</metadata>", re.DOTALL)
_NAMESPACES = re.compile(r'\sxmlns(:\w+)?="[^"]*"')
_GROUP_IDS = re.compile(r'\sid="[A-Za-z]+[\w.]*_\d+"')
_SIZE = re.compile(r'\s(width|height)="[\d.]+pt"')
_STYLE_SHEET = re.compile(r"\s*<defs>\s*<style.*?</style>\s*</defs>", re.DOTALL)
_FAMILY = re.compile(r"\s*font-family:[^;\"]*;?")


class LossPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The loss after so many steps: of a training batch, or over the validation rows."""

    step: int
    loss: float
    validation: bool = False


class CoveragePoint(msgspec.Struct, frozen=True, kw_only=True):
    """The share of supervised tokens that a draft vocabulary of that size can propose."""

    size: int
    coverage: float


def acceptance_by_position(figures: Figures) -> str:
    """Bars: the share of drafts accepted up to each position, trained beside untrained."""
    drafts = [("trained", figures.trained, _TRAINED)]
    if figures.untrained is not None:
        drafts.append(("untrained", figures.untrained, _UNTRAINED))
    width = 0.74 / len(drafts)
    with mpl.rc_context({**_STYLE, "svg.hashsalt": "acceptance"}):
        canvas, axes = _axes("position in the draft", "share of drafts accepted")
        for place, (name, draft, colour) in enumerate(drafts):
            left = [at - 0.37 + width * (place + 0.5) for at in range(len(draft.per_position))]
            bars = axes.bar(
                left, draft.per_position, width * 0.94, color=colour, label=f"{name} draft"
            )
            axes.bar_label(bars, [f"{share:.0%}" for share in draft.per_position], padding=2)
        positions = range(len(figures.trained.per_position))
        axes.set_xticks(positions, [str(at + 1) for at in positions])
        axes.set_ylim(0, min(1.0, 1.2 * max(0.05, *figures.trained.per_position)))
        axes.yaxis.set_major_formatter(FuncFormatter(_percent))
        axes.legend(loc="upper right")
        return _svg(canvas)


def loss_curve(points: Sequence[LossPoint]) -> str:
    """Lines: training loss by step, and validation loss where it was measured."""
    with mpl.rc_context({**_STYLE, "svg.hashsalt": "loss"}):
        canvas, axes = _axes("step", "loss")
        training = [point for point in points if not point.validation]
        validation = [point for point in points if point.validation]
        axes.plot(
            [point.step for point in training],
            [point.loss for point in training],
            color=_TRAINED,
            linewidth=1.4,
            label="training",
        )
        if validation:
            axes.plot(
                [point.step for point in validation],
                [point.loss for point in validation],
                color=_UNTRAINED,
                marker="o",
                linewidth=2,
                label="validation",
            )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper right")
        return _svg(canvas)


def coverage_curve(points: Sequence[CoveragePoint], chosen: CoveragePoint) -> str:
    """A line: coverage by size of the draft vocabulary, with the chosen size marked."""
    with mpl.rc_context({**_STYLE, "svg.hashsalt": "coverage"}):
        canvas, axes = _axes("tokens in the draft vocabulary", "share of supervised tokens")
        axes.plot(
            [point.size for point in points],
            [point.coverage for point in points],
            color=_TRAINED,
            linewidth=2,
        )
        axes.plot([chosen.size], [chosen.coverage], "o", color=_UNTRAINED, markersize=9)
        axes.annotate(
            f"{chosen.size:,} tokens: {chosen.coverage:.1%}",
            (chosen.size, chosen.coverage),
            xytext=(10, -16),
            textcoords="offset points",
        )
        if points and points[-1].size > 20 * max(points[0].size, 1):
            axes.set_xscale("log", base=2)
        axes.set_ylim(top=1.005)
        axes.xaxis.set_major_formatter(FuncFormatter(_thousands))
        axes.yaxis.set_major_formatter(FuncFormatter(_percent))
        return _svg(canvas)


def _axes(across: str, up: str) -> tuple[Figure, Axes]:
    canvas = Figure(figsize=(7.2, 3.4), layout="constrained")
    axes = canvas.add_subplot()
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    return canvas, axes


def _percent(value: float, _: object) -> str:
    return f"{value:.0%}"


def _thousands(value: float, _: object) -> str:
    return f"{value:,.0f}"


def _svg(canvas: Figure) -> str:
    """The figure as an SVG element that scales to its place in the page."""
    buffer = io.StringIO()
    canvas.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = _PROLOG.sub("", buffer.getvalue(), count=1)
    for pattern in (_METADATA, _NAMESPACES, _GROUP_IDS, _SIZE, _STYLE_SHEET, _FAMILY):
        text = pattern.sub("", text)
    for marker, variable in _VARIABLES.items():
        text = text.replace(marker, variable)
    return text.replace("<svg", '<svg aria-hidden="true" focusable="false"', 1)
