"""How a stage of this run stands: how far it is, and what `run` would refuse it for.

A claim and a manifest hold what a stage was begun with as the stage resolved it, which is more
than its section of the configuration says: ids for `null`, a name, the hashes of its data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from eagle3 import strict_json
from eagle3.artifact import Artifact
from eagle3.config import RunConfig, name_when_served
from eagle3.config_fields import settings_that_affect
from eagle3.errors import Eagle3Error
from eagle3.manifest import SourceFile, VerifierFacts, default_layer_ids
from eagle3.planning.sources import figures_at, files_named
from eagle3.store import Store
from eagle3.work import Claim, Work

_FIGURES = ("num_hidden_layers", "hidden_size", "vocab_size")


@dataclass(frozen=True, kw_only=True)
class Done:
    """What finished units have done of a stage: their number, share of the rows, and bytes."""

    units: int = 0
    share: float = 0.0
    bytes: int = 0


def other_settings(
    config: RunConfig,
    stage: str,
    verifier: VerifierFacts,
    *,
    claim: Claim | None,
    committed: Artifact | None,
) -> str:
    """The first setting that stands otherwise than the stage would claim it now, in words.

    Empty where all agree. Only what is recorded is compared: a record of another version may
    lack fields.
    """
    standing = {**(_recorded(config, stage, committed) if committed else {})}
    standing |= claim.settings if claim else {}
    for name, value in _claimed_now(config, stage, verifier).items():
        if name in standing and standing[name] != value:
            return f"{_called(stage, name)} {standing[name]}, and is {value} now"
    return ""


def _claimed_now(config: RunConfig, stage: str, verifier: VerifierFacts) -> dict[str, Any]:
    """The stage's section, and what it adds or resolves when it claims its prefix."""
    section = getattr(config, stage)
    found = settings_that_affect(section)
    if stage == "prepare":
        found["regenerate"] = {"enabled": config.regenerate.enabled}
    if stage == "regenerate" and section.temperature > 0:
        found["engine.max_num_seqs"] = section.engine.max_num_seqs
    if stage == "extract" and section.layer_ids is None:
        found["layer_ids"] = list(default_layer_ids(verifier.num_hidden_layers))
    if stage == "export":
        found["serving_name"] = name_when_served(config.verifier)
    return _as_json(found)


def _recorded(config: RunConfig, stage: str, committed: Artifact) -> dict[str, Any]:
    """The same as far as a manifest holds it; nothing of a section of another version."""
    manifest = committed.manifest
    try:
        section = msgspec.convert(manifest.config, type(getattr(config, stage)))
    except msgspec.ValidationError:
        return {}
    found = settings_that_affect(section)
    if stage == "extract" and manifest.layer_ids is not None:
        found["layer_ids"] = list(manifest.layer_ids)
    if stage == "export" and "serving_name" in manifest.facts:
        found["serving_name"] = manifest.facts["serving_name"]
    return _as_json(found)


def _as_json(settings: dict[str, Any]) -> dict[str, Any]:
    """As they are read back: a tuple would differ from the same list in a claim."""
    decoded: dict[str, Any] = strict_json.decode(msgspec.json.encode(settings), dict[str, Any])
    return decoded


def _called(stage: str, name: str) -> str:
    """A setting as the configuration's file has it."""
    beside = {"serving_name": "verifier.serving_name", "regenerate": "regenerate"}
    return beside.get(name, f"{stage}.{name}")


def other_data(config: RunConfig, claim: Claim | None, prepared: Artifact | None) -> str:
    """What of the conversations or of the verifier is another than prepare was begun with.

    No file is read: another number of files, and another size in a file's place, are proof of
    other contents, and equal ones are none of equal contents. What cannot be asked, such as a
    file that is gone or a data set of the hub, is not told. Rows that were imported have no files.
    """
    if prepared is not None and "imported" in prepared.manifest.facts:
        return ""
    return _other_verifier(config, prepared) or _other_files(config, claim, prepared)


def _other_verifier(config: RunConfig, prepared: Artifact | None) -> str:
    before = prepared.manifest.verifier if prepared is not None else None
    try:
        now = figures_at(config.verifier.source)
    except Eagle3Error:
        return ""
    if before is None or now is None:
        return ""
    for name in _FIGURES:
        if now[name] != getattr(before, name):
            return f"verifier.source has {name} {now[name]}, and had {getattr(before, name)}"
    return ""


def _other_files(config: RunConfig, claim: Claim | None, prepared: Artifact | None) -> str:
    try:
        now = [file for url in config.prepare.data for file in files_named(url)]
    except Eagle3Error:
        return ""
    sources: tuple[SourceFile, ...] = prepared.manifest.sources if prepared is not None else ()
    claimed = sum(name.startswith("data.") for name in claim.inputs) if claim is not None else 0
    count = len(sources) or claimed
    if count and count != len(now):
        return f"prepare.data names {len(now)} files, and named {count}"
    for (url, size), source in zip(now, sources, strict=False):
        if size != source.bytes:
            return f"prepare.data: {url} has {size:,} bytes, and had {source.bytes:,}"
    return ""


def done_of(store: Store, stage: str, config: RunConfig, rows: int) -> Done:
    """What the records of finished units say; nothing where the stage leaves none.

    Args: rows: of the stage's input.

    Raises ManifestInvalid for a damaged record.
    """
    records = Work(store, stage).finished().values()
    if not records:
        return Done()
    looked_at = sum(record.rows_in for record in records)
    if stage == "regenerate":
        # Its records count conversations, and a unit is cut by the rows of its input.
        looked_at = len(records) * config.regenerate.unit_rows
    written = sum(entry.bytes for record in records for entry in record.files)
    return Done(units=len(records), share=min(1.0, looked_at / max(rows, 1)), bytes=written)
