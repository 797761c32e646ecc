"""extract: the verifier's hidden states of every token row, captured by vLLM.

The rows are cut into units; each unit becomes one shard and one record, so that any number of
workers share the work and a killed one loses a unit or two. Nothing that the engine hands over
is believed: the numeric gate first, then every row on its own.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from eagle3 import vllm_capture
from eagle3.capture import Capture, as_stored, check_states, numeric_gate
from eagle3.config import EngineConfig
from eagle3.errors import CaptureInvalid, ManifestInvalid, ShardInvalid
from eagle3.manifest import (
    FINAL_HIDDEN_STATE,
    LAYER_ID_CONVENTION,
    STATES_DTYPE,
    Manifest,
)
from eagle3.shards import (
    Sample,
    ShardReader,
    TokenRow,
    encode_samples,
    read_rows,
    same_tokens,
)
from eagle3.store import Store
from eagle3.units import (
    Unit,
    UnitReader,
    Writers,
    WrittenUnit,
    cut_units,
    merge,
    open_units,
    write_unit,
)
from eagle3.verifier import LoadedVerifier, load_verifier_artifact, open_verifier
from eagle3.work import UnitRecord
from jobs.process import StageRun, run_stage

# Units being written while the next is captured; each holds a unit's states in memory.
_WRITERS = 2


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is captured, and in which units."""

    layer_ids: tuple[int, ...]
    hidden_size: int
    max_seq_len: int
    engine: EngineConfig
    units: tuple[Unit, ...]

    @property
    def num_rows(self) -> int:
        """Rows of all units."""
        return sum(unit.num_rows for unit in self.units)


StartCapture = Callable[[Path, Plan], Capture]
"""Starts an engine, given a folder with the whole verifier and the plan."""


@dataclass(frozen=True, kw_only=True)
class CapturedUnit:
    """A unit's rows, the samples made of the good ones, and the others' names and reasons."""

    unit: Unit
    rows: Sequence[TokenRow]
    samples: Sequence[Sample]
    rejected: Mapping[str, str]


def story(run: StageRun, start: StartCapture) -> str:
    """Claim, capture what nobody has captured, merge the units' records, commit."""
    with run.scratch() as scratch:
        verifier = load_verifier_artifact(
            run.inputs["verifier"],
            scratch / "verifier",
            trust_remote_code=run.config.verifier.trust_remote_code,
        )
        plan = make_plan(run, verifier)
        identity = run.claim(settings={"layer_ids": list(plan.layer_ids)})
        if done := run.committed(identity):
            return f"already committed, {done.manifest.total_samples} samples"
        figures: dict[str, float] = {}
        if len(run.work.finished_units()) < len(plan.units):
            figures = capture_units(run, plan, verifier, start)
        manifest = finished_manifest(run, plan, identity, figures)
        run.commit(manifest)
    return (
        f"wrote {manifest.total_samples} samples, {manifest.total_tokens} tokens at layers "
        f"{', '.join(map(str, plan.layer_ids))}, {sum(manifest.rejected.values())} rows rejected, "
        f"{manifest.measured['tokens_per_second']:.0f} tokens/s"
    )


def make_plan(run: StageRun, verifier: LoadedVerifier) -> Plan:
    """Resolve the layer ids and cut the units. Raises ConfigError, ManifestInvalid."""
    settings, rows = run.config.extract, run.inputs["rows"]
    if rows.manifest.max_seq_len is None:
        raise ManifestInvalid(
            f"{rows.store.url}: max_seq_len",
            wanted="the longest row allowed",
            found="none",
            remedy="run prepare again under a prefix of its own",
        )
    return Plan(
        layer_ids=verifier.layer_ids(settings.layer_ids),
        hidden_size=verifier.hidden_size,
        max_seq_len=rows.manifest.max_seq_len,
        engine=settings.engine,
        units=cut_units(rows.manifest.files, settings.unit_rows),
    )


