"""extract: the verifier's hidden states of every token row, captured by vLLM.

The rows are cut into units; each unit becomes one shard and one record, so that any number of
workers share the work and a killed one loses a unit or two. Nothing that the engine hands over
is believed: the numeric gate first, then every row on its own.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec

from eagle3.capture import Capture, Head, gate_prompts, numeric_gate
from eagle3.capture.units import (
    CapturedUnit,
    Plan,
    capture_unit,
    check_rejected,
    plan_capture,
    write_captured,
)
from eagle3.errors import ManifestInvalid
from eagle3.manifest import FINAL_HIDDEN_STATE, LAYER_ID_CONVENTION, STATES_DTYPE, Manifest
from eagle3.shards import TokenRow, rows_of
from eagle3.units import UnitReader, Writers, merge, walk_units
from eagle3.verifier import LoadedVerifier, load_verifier_artifact, reopen_verifier
from eagle3.vllm_capture import EngineOptions, VllmCapture
from eagle3.work import UnitRecord
from jobs.process import StageRun, run_stage

# Units being written while the next is captured; each holds a unit's states in memory.
_WRITERS = 2
_WORST = "gate_worst_row_nats"

StartCapture = Callable[[Path, Plan, Path], Capture]
"""Starts an engine, given a folder with the whole verifier, the plan, and a folder where states
may pass through."""


def story(run: StageRun, start: StartCapture) -> str:
    """Claim, capture what nobody has captured, merge the units' records, commit."""
    with run.scratch() as scratch:
        verifier = load_verifier_artifact(
            run.inputs["verifier"],
            scratch / "verifier",
            trust_remote_code=run.config.verifier.trust_remote_code,
        )
        settings = run.config.extract
        plan = plan_capture(
            run.inputs["rows"],
            layer_ids=verifier.layer_ids(settings.layer_ids),
            hidden_size=verifier.hidden_size,
            unit_rows=settings.unit_rows,
            unit_bytes=settings.unit_bytes,
        )
        identity = run.claim(settings={"layer_ids": list(plan.layer_ids)})
        if done := run.committed(identity):
            return f"already committed, {done.manifest.total_samples} samples"
        plan = plan.under(identity)
        if len(run.work.finished_units()) < len(plan.units):
            source = reopen_verifier(run.config.verifier, run.inputs["verifier"])
            with closing(start(source.local_folder(scratch), plan, scratch)) as capture:
                capture_units(run, plan, verifier, capture)
    manifest = finished_manifest(run, plan)
    run.commit(manifest)
    return (
        f"wrote {manifest.total_samples} samples, {manifest.total_tokens} tokens at layers "
        f"{', '.join(map(str, plan.layer_ids))}, {sum(manifest.rejected.values())} rows rejected, "
        f"{manifest.measured['tokens_per_second']:.0f} tokens/s"
    )


def capture_units(run: StageRun, plan: Plan, verifier: LoadedVerifier, capture: Capture) -> None:
    """Pass the gate and capture every open unit, each written while the next is captured."""
    rows, max_share = run.inputs["rows"], run.config.extract.max_rejected_share
    reader = UnitReader(partial(rows_of, rows), rows.manifest.files)
    pass_gate(run, plan, verifier, capture, map(reader.read, plan.units))
    rejected: Counter[str] = Counter()
    with (
        run.progress("capture", total=plan.num_rows, unit="rows") as progress,
        Writers(_WRITERS) as writers,
    ):
        since = time.monotonic()
        for unit in walk_units(plan.units, run.work, progress, run.index):
            captured = capture_unit(
                capture, plan, unit, reader.read(unit), run.check_stop, progress.under_way
            )
            rejected.update(captured.rejected.values())
            check_rejected(rejected, plan.num_rows, max_share)
            # Waiting for the writers counts too, with the unit after.
            seconds, since = time.monotonic() - since, time.monotonic()
            writers.submit(partial(record_unit, run, plan, captured, seconds))


def pass_gate(
    run: StageRun,
    plan: Plan,
    verifier: LoadedVerifier,
    capture: Capture,
    units: Iterable[Sequence[TokenRow]],
) -> None:
    """The numeric gate on rows of these units; its figures are kept for whoever commits."""
    tensors = verifier.three_tensors()
    eps = float(verifier.text_config["rms_norm_eps"])
    head = Head(norm=tensors.norm, lm_head=tensors.lm_head, eps=eps)
    prompts = gate_prompts([row.input_ids for row in rows] for rows in units)
    figures = numeric_gate(capture, prompts, plan.layer_ids, head)
    run.work.keep_figures("gate", run.index, figures.as_measured())


def record_unit(run: StageRun, plan: Plan, captured: CapturedUnit, seconds: float) -> UnitRecord:
    """Write a unit's object, then its record: only with the record is the unit done."""
    run.work.check_held()
    return run.work.record(write_captured(run.output(), plan, captured, seconds))


def finished_manifest(run: StageRun, plan: Plan) -> Manifest:
    """The manifest of all units, with the ten fields that readers of version 1 know.

    The gate's figures are those of the worker whose engine came closest to failing.
    """
    merged = merge("extract", plan.identity, plan.units, run.work.finished())
    if merged.rows_in != plan.num_rows:
        raise ManifestInvalid(
            f"{run.work.own.url}/units",
            wanted=f"records of all {plan.num_rows} rows of the input",
            found=f"{merged.rows_in} rows",
            remedy="give the run a store prefix of its own and extract again",
        )
    settings = run.config.extract
    check_rejected(merged.rejected, plan.num_rows, settings.max_rejected_share)
    source = run.inputs["verifier"].manifest
    gates = run.work.kept_figures("gate", required=_WORST)
    figures = max(gates, key=lambda gate: gate[_WORST], default={})
    seconds = merged.measured.get("capture_seconds", 0.0)
    rate = merged.total_tokens / seconds if seconds else 0.0
    return msgspec.structs.replace(
        merged,
        verifier=source.verifier,
        tokenizer=source.tokenizer,
        facts={"engine_dtype": settings.engine.dtype, "prefill": "one_shot"},
        measured={**merged.measured, **figures, "tokens_per_second": rate},
        model_path=run.config.verifier.source,
        layer_ids=plan.layer_ids,
        max_seq_len=plan.max_seq_len,
        tp_size=settings.engine.tensor_parallel_size,
        total_time_seconds=seconds,
        hidden_size=plan.hidden_size,
        num_layers_captured=len(plan.layer_ids),
        layer_id_convention=LAYER_ID_CONVENTION,
        final_hidden_state=FINAL_HIDDEN_STATE,
        dtype=STATES_DTYPE,
        codec="none",
    )


def start_vllm(run: StageRun, model: Path, plan: Plan, scratch: Path) -> Capture:
    """vLLM on the whole verifier; one token more than the longest row, for the one it answers."""
    run.say("starting vLLM")
    options = EngineOptions.of(
        run.config.extract.engine,
        model=model,
        max_model_len=plan.max_seq_len + 1,
        trust_remote_code=run.config.verifier.trust_remote_code,
        between_steps=run.check_stop,
    )
    return VllmCapture(options, layer_ids=plan.layer_ids, scratch=scratch)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stage as this process; returns its exit code."""
    return run_stage("extract", lambda run: story(run, partial(start_vllm, run)), argv)


if __name__ == "__main__":
    sys.exit(main())
