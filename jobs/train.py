"""train: hidden states and a draft vocabulary to a draft, by speculators' own trainer.

On a node with several GPUs it starts a process for each; under torchrun, over several nodes, it
is one of those. The first rank alone writes. Checkpoints go to the store as they are made, and a
training that was stopped or killed goes on from the newest. Writes `draft/` (the trained draft),
`untrained/` (the draft before its first step) and `metrics.jsonl` (the curve).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from eagle3 import artifact as artifacts
from eagle3.artifact import Artifact
from eagle3.draft.checkpoints import (
    CURVE_NAME,
    DRAFT,
    DRAFT_FILES,
    UNTRAINED,
    Checkpoints,
    Marker,
)
from eagle3.draft.launch import launch, num_processes
from eagle3.draft.metrics import CurvePoint, encode_curve
from eagle3.draft.training import Layout, Ranks, Session, last_validation, lay_out
from eagle3.errors import DraftInvalid, IdentityConflict, TemporaryFailure
from eagle3.manifest import FileEntry, Manifest
from eagle3.progress import Progress
from eagle3.store import Store
from eagle3.verifier import load_verifier_artifact
from eagle3.vocab import load_mapping
from jobs.process import StageRun, records_of_ranks, run_stage


def story(run: StageRun) -> str:
    """Lay out what upstream reads, train to the last step, commit the draft."""
    ranks = Ranks.from_environment()
    processes = 1 if ranks.launched else num_processes(run.config.train.processes)
    identity = run.claim(settings={"world_size": ranks.world_size * processes})
    if done := run.committed(identity):
        return _already(done)
    if processes > 1:
        return _launched(run, identity, processes)
    config = run.config.train
    checkpoints = Checkpoints(
        run.work.own, scheduled=config.scheduler != "none", before_save=run.work.check_held
    )
    if not ranks.rank:
        run.say("starting the trainer")
    with run.scratch() as scratch:
        layout = _layout(run, scratch, ranks)
        with _progress(run, ranks, layout.plan.total) as progress:
            session = Session(layout, checkpoints, lambda: run.stopping, progress)
            final = session.run(config)
        if ranks.rank:
            return f"rank {ranks.rank} done, {layout.plan.total} steps"
        made = _manifest(run, identity, layout, ranks, session.curve)
        run.work.check_held()
        try:
            files = _publish(run.output(), checkpoints, final, session.curve, scratch)
            run.commit(msgspec.structs.replace(made, files=files))
        except IdentityConflict:
            # Another live process of this run may have come first, with other last bits.
            if (done := run.committed(identity)) is None:
                raise
            return _already(done)
    loss = session.curve[-1].loss
    return f"trained {layout.plan.total} steps on {layout.split.num_train} rows, loss {loss:.3f}"


def _already(done: Artifact) -> str:
    return f"already committed, {done.manifest.facts['steps']} steps"


def _layout(run: StageRun, scratch: Path, ranks: Ranks) -> Layout:
    """All that upstream reads, from the three inputs, below the scratch folder."""
    verifier = load_verifier_artifact(
        run.inputs["verifier"], scratch, trust_remote_code=run.config.verifier.trust_remote_code
    )
    mapping = load_mapping(
        run.inputs["vocab"], vocab_size=verifier.vocab_size, required_ids=verifier.required_ids
    )
    return lay_out(run.config.train, run.inputs["states"], mapping, verifier, scratch, ranks)


def _launched(run: StageRun, identity: str, processes: int) -> str:
    """Train with several processes, which run this same story. SystemExit with their code."""
    with run.scratch() as scratch:
        config = scratch / "run.yaml"
        # JSON is YAML, and this is the configuration as this process has resolved it.
        config.write_bytes(msgspec.json.encode(run.config))
        arguments = ["-m", "jobs.train", "--config", str(config), "--store", run.store.url]
        records = scratch / "records"
        records.mkdir()
        with records_of_ranks(records):
            code = launch(processes, arguments, records)
        if code:
            # The process that failed has said why, and its record is this one's.
            raise SystemExit(code)
    done = run.committed(identity)
    if done is None:
        raise TemporaryFailure(
            f"{run.output().url}",
            wanted="the artefact that the processes were to commit",
            found="none, though each of them succeeded",
            remedy="run train again",
        )
    return f"trained {done.manifest.facts['steps']} steps with {processes} processes"


@contextlib.contextmanager
def _progress(run: StageRun, ranks: Ranks, total: int) -> Iterator[Progress | None]:
    """The first rank's bar; the others show none."""
    if ranks.rank:
        yield None
        return
    with run.progress("steps", total=total, unit="steps") as progress:
        yield progress


def _manifest(
    run: StageRun, identity: str, layout: Layout, ranks: Ranks, curve: list[CurvePoint]
) -> Manifest:
    """What is known of the artefact before its objects are put in place."""
    states = run.inputs["states"].manifest
    return Manifest(
        artifact="train",
        identity=identity,
        files=(),
        verifier=states.verifier,
        tokenizer=states.tokenizer,
        rows_in=states.total_samples,
        rows_kept=states.total_samples,
        facts=_facts(run, layout, ranks, curve),
        measured={"training_seconds": curve[-1].seconds},
    )


def _facts(run: StageRun, layout: Layout, ranks: Ranks, curve: list[CurvePoint]) -> dict[str, Any]:
    """What export and the report need to know of the training."""
    return {
        "steps": layout.plan.total,
        "epochs": len(layout.plan.steps_per_epoch),
        "world_size": ranks.world_size,
        "train_rows": layout.split.num_train,
        "validation_rows": layout.split.num_validation,
        "supervised_tokens": layout.supervision.supervised,
        "out_of_vocabulary_tokens": layout.supervision.out_of_vocabulary,
        "aux_layer_ids": list(layout.aux_layer_ids),
        "draft_vocab_size": layout.draft_vocab_size,
        "mapping_sha256": run.inputs["vocab"].manifest.facts["mapping_sha256"],
        "layer_config": layout.layer,
        "norm_before_fc": run.config.train.norm_before_fc,
        "norm_output": run.config.train.norm_output,
        **last_validation(curve),
    }


def _publish(
    output: Store, checkpoints: Checkpoints, final: Marker, curve: list[CurvePoint], scratch: Path
) -> tuple[FileEntry, ...]:
    """Put the artefact's objects in place; a process that was killed here put the same."""
    untrained = checkpoints.untrained()
    if untrained is None:
        raise DraftInvalid(
            f"{checkpoints.url}/{UNTRAINED}",
            wanted="the draft before its first step, saved when training began",
            found="none",
            remedy="give the run a store prefix of its own and train again",
        )
    folder = scratch / "artifact"
    checkpoints.fetch(final, folder / DRAFT, names=DRAFT_FILES)
    checkpoints.fetch(untrained, folder / UNTRAINED)
    (folder / CURVE_NAME).write_bytes(encode_curve(curve))
    names = [f"{part}/{name}" for part in (DRAFT, UNTRAINED) for name in DRAFT_FILES]
    curve_entry = artifacts.put(output, CURVE_NAME, folder / CURVE_NAME, timed=True)
    return (*(artifacts.put(output, name, folder / name) for name in names), curve_entry)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stage as this process."""
    return run_stage("train", story, argv)


if __name__ == "__main__":
    sys.exit(main())
