"""The chain from the conversations to the draft, as plain values for the report's template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eagle3.artifact import Artifact
from eagle3.report.content import Table

_DIGEST = 12

_MEANING = {
    "verifier": "the verifier's embedding, final norm and lm_head, its config and tokenizer",
    "prepare": "conversations as token rows with loss masks",
    "regenerate": "the verifier's own answers to the prompts",
    "extract": "hidden states captured by vLLM",
    "vocab": "the draft's vocabulary, and how it maps to the verifier's",
    "train": "the draft's checkpoints",
    "export": "the folder that vLLM serves",
}


def chain(lineage: Sequence[Artifact]) -> list[dict[str, str]]:
    """The artefacts from the conversations to the draft, each with what it was made from."""
    items = [
        {
            "kind": "conversations",
            "digest": source.sha256[:_DIGEST],
            "text": f"{_size(source.bytes)} as read",
            "inputs": "",
            "url": source.url,
        }
        for artifact in lineage
        for source in artifact.manifest.sources
    ]
    for artifact in lineage:
        manifest = artifact.manifest
        inputs = manifest.inputs.values()
        items.append(
            {
                "kind": manifest.artifact,
                "digest": artifact.digest[:_DIGEST],
                "text": _MEANING[manifest.artifact] + _rejections(manifest.rejected),
                "inputs": ", ".join(f"{ref.artifact} {ref.digest[:_DIGEST]}" for ref in inputs),
                "url": artifact.store.url,
            }
        )
    return items


def stage_table(lineage: Sequence[Artifact]) -> Table:
    """Counts, sizes and times of every artefact behind the draft."""
    return {
        "caption": "What each stage kept and wrote",
        "columns": [
            "artefact", "rows in", "kept", "rejected", "samples", "tokens", "objects", "size",
            "seconds",
        ],
        "rows": [_stage_row(artifact) for artifact in lineage],
    }  # fmt: skip


def footer(lineage: Sequence[Artifact]) -> str:
    """The versions that the draft was exported with."""
    produced = lineage[-1].manifest.produced_by if lineage else {}
    return " · ".join(f"{name} {version}" for name, version in sorted(produced.items()))


def _stage_row(artifact: Artifact) -> list[str]:
    manifest = artifact.manifest
    seconds = manifest.measured.get("seconds")
    return [
        manifest.artifact,
        _count(manifest.rows_in),
        _count(manifest.rows_kept),
        _count(sum(manifest.rejected.values())),
        _count(manifest.total_samples),
        _count(manifest.total_tokens),
        _count(len(manifest.files)),
        _size(sum(entry.bytes for entry in manifest.files)),
        "–" if seconds is None else f"{seconds:,.0f}",
    ]


def _rejections(rejected: Mapping[str, int]) -> str:
    if not rejected:
        return ""
    return "; rejected: " + ", ".join(f"{count:,} {reason}" for reason, count in rejected.items())


def _count(value: int) -> str:
    return f"{value:,}" if value else "–"


def _size(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
