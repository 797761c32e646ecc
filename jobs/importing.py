"""`eagle3 import`: a folder of version 1 becomes the verifier, rows and states of a run.

Commits `verifier/`, `prepare/` (the rows with their masks, without messages) and `extract/`, so
that vocab, train and export go on from them. Both stages are claimed before the first object is
written, by the bytes of every sample. Called again after a kill it goes over the folder again and
finds its own objects, byte for byte.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from eagle3.artifact import Artifact
from eagle3.capture import Head
from eagle3.config import RunConfig
from eagle3.errors import ConfigError
from eagle3.legacy import (
    CONVENTION,
    Cut,
    OldFolder,
    Proof,
    Taken,
    inputs_of,
    prove_states,
    take_over,
)
from eagle3.manifest import (
    FINAL_HIDDEN_STATE,
    LAYER_ID_CONVENTION,
    STATES_DTYPE,
    Manifest,
    totals,
)
from eagle3.stages import stage_named
from eagle3.store import Store
from eagle3.verifier import Verifier, open_verifier
from jobs.arguments import arguments, load_run
from jobs.kept_verifier import commit_verifier
from jobs.process import StageRun, guarded


def take_in(source: str, config: RunConfig, store: Store) -> str:
    """Check the folder and the verifier, claim, write, commit three artefacts.

    Returns a sentence for the person. Raises as `OldFolder`, `take_over` and `open_verifier`, and
    IdentityConflict where the prefix holds other work.
    """
    refuse_regenerate(config)
    old = OldFolder(source)
    verifier = open_verifier(config.verifier)
    old.check_verifier(verifier.facts())
    layer_ids = inputs_of(old.manifest.layer_ids, verifier.num_hidden_layers, old.where())
    # Before the claim: a verifier that cannot be is not held against the next one.
    proof = prove_states(OldFolder(source), head_of(verifier))
    store.probe()
    imported = {
        "data_format_version": old.manifest.data_format_version,
        "layer_ids": list(old.manifest.layer_ids),
        "layer_id_convention": CONVENTION,
        "mapping_sha256": old.mapping_sha256(),
    }
    run = StageRun(stage=stage_named("prepare"), config=config, store=store, inputs={})
    with run.progress("hash", total=old.manifest.total_samples, unit="rows") as progress:
        samples = old.measure(progress.advance)
    identity = run.claim(inputs=digests(old, samples, verifier), settings={"imported": imported})
    states_run = replace(run, stage=stage_named("extract"))
    of_states = claim_states(states_run, identity, verifier, layer_ids, imported)
    if run.committed(identity) and (done := states_run.committed(of_states)):
        return f"already taken over, {done.manifest.total_samples} samples"
    upstream = {"verifier": commit_verifier(run, verifier)}
    with run.progress("import", total=old.manifest.total_samples, unit="rows") as progress:
        taken = take_over(
            old,
            rows=run.output(),
            states=states_run.output(),
            identity=of_states,
            settings=cut_of(config),
            told=progress.advance,
        )
    upstream["rows"] = run.commit(rows_manifest(old, taken, verifier, imported, identity))
    states_run = replace(states_run, inputs=upstream)
    claim_states(states_run, identity, verifier, layer_ids, imported)
    manifest = states_manifest(old, taken, upstream, layer_ids, of_states, proof)
    states = states_run.commit(manifest)
    return (
        f"took over {states.manifest.total_samples} samples, {states.manifest.total_tokens} tokens "
        f"at layers {', '.join(map(str, layer_ids))}, which were called "
        f"{', '.join(map(str, old.manifest.layer_ids))}; {sum(taken.rejected.values())} left out"
    )


def refuse_regenerate(config: RunConfig) -> None:
    """Later stages would look for the answers of a stage that this run cannot have."""
    if config.regenerate.enabled:
        raise ConfigError(
            "regenerate.enabled",
            wanted="false, since imported rows are answered and cannot be asked again",
            found="true",
            remedy="write regenerate: {enabled: false}",
        )


def head_of(verifier: Verifier) -> Head:
    """What turns the verifier's last states into logits."""
    tensors = verifier.three_tensors()
    eps = float(verifier.text_config["rms_norm_eps"])
    return Head(norm=tensors.norm, lm_head=tensors.lm_head, eps=eps)


