"""regenerate: the verifier answers the prompts itself, turn by turn.

A draft learns best from what it will have to foresee. Conversations are answered in units, each
unit together, and written as token shards of prepare's form. A unit's answers follow from its
conversations, the settings and the seed alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec

from eagle3 import artifact as artifacts
from eagle3.artifact import Artifact
from eagle3.capture import Generator
from eagle3.conversations import RowRecord, read_row_records
from eagle3.errors import ConversationsInvalid
from eagle3.manifest import Manifest
from eagle3.onpolicy import Answerer, Plan, plan_answers, write_answers
from eagle3.units import UnitReader, merge, merge_token_counts, walk_units
from eagle3.verifier import LoadedVerifier, load_verifier_artifact, reopen_verifier
from eagle3.vllm_capture import EngineOptions, VllmGenerator
from eagle3.vocab import COUNTS_NAME, counts_from_dict, encode_counts
from jobs.process import StageRun, run_stage

StartGenerator = Callable[[Path, Plan], Generator]
"""Starts an engine, given a folder with the whole verifier and the plan."""


def story(run: StageRun, start: StartGenerator) -> str:
    """Claim, answer what nobody has answered, merge the units' records, commit."""
    settings = run.config.regenerate
    plan = plan_answers(run.inputs["rows"], settings)
    # Which prompts share a step decides which random numbers each draws.
    together = {"engine.max_num_seqs": settings.engine.max_num_seqs}
    identity = run.claim(settings=together if settings.temperature > 0 else None)
    if done := run.committed(identity):
        return f"already committed, {done.manifest.total_samples} rows"
    plan = plan.under(identity)
    if len(run.work.finished_units()) < len(plan.units):
        with run.scratch() as scratch:
            verifier = load_verifier_artifact(
                run.inputs["verifier"],
                scratch / "verifier",
                trust_remote_code=run.config.verifier.trust_remote_code,
            )
            source = reopen_verifier(run.config.verifier, run.inputs["verifier"])
            with closing(start(source.local_folder(scratch), plan)) as generator:
                answer_units(run, plan, verifier, generator)
    manifest = finished_manifest(run, plan)
    run.commit(manifest)
    return (
        f"wrote {manifest.total_samples} rows, {manifest.total_tokens} tokens; "
        f"{manifest.facts['turns']} answers, {manifest.facts['clipped']} of them cut at "
        f"{settings.max_new_tokens} tokens; {sum(manifest.rejected.values())} of "
        f"{manifest.rows_in} conversations rejected, "
        f"{manifest.measured['tokens_per_second']:.0f} tokens/s"
    )


def answer_units(run: StageRun, plan: Plan, verifier: LoadedVerifier, generator: Generator) -> None:
    """Have every open unit answered; each is written and recorded when it is done."""
    rows = run.inputs["rows"]
    reader = UnitReader(partial(records_beside, rows), rows.manifest.files)
    answerer = Answerer(generator, verifier, plan, run.check_stop)
    with run.progress("answer", total=plan.num_rows, unit="rows") as progress:
        for unit in walk_units(plan.units, run.work, progress, run.index):
            since = time.monotonic()
            chats = answerer.answer(unit, reader.read(unit), progress.under_way)
            seconds = time.monotonic() - since
            run.work.check_held()
            run.work.record(write_answers(run.output(), verifier, plan, unit, chats, seconds))


def records_beside(rows: Artifact, path: str) -> Sequence[RowRecord]:
    """The records of prepare's rows, which lie beside the shard of the same name."""
    return read_row_records(rows, f"{path.removesuffix('.safetensors')}.jsonl")


def finished_manifest(run: StageRun, plan: Plan) -> Manifest:
    """Write the token counts of all units, and the manifest that goes with them.

    Raises ConversationsInvalid where no conversation was answered.
    """
    records = run.work.finished()
    merged = merge("regenerate", plan.identity, plan.units, records)
    if not merged.total_samples:
        raise ConversationsInvalid(
            "regenerate",
            wanted="at least one answered conversation",
            found=", ".join(f"{count} {reason}" for reason, count in merged.rejected.items()),
            remedy="lower regenerate.max_new_tokens or raise prepare.max_seq_len",
        )
    source = run.inputs["verifier"].manifest
    assert source.verifier is not None, "a verifier artefact's manifest names its verifier"
    counts = counts_from_dict(merge_token_counts(records.values()), source.verifier.vocab_size)
    data = encode_counts(counts)
    entry = artifacts.put(run.output(), COUNTS_NAME, data)
    seconds = merged.measured.get("answer_seconds", 0.0)
    rate = merged.facts["supervised_tokens"] / seconds if seconds else 0.0
    return msgspec.structs.replace(
        merged,
        files=(*merged.files, entry),
        verifier=source.verifier,
        tokenizer=source.tokenizer,
        max_seq_len=plan.max_seq_len,
        measured={**merged.measured, "tokens_per_second": rate},
    )


def start_vllm(run: StageRun, model: Path, plan: Plan) -> Generator:
    """vLLM on the whole verifier."""
    run.say("starting vLLM")
    options = EngineOptions.of(
        plan.settings.engine,
        model=model,
        max_model_len=plan.max_seq_len,
        trust_remote_code=run.config.verifier.trust_remote_code,
        between_steps=run.check_stop,
    )
    return VllmGenerator(options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stage as this process; returns its exit code."""
    return run_stage("regenerate", lambda run: story(run, partial(start_vllm, run)), argv)


if __name__ == "__main__":
    sys.exit(main())
