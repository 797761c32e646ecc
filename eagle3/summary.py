"""The closing record of a run: one flat JSON object made from its manifests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle3.errors import UpstreamMissing
from eagle3.manifest import Manifest
from eagle3.stages import STAGES

_NEEDED = ("extract", "vocab", "train", "evaluate")


def summary(manifests: Mapping[str, Manifest]) -> dict[str, Any]:
    """What a finished run comes to.

    Args:
        manifests: artefact kind -> its manifest, of one run. `regenerate` may be missing.

    Every stage's manifest says in `measured` how many `seconds` it took; those that prepare
    writes twice are counted once. Raises UpstreamMissing for a run that is not finished.
    """
    for kind in _NEEDED:
        if kind not in manifests:
            raise UpstreamMissing(
                f"summary: {kind}",
                wanted="a finished run",
                found=f"no {kind} artefact",
                remedy="run the stages up to evaluate first",
            )
    extract, evaluate = manifests["extract"], manifests["evaluate"]
    seconds = seconds_by_stage(manifests)
    figures, rates = evaluate.facts, evaluate.measured
    return {
        "samples": extract.total_samples,
        "tokens": extract.total_tokens,
        "regenerate_tokens_per_second": _rate(manifests.get("regenerate")),
        "extract_tokens_per_second": _rate(extract),
        "draft_vocab_size": manifests["vocab"].facts["draft_vocab_size"],
        "draft_vocab_coverage": round(manifests["vocab"].facts["coverage"], 4),
        "train_steps": manifests["train"].facts["steps"],
        "acceptance_length_trained": figures["acceptance_length_trained"],
        "acceptance_length_untrained": figures.get("acceptance_length_untrained"),
        "acceptance_length_interval": figures["acceptance_length_interval"],
        "acceptance_per_position": figures["acceptance_per_position"],
        "repeated_4gram_share": figures["repeated_4gram_share"],
        "heldout_prompts": figures["heldout_prompts"],
        "tokens_per_second_with_draft": rates["tokens_per_second_with_draft"],
        "tokens_per_second_without": rates["tokens_per_second_without"],
        "speedup": rates["speedup"],
        "lossless": figures["lossless"],
        "lossless_prompts": figures["lossless_prompts"],
        "near_tie_divergences": figures["near_tie_divergences"],
        "seconds_total": round(sum(seconds.values()), 1),
        "seconds_by_stage": seconds,
    }


def seconds_by_stage(manifests: Mapping[str, Manifest]) -> dict[str, float]:
    """Stage -> the seconds that its manifest recorded, for the stages that have one."""
    found: dict[str, float] = {}
    for stage in STAGES:
        manifest = manifests.get(stage.writes[-1])
        if manifest is not None and "seconds" in manifest.measured:
            found[stage.name] = round(manifest.measured["seconds"], 1)
    return found


def _rate(manifest: Manifest | None) -> float | None:
    """Tokens per second: the stage's own rate where it recorded one, else tokens over seconds."""
    if manifest is None:
        return None
    if "tokens_per_second" in manifest.measured:
        return round(manifest.measured["tokens_per_second"], 1)
    seconds = manifest.measured.get("seconds", 0.0)
    return round(manifest.total_tokens / seconds, 1) if seconds else None
