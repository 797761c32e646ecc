"""The report: one self-contained page that everyone can read, and a table on the terminal."""

import io
import re
from html.parser import HTMLParser

import msgspec
import pytest
from rich.console import Console

from eagle3 import artifact as artifacts
from eagle3.acceptance import (
    Block,
    Comparison,
    Divergence,
    DraftFigures,
    Figures,
    PromptResult,
    speed_figures,
)
from eagle3.artifact import Artifact
from eagle3.errors import ManifestInvalid, UpstreamMissing
from eagle3.manifest import FileEntry, Manifest, SourceFile, VerifierFacts
from eagle3.report import Evidence, content, gather, render
from eagle3.report.plots import CoveragePoint, LossPoint
from eagle3.report.terminal import show
from eagle3.store import open_store
from eagle3.summary import summary

VOID = {"meta", "br", "img", "link", "hr", "input"}
SUMMARY_KEYS = [
    "samples",
    "tokens",
    "regenerate_tokens_per_second",
    "extract_tokens_per_second",
    "draft_vocab_size",
    "draft_vocab_coverage",
    "train_steps",
    "acceptance_length_trained",
    "acceptance_length_untrained",
    "acceptance_length_interval",
    "acceptance_per_position",
    "repeated_4gram_share",
    "heldout_prompts",
    "tokens_per_second_with_draft",
    "tokens_per_second_without",
    "speedup",
    "lossless",
    "lossless_prompts",
    "near_tie_divergences",
    "seconds_total",
    "seconds_by_stage",
]


def draft(length: float) -> DraftFigures:
    return DraftFigures(
        mean_length=length,
        interval=(length - 0.03, length + 0.04),
        per_position=(0.57, 0.34, 0.22),
        drafts=12000,
        accepted=13560,
        tokens=25600,
        repeated_4gram_share=0.123,
    )


def blocks(seconds: float) -> list[Block]:
    return [
        Block(
            engine="any",
            seconds=seconds + 0.1 * prompt,
            host="here",
            attempt="first",
            results=(PromptResult(prompt=prompt, output_ids=(1,) * 64),),
        )
        for prompt in range(4)
    ]


@pytest.fixture(scope="module")
def figures() -> Figures:
    return Figures(
        heldout_prompts=200,
        max_new_tokens=128,
        num_speculative_tokens=3,
        dtype="bfloat16",
        trained=draft(2.13),
        untrained=draft(1.01),
        comparison=Comparison(difference=1.12, interval=(1.07, 1.17)),
        speed=(speed_figures(1, blocks(1.0), blocks(1.4)),),
        lossless=True,
        lossless_prompts=64,
        near_tie=0.1,
        divergences=(
            Divergence(prompt=3, position=77, verifier_token=12, draft_token=34, gap=0.0123),
        ),
    )


@pytest.fixture(scope="module")
def lineage(tmp_path_factory: pytest.TempPathFactory) -> list[Artifact]:
    """A whole chain of artefacts with the objects that the report reads."""
    objects = {
        "vocab": {"coverage.json": b'{"curve": [[256, 0.5], [1024, 0.8], [8192, 0.957]]}'},
        "train": {
            "metrics.jsonl": b'{"kind": "train", "step": 1, "epoch": 0, "loss": 4.5}\n'
            b'{"kind": "train", "step": 10, "epoch": 0, "loss": 1.5}\n'
            b'{"kind": "validation", "step": 10, "epoch": 0, "loss": 1.25}\n'
        },
    }
    made: dict[str, Artifact] = {}
    root = tmp_path_factory.mktemp("run")
    inputs = {
        "verifier": [],
        "prepare": [],
        "extract": ["prepare", "verifier"],
        "vocab": ["prepare", "verifier"],
        "train": ["extract", "vocab"],
        "export": ["train"],
    }
    for kind, sources in inputs.items():
        store = open_store(f"{root}/{kind}")
        plain = manifest_of(kind, sources, made)
        files = [artifacts.put(store, *item) for item in objects.get(kind, {}).items()]
        manifest = msgspec.structs.replace(plain, files=(*files, *plain.files[len(files) :]))
        made[kind] = Artifact(store=store, manifest=manifest)
    return list(made.values())