def cut_of(config: RunConfig) -> Cut:
    """How the configuration has rows and states cut."""
    return Cut(
        shard_rows=config.prepare.shard_rows,
        unit_rows=config.extract.unit_rows,
        unit_bytes=config.extract.unit_bytes,
        max_rejected_share=config.extract.max_rejected_share,
    )


def digests(old: OldFolder, samples: str, verifier: Verifier) -> dict[str, str]:
    """What tells this import from another: the folder's small files, its samples, the verifier."""
    small = {source.url.rpartition("/")[2]: source.sha256 for source in old.sources}
    return {
        **small,
        "samples": samples,
        "verifier": verifier.facts().fingerprint,
        "tokenizer": verifier.tokenizer_facts().fingerprint,
    }


def claim_states(
    run: StageRun,
    rows: str,
    verifier: Verifier,
    layer_ids: Sequence[int],
    imported: Mapping[str, Any],
) -> str:
    """Claim extract's prefix, with the ids of today and those of then; returns the identity.

    Args:
        rows: the identity of the imported rows, of which there is no digest before the states
            are written; a stage that captured states of its own names the digest.
    """
    return run.claim(
        inputs={"rows": rows, "verifier": verifier.facts().fingerprint},
        settings={"layer_ids": list(layer_ids), "imported": imported},
    )


def rows_manifest(
    old: OldFolder, taken: Taken, verifier: Verifier, imported: dict[str, Any], identity: str
) -> Manifest:
    """The rows, with every file of the old folder as their source."""
    samples, tokens = totals(taken.rows)
    return Manifest(
        artifact="prepare",
        identity=identity,
        files=taken.rows,
        sources=old.sources,
        verifier=verifier.facts(),
        tokenizer=verifier.tokenizer_facts(),
        rows_in=taken.rows_in,
        rows_kept=samples,
        rejected=taken.rejected,
        total_samples=samples,
        total_tokens=tokens,
        max_seq_len=old.manifest.max_seq_len,
        facts={
            "imported": imported,
            "longest_row": taken.longest_row,
            "supervised_tokens": taken.supervised_tokens,
            "heldout_prompts": 0,
        },
    )


def states_manifest(
    old: OldFolder,
    taken: Taken,
    upstream: Mapping[str, Artifact],
    layer_ids: tuple[int, ...],
    identity: str,
    proof: Proof,
) -> Manifest:
    """The states, with the ids of today and those of then, and what proved them."""
    samples, tokens = totals(taken.states)
    source = upstream["verifier"].manifest
    return Manifest(
        artifact="extract",
        identity=identity,
        files=taken.states,
        verifier=source.verifier,
        tokenizer=source.tokenizer,
        rows_in=samples,
        rows_kept=samples,
        total_samples=samples,
        total_tokens=tokens,
        facts={"imported": upstream["rows"].manifest.facts["imported"]},
        measured=proof.as_measured(),
        model_path=old.manifest.model_path,
        layer_ids=layer_ids,
        max_seq_len=old.manifest.max_seq_len,
        tp_size=old.manifest.tp_size,
        total_time_seconds=old.manifest.total_time_seconds,
        hidden_size=old.manifest.hidden_size,
        num_layers_captured=len(layer_ids),
        layer_id_convention=LAYER_ID_CONVENTION,
        final_hidden_state=FINAL_HIDDEN_STATE,
        dtype=STATES_DTYPE,
        codec="none",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Import as this process, which needs torch; returns its exit code."""
    return guarded("import", lambda: _import(argv))


def _import(argv: Sequence[str] | None) -> None:
    found = arguments("importing", argv)
    config, store = load_run(found)
    print(f"import: {take_in(found.source, config, store)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