def capture_units(
    run: StageRun, plan: Plan, verifier: LoadedVerifier, start: StartCapture
) -> dict[str, float]:
    """Start the engine, pass the gate, capture every open unit; returns the gate's figures.

    A unit is encoded and written while the next one is captured.
    """
    rows = run.inputs["rows"]
    reader = UnitReader(partial(read_rows, rows.store), rows.manifest.files)
    rejected: Counter[str] = Counter()
    source = open_verifier(run.config.verifier)
    source.must_be(verifier.facts())
    with run.scratch() as scratch, closing(start(source.local_folder(scratch), plan)) as capture:
        figures = pass_gate(capture, reader.read(plan.units[0]), verifier)
        with (
            run.progress("capture", total=plan.num_rows, unit="rows") as progress,
            Writers(_WRITERS) as writers,
        ):
            finished = run.work.finished_units()
            done = (unit.num_rows for unit in plan.units if unit.number in finished)
            progress.advance(sum(done), resumed=True)
            since = time.monotonic()
            for unit in open_units(plan.units, run.work.is_finished, run.index):
                captured = capture_unit(capture, plan, unit, reader.read(unit))
                rejected.update(captured.rejected.values())
                check_rejected(run, rejected, plan.num_rows)
                # Waiting for the writers counts too, with the unit after.
                seconds, since = time.monotonic() - since, time.monotonic()
                writers.submit(partial(record_unit, run, plan, captured, seconds))
                progress.advance(unit.num_rows)
                run.check_stop()
    return figures


def pass_gate(
    capture: Capture, rows: Sequence[TokenRow], verifier: LoadedVerifier
) -> dict[str, float]:
    """The numeric gate on the longest of these rows. Raises CaptureInvalid."""
    tensors = verifier.three_tensors()
    longest = max(rows, key=lambda row: len(row.input_ids))
    figures = numeric_gate(
        capture,
        longest.input_ids.tolist(),
        norm_weight=tensors.norm,
        lm_head=tensors.lm_head,
        eps=float(verifier.text_config["rms_norm_eps"]),
    )
    return {
        "gate_tokens": figures.num_tokens,
        "gate_mean_nats": figures.mean_difference,
        "gate_max_nats": figures.max_difference,
        "gate_nearest_other_layer_nats": min(figures.other_layers),
    }


def capture_unit(
    capture: Capture, plan: Plan, unit: Unit, rows: Sequence[TokenRow]
) -> CapturedUnit:
    """Capture a unit's rows and look at each. Raises CaptureInvalid for what no row is to blame."""
    samples: list[Sample] = []
    rejected: dict[str, str] = {}
    prompts = [row.input_ids.tolist() for row in rows]
    for row, ids, got in zip(rows, prompts, capture.capture(prompts), strict=True):
        reason = check_states(
            got, ids, num_layers=len(plan.layer_ids), hidden_size=plan.hidden_size
        )
        states = None if reason else as_stored(got.hidden_states)
        if states is not None:
            samples.append(
                Sample(
                    row=row.row,
                    input_ids=row.input_ids,
                    loss_mask=row.loss_mask,
                    hidden_states=states,
                )
            )
        else:
            rejected[row.row] = reason or "non_finite"
    return CapturedUnit(unit=unit, rows=rows, samples=samples, rejected=rejected)


def record_unit(run: StageRun, plan: Plan, captured: CapturedUnit, seconds: float) -> UnitRecord:
    """Write a unit's object, then its record: only with the record is the unit done."""
    number, written = captured.unit.number, None
    if captured.samples:
        names = {sample.row for sample in captured.samples}
        written = write_unit(
            run.output(),
            f"hidden-{number:06d}.safetensors",
            encode_samples(captured.samples),
            [row for row in captured.rows if row.row in names],
        )
        if written.adopted:
            check_adopted(run.output(), written, plan, captured.rows)
    kept = {row.row for row in written.rows} if written else set()
    lost = [row.row for row in captured.rows if row.row not in kept]
    reasons = Counter(captured.rejected.get(row, "rejected_by_another_worker") for row in lost)
    return run.work.record(
        UnitRecord(
            unit=number,
            rows_in=len(captured.rows),
            rows_kept=len(kept),
            files=(written.entry,) if written else (),
            rejected=dict(reasons),
            measured={"capture_seconds": seconds},
        )
    )