def manifest_of(kind: str, sources: list[str], made: dict[str, Artifact]) -> Manifest:
    samples = 7 if kind in ("prepare", "extract") else 0
    return Manifest(
        artifact=kind,
        identity=kind,
        files=(FileEntry(path="a", bytes=5, sha256="0", samples=samples, tokens=samples * 10),),
        inputs={source: made[source].ref() for source in sources},
        sources=(SourceFile(url="file:///chats<1>.jsonl", bytes=2048, sha256="c0ffee" * 10),)
        if kind == "prepare"
        else (),
        rows_in=9 if kind == "prepare" else 0,
        rows_kept=7 if kind == "prepare" else 0,
        rejected={"empty_answer": 2} if kind == "prepare" else {},
        verifier=VerifierFacts(
            fingerprint="f", num_hidden_layers=8, hidden_size=64, vocab_size=512
        ),
        total_samples=samples,
        total_tokens=samples * 10,
        facts={"draft_vocab_size": 8192, "coverage": 0.957} if kind == "vocab" else {},
        measured={"seconds": 12.0},
    )


class Page(HTMLParser):
    """A page's elements; complains about tags that do not close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], tuple[str, ...]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), tuple(self.open)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), tuple(self.open)))

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += f" {data}"

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs, _ in self.elements if name == tag]


@pytest.fixture(scope="module")
def rendered(figures: Figures, lineage: list[Artifact]) -> str:
    return render(gather(figures, lineage, "some/verifier"))


@pytest.fixture(scope="module")
def page(rendered: str) -> Page:
    return Page(rendered)


def test_the_page_refers_to_nothing_outside_itself(rendered, page):
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", rendered.replace("file:///", ""))
    for tag in ("script", "link", "iframe", "img", "object", "embed"):
        assert page.all(tag) == []
    for _, attrs, _ in page.elements:
        for name in ("src", "href", "xlink:href"):
            assert (attrs.get(name) or "#").startswith("#")


def test_every_figure_has_words_for_those_who_do_not_see_it_and_a_table(page):
    figures = [e for e in page.elements if e[0] == "figure"]
    images = [attrs for _, attrs, _ in page.elements if attrs.get("role") == "img"]
    assert len(figures) == len(images) == len(page.all("svg")) == 3
    assert all(len(image["aria-label"] or "") > 40 for image in images)
    assert all(svg["aria-hidden"] == "true" for svg in page.all("svg"))
    tables_in_details = [e for e in page.elements if e[0] == "table" and "details" in e[2]]
    assert len(tables_in_details) == 3
    assert len(page.all("caption")) == len(page.all("table"))


def test_ids_are_unique_across_the_pictures(page):
    ids = [attrs["id"] for _, attrs, _ in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_pictures_take_their_colours_from_the_page(page):
    styles = ";".join(
        attrs.get("style") or "" for _, attrs, parents in page.elements if "svg" in parents
    )
    assert set(re.findall(r"(?:fill|stroke): ([^;]+)", styles)) <= {
        "none",
        "var(--ink)",
        "var(--muted)",
        "var(--line)",
        "var(--trained)",
        "var(--untrained)",
    }


@pytest.mark.parametrize(
    "fact",
    [
        "2.13 tokens per verifier step",
        "+1.12",
        "95 % interval 2.10 to 2.17",
        "1 part at a near tie",
        "0.0123",
        "some/verifier",
        "2 empty_answer",
        "12.3%",
        "95.70%",
        "3 drafted tokens",
        "1.2500",
    ],
)
def test_the_page_says(page, fact):
    assert fact in " ".join(page.text.split())


def test_the_chain_goes_from_the_conversations_to_the_export(page):
    chain = re.sub(r"\s+", " ", page.text[page.text.index("From conversations to draft") :])
    order = ["conversations", "verifier", "prepare", "extract", "vocab", "train", "export"]
    places = [re.search(rf"\b{word} ?[0-9a-f]{{12}}", chain).start() for word in order]
    assert places == sorted(places)


def test_a_name_from_outside_cannot_become_markup(page):
    assert "file:///chats<1>.jsonl" in page.text


def test_the_same_evidence_gives_the_same_bytes(rendered, figures, lineage):
    assert render(gather(figures, lineage, "some/verifier")) == rendered


def test_a_draft_without_baseline_curves_or_divergences_has_a_page_too(figures):
    bare = msgspec.structs.replace(figures, untrained=None, comparison=None, divergences=())
    page = Page(render(Evidence(figures=bare, lineage=())))
    assert len(page.all("svg")) == 1
    assert "All are equal." in page.text


def test_training_that_brought_nothing_is_not_praised(figures, lineage):
    dull = msgspec.structs.replace(
        figures, comparison=Comparison(difference=0.01, interval=(-0.02, 0.03))
    )
    page = Page(render(gather(dull, lineage, "")))
    assert "does not show that training brought anything" in page.text


def test_curves_are_read_from_the_lineage(figures, lineage):
    evidence = gather(figures, lineage, "")
    assert evidence.losses == (
        LossPoint(step=1, loss=4.5),
        LossPoint(step=10, loss=1.5),
        LossPoint(step=10, loss=1.25, validation=True),
    )
    assert evidence.coverage[-1] == CoveragePoint(size=8192, coverage=0.957)
    assert evidence.chosen == CoveragePoint(size=8192, coverage=0.957)


def test_the_coverage_chart_tells_the_fewest_tokens_for_each_share():
    points = [CoveragePoint(size=256, coverage=0.5), CoveragePoint(size=1000, coverage=0.9),
              CoveragePoint(size=4000, coverage=0.951)]  # fmt: skip
    chart = content.coverage_chart(points, points[1])
    assert chart["caption"].endswith(
        "The fewest tokens on the curve: 1,000 for 0.9, 4,000 for 0.95."
    )
    assert content.coverage_chart(points[:1], points[0])["caption"].endswith("supervised tokens.")


def test_a_broken_coverage_curve_names_its_object(figures, lineage, tmp_path):
    broken = open_store(f"{tmp_path}/vocab")
    entry = artifacts.put(broken, "coverage.json", b'{"curve": 3}')
    vocab = next(artifact for artifact in lineage if artifact.manifest.artifact == "vocab")
    manifest = msgspec.structs.replace(vocab.manifest, files=(entry,))
    with pytest.raises(ManifestInvalid, match=r"vocab/coverage\.json.*a curve of"):
        gather(figures, [Artifact(store=broken, manifest=manifest)], "")


def test_a_speedup_that_cannot_be_is_told_as_such(figures, lineage):
    """Seen on a machine whose other work ended between two engines: 6.7 times at 2.08 tokens."""
    out = io.StringIO()
    assert content.speed_warning(figures) == ""
    spoiled = msgspec.structs.replace(
        figures, speed=(speed_figures(1, blocks(1.0), blocks(6.7)), *figures.speed)
    )
    show(spoiled, Console(file=out, width=100))
    assert "cannot be above the acceptance length" in " ".join(out.getvalue().split())
    assert "cannot be above the acceptance length" in render(gather(spoiled, lineage, "a/b"))


def test_the_terminal_shows_acceptance_speed_and_losslessness(figures):
    out = io.StringIO()
    show(figures, Console(file=out, width=100))
    text = " ".join(out.getvalue().split())
    for fact in ("2.13 tokens per verifier step", "57.0%", "untrained", "1.010", "near tie"):
        assert fact in text
    assert "1.35×" in text


def run_manifests() -> dict[str, Manifest]:
    def manifest(kind: str, **fields) -> Manifest:
        return Manifest(artifact=kind, identity="i", files=(), **fields)

    evaluate_facts = {
        "acceptance_length_trained": 2.13,
        "acceptance_length_interval": [2.1, 2.17],
        "acceptance_length_untrained": 1.01,
        "acceptance_per_position": [0.57, 0.34, 0.22],
        "repeated_4gram_share": 0.12,
        "heldout_prompts": 200,
        "lossless": True,
        "lossless_prompts": 64,
        "near_tie_divergences": 0,
    }
    rates = {
        "tokens_per_second_with_draft": 79.0,
        "tokens_per_second_without": 60.0,
        "speedup": 1.317,
    }
    return {
        "verifier": manifest("verifier", measured={"seconds": 3.0}),
        "prepare": manifest("prepare", measured={"seconds": 10.0}),
        "regenerate": manifest(
            "regenerate", total_tokens=5000, measured={"seconds": 100.0, "tokens_per_second": 500.0}
        ),
        "extract": manifest(
            "extract", total_samples=840, total_tokens=120000, measured={"seconds": 80.0}
        ),
        "vocab": manifest(
            "vocab",
            facts={"draft_vocab_size": 8192, "coverage": 0.95701},
            measured={"seconds": 2.0},
        ),
        "train": manifest("train", facts={"steps": 400}, measured={"seconds": 330.0}),
        "export": manifest("export", measured={"seconds": 5.0}),
        "evaluate": manifest(
            "evaluate", facts=evaluate_facts, measured={**rates, "seconds": 300.0}
        ),
    }


def test_the_summary_of_a_run_has_exactly_its_keys():
    found = summary(run_manifests())
    assert list(found) == SUMMARY_KEYS
    assert found["extract_tokens_per_second"] == 1500
    assert found["regenerate_tokens_per_second"] == 500
    assert found["draft_vocab_coverage"] == 0.957
    assert found["seconds_by_stage"]["prepare"] == 10
    assert found["seconds_total"] == 827


def test_the_summary_of_a_run_without_regenerate_says_so_by_null():
    manifests = run_manifests()
    del manifests["regenerate"]
    assert summary(manifests)["regenerate_tokens_per_second"] is None


def test_an_unfinished_run_has_no_summary():
    manifests = run_manifests()
    del manifests["evaluate"]
    with pytest.raises(UpstreamMissing, match="no evaluate artefact"):
        summary(manifests)
