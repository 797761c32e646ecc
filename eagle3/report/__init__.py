"""What an evaluation leaves for people: a table on the terminal, and one self-contained page.

`gather` collects the evidence from the lineage of the draft, `render` turns it into HTML without
any reference to the outside. Nothing here measures or decides.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

import jinja2
import msgspec

from eagle3.acceptance import Figures
from eagle3.artifact import Artifact
from eagle3.errors import ManifestInvalid
from eagle3.lineage import of_kind
from eagle3.report import chain, content
from eagle3.report.plots import CoveragePoint, LossPoint


class _MetricLine(msgspec.Struct, frozen=True):
    """What the report takes from a line of `metrics.jsonl`."""

    kind: str
    step: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything that the page shows.

    Attributes:
        lineage: the artefacts behind the draft, the conversations first.
        losses, coverage: curves; empty where their artefact has none.
        chosen: size and coverage of the draft vocabulary that was taken.
        verifier: its name where the draft is served.
    """

    figures: Figures
    lineage: tuple[Artifact, ...]
    losses: tuple[LossPoint, ...] = ()
    coverage: tuple[CoveragePoint, ...] = ()
    chosen: CoveragePoint | None = None
    verifier: str = ""


def gather(figures: Figures, lineage: Sequence[Artifact], verifier: str) -> Evidence:
    """The evidence that lies in the artefacts of a lineage. Raises ManifestInvalid."""
    losses: list[LossPoint] = []
    for trained in of_kind(lineage, "train"):
        losses = _losses(trained)
    coverage: list[CoveragePoint] = []
    chosen = None
    for vocab in of_kind(lineage, "vocab"):
        facts = vocab.manifest.facts
        chosen = CoveragePoint(size=facts["draft_vocab_size"], coverage=facts["coverage"])
        coverage = _coverage(vocab)
    return Evidence(
        figures=figures,
        lineage=tuple(lineage),
        losses=tuple(losses),
        coverage=tuple(coverage),
        chosen=chosen,
        verifier=verifier,
    )


def render(evidence: Evidence) -> str:
    """The page: HTML with its style and its pictures inside. The same evidence, the same bytes."""
    source = resources.files(__name__).joinpath("report.html.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    figures = evidence.figures
    charts = [content.acceptance_chart(figures)]
    if evidence.losses:
        charts.append(content.loss_chart(evidence.losses))
    if evidence.coverage and evidence.chosen:
        charts.append(content.coverage_chart(evidence.coverage, evidence.chosen))
    return environment.from_string(source).render(
        headline=content.headline(figures),
        lead=content.lead(figures),
        verifier=evidence.verifier,
        tiles=content.tiles(figures),
        charts=charts,
        speed=content.speed_table(figures),
        speed_warning=content.speed_warning(figures),
        lossless=content.lossless_text(figures),
        divergences=content.divergence_table(figures),
        lineage=chain.chain(evidence.lineage),
        stages=chain.stage_table(evidence.lineage),
        footer=chain.footer(evidence.lineage),
    )


def _losses(trained: Artifact) -> list[LossPoint]:
    return [
        LossPoint(step=line.step, loss=line.loss, validation=line.kind == "validation")
        for line in trained.read_lines("metrics.jsonl", _MetricLine)
    ]


def _coverage(vocab: Artifact) -> list[CoveragePoint]:
    where = f"{vocab.store.url}/coverage.json"
    try:
        found = json.loads(vocab.read("coverage.json"))
        return [CoveragePoint(size=size, coverage=share) for size, share in found["curve"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ManifestInvalid(
            where,
            wanted="a curve of [size, coverage] pairs",
            found=error,
            remedy="run vocab again",
        ) from error