def check_adopted(store: Store, written: WrittenUnit, plan: Plan, rows: Sequence[TokenRow]) -> None:
    """An object that another worker left must hold rows of this unit, at our layers, and finite.

    Raises ShardInvalid.
    """
    ours = {row.row: row for row in rows}
    reader = ShardReader(store, written.entry.path)
    for ref in reader.refs():
        sample, row = reader.read(ref, finite=True), ours.get(ref.row)
        right = (
            row is not None
            and same_tokens(sample, row)
            and sample.hidden_states.shape[1:] == (len(plan.layer_ids), plan.hidden_size)
        )
        if not right:
            raise ShardInvalid(
                f"{store.url}/{written.entry.path}: {ref.row}",
                wanted="a row of this unit with states of these layers",
                found="another",
                remedy="delete the object, which no record names, and run again",
            )


def check_rejected(run: StageRun, rejected: Mapping[str, int], num_rows: int) -> None:
    """Raises CaptureInvalid when more rows are rejected than the configuration allows."""
    share = run.config.extract.max_rejected_share
    if sum(rejected.values()) > share * num_rows:
        raise CaptureInvalid(
            "captured hidden_states",
            wanted=f"at most {share:.1%} of {num_rows} rows rejected",
            found=", ".join(f"{count} {reason}" for reason, count in sorted(rejected.items())),
            remedy="look at the engine's dtype and kernels, or raise extract.max_rejected_share",
        )


def finished_manifest(
    run: StageRun, plan: Plan, identity: str, figures: Mapping[str, float]
) -> Manifest:
    """The manifest of all units, with the ten fields that readers of version 1 know."""
    merged = merge("extract", identity, plan.units, run.work.finished())
    if merged.rows_in != plan.num_rows:
        raise ManifestInvalid(
            "work/extract/units",
            wanted=f"records of all {plan.num_rows} rows of the input",
            found=f"{merged.rows_in} rows",
            remedy="give the run a store prefix of its own and extract again",
        )
    check_rejected(run, merged.rejected, plan.num_rows)
    source = run.inputs["verifier"].manifest
    seconds = merged.measured.get("capture_seconds", 0.0)
    rate = merged.total_tokens / seconds if seconds else 0.0
    return msgspec.structs.replace(
        merged,
        verifier=source.verifier,
        tokenizer=source.tokenizer,
        facts={"engine_dtype": plan.engine.dtype, "prefill": "one_shot"},
        measured={**merged.measured, **figures, "tokens_per_second": rate},
        model_path=run.config.verifier.source,
        layer_ids=plan.layer_ids,
        max_seq_len=plan.max_seq_len,
        tp_size=plan.engine.tensor_parallel_size,
        total_time_seconds=seconds,
        hidden_size=plan.hidden_size,
        num_layers_captured=len(plan.layer_ids),
        layer_id_convention=LAYER_ID_CONVENTION,
        final_hidden_state=FINAL_HIDDEN_STATE,
        dtype=STATES_DTYPE,
        codec="none",
    )


def start_vllm(run: StageRun, model: Path, plan: Plan) -> Capture:
    """vLLM on the whole verifier."""
    options = vllm_capture.EngineOptions(
        model=model,
        max_model_len=plan.max_seq_len + 1,
        dtype=plan.engine.dtype,
        tensor_parallel_size=plan.engine.tensor_parallel_size,
        max_num_seqs=plan.engine.max_num_seqs,
        gpu_memory_utilization=plan.engine.gpu_memory_utilization,
        trust_remote_code=run.config.verifier.trust_remote_code,
        extra=plan.engine.extra,
    )
    return vllm_capture.VllmCapture(options, layer_ids=plan.layer_ids)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stage as this process; returns its exit code."""
    return run_stage("extract", lambda run: story(run, partial(start_vllm, run)), argv)


if __name__ == "__main__":
    sys.exit(main())
