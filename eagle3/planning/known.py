"""What can be known of a run before it is run: what stands, how many tokens, at which rates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from eagle3 import artifact as artifacts
from eagle3 import strict_json
from eagle3.artifact import Artifact
from eagle3.config import RunConfig
from eagle3.errors import ConfigError
from eagle3.manifest import VerifierFacts
from eagle3.planning.arithmetic import (
    DATA_BYTES_PER_TOKEN,
    DEFAULT_RATES,
    UNPACKED,
    DraftShape,
    Rate,
    draft_shape,
)
from eagle3.planning.sources import figures_at, files_named
from eagle3.stages import Stage
from eagle3.store import Store, open_store

_MEASURED = {"regenerate": "tokens_per_second", "extract": "tokens_per_second"}


@dataclass(frozen=True, kw_only=True)
class Known:
    """What can be known of a run before it is run."""

    config: RunConfig
    store: Store | None
    standing: Mapping[str, Artifact]
    verifier: VerifierFacts
    shape: DraftShape | None
    rows: int
    tokens: int
    counted: str
    nodes: int
    rates: Mapping[str, Rate]


def know(
    config: RunConfig,
    store: Store | None,
    stages: Sequence[Stage],
    *,
    nodes: int,
    rates: Sequence[Path],
) -> Known:
    """Gather what a plan is made of.

    Args:
        store: the run's prefix, where it is known.
        stages: of the run.
        nodes: that share regenerate and extract.
        rates: JSON files with `<stage>_tokens_per_second` of one node; a later one counts more.

    Raises ConfigError, ManifestInvalid, and what a store raises that does not answer.
    """
    standing = _standing(config, store, stages)
    facts, text = _verifier(config, standing)
    rows, tokens, counted = _counted(config, standing)
    return Known(
        config=config,
        store=store,
        standing=standing,
        verifier=facts,
        shape=draft_shape(config, text),
        rows=rows,
        tokens=tokens,
        counted=counted,
        nodes=nodes,
        rates=_rates(standing, _given(rates), config),
    )


def _standing(
    config: RunConfig, store: Store | None, stages: Sequence[Stage]
) -> dict[str, Artifact]:
    """Kind -> the committed artefact that the run has or reads from another run."""
    places: dict[str, Store] = {}
    for stage in stages:
        for name, kinds in stage.reads.items():
            if (url := config.inputs.get(f"{stage.name}.{name}")) is not None:
                place = open_store(url)
                places |= {kind: place for kind in kinds if place.url.endswith(f"/{kind}")}
        if store is not None:
            places = {**{kind: store.child(kind) for kind in stage.writes}, **places}
    found = {kind: artifacts.find(place) for kind, place in places.items()}
    return {kind: artifact for kind, artifact in found.items() if artifact is not None}


def _verifier(
    config: RunConfig, standing: Mapping[str, Artifact]
) -> tuple[VerifierFacts, dict[str, Any]]:
    """The verifier's figures and its plain text config, of its artefact or of its own folder."""
    committed = standing.get("verifier")
    if committed is not None and committed.manifest.verifier is not None:
        return committed.manifest.verifier, json.loads(committed.read("config.json"))
    text = figures_at(config.verifier.source)
    if text is None:
        raise ConfigError(
            "verifier.source",
            wanted="a folder or a URL, or a run whose verifier/ is committed",
            found=f"{config.verifier.source}, of the hub, which a plan does not ask",
            remedy="give --verifier a local copy of its config.json's folder, or run prepare first",
        )
    facts = VerifierFacts(
        fingerprint="",
        num_hidden_layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
    )
    return facts, text


def _counted(config: RunConfig, standing: Mapping[str, Artifact]) -> tuple[int, int, str]:
    """(rows, tokens, where from): as prepare or a later stage counted, else by the files' bytes."""
    for kind in ("extract", "regenerate", "prepare"):
        if kind in standing:
            manifest = standing[kind].manifest
            return manifest.total_samples, manifest.total_tokens, f"counted by {kind}"
    size = sum(_text_bytes(path) for path in config.prepare.data)
    tokens = int(size / DATA_BYTES_PER_TOKEN)
    rows = -(-tokens // config.prepare.max_seq_len)
    told = f"estimated: {size:,} bytes of text at {DATA_BYTES_PER_TOKEN} a token, full rows"
    most = config.prepare.max_conversations
    if most is not None and tokens > most * config.prepare.max_seq_len:
        tokens, rows = most * config.prepare.max_seq_len, most
        told = f"at most: {most:,} conversations of {config.prepare.max_seq_len} tokens"
    return rows, tokens, told


def _text_bytes(path: str) -> int:
    """Bytes of the text in a file of conversations, or in all files that a pattern names."""
    return int(sum(size * _unpacked(url) for url, size in files_named(path)))


def _unpacked(name: str) -> float:
    return next((times for suffix, times in UNPACKED.items() if name.endswith(suffix)), 1.0)


def _given(paths: Sequence[Path]) -> dict[str, Rate]:
    """Stage -> rate, out of JSON files."""
    found: dict[str, Rate] = {}
    for path in paths:
        try:
            record = strict_json.decode(path.read_bytes(), dict[str, Any])
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(
                f"--rates {path}", wanted="a JSON object", found=error, remedy="correct it"
            ) from error
        for name in DEFAULT_RATES.keys() & record.keys():
            value = record[name]
            if not isinstance(value, int | float) or not 0 < value < 1e15:
                raise ConfigError(
                    f"{path}: {name}",
                    wanted="tokens a second of one node, above 0",
                    found=value,
                    remedy="correct it",
                )
            found[_stage_of(name)] = Rate(tokens_per_second=float(value), source=path.name)
    return found


def _rates(
    standing: Mapping[str, Artifact], given: Mapping[str, Rate], config: RunConfig
) -> dict[str, Rate]:
    """Stage -> its rate: as given, else as this run measured it, else assumed."""
    rates = {
        _stage_of(name): Rate(tokens_per_second=value, source="assumed")
        for name, value in DEFAULT_RATES.items()
    }
    for stage, figure in _MEASURED.items():
        measured = standing[stage].manifest.measured.get(figure) if stage in standing else None
        if measured:
            rates[stage] = Rate(tokens_per_second=measured, source="measured")
    if "train" in standing and "extract" in standing:
        seconds = standing["train"].manifest.measured.get("training_seconds")
        tokens = standing["extract"].manifest.total_tokens * config.train.epochs
        if seconds and tokens:
            rates["train"] = Rate(tokens_per_second=tokens / seconds, source="measured")
    return {**rates, **given}


def _stage_of(name: str) -> str:
    return name.removesuffix("_tokens_per_second")
