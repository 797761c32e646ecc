"""Units of captured rows: what is captured, and how a unit's states become an object and a record.

A unit is bounded in rows and in bytes of hidden states, since a long row of a large verifier
alone takes gigabytes: 65,536 tokens of 4 layers of 7,168 bfloat16 numbers are 3.8 GB. Both bounds
and the rows' lengths decide the cut, so it is the same for every worker. At the worst a process
holds one unit being captured and two being written, each of those as tensors, as pieces of the
object and as the object: about seven times `unit_bytes` of main memory in bfloat16, and once (in
float32 twice) in the engine's scratch folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from eagle3.artifact import Artifact
from eagle3.capture.checks import as_stored, check_states
from eagle3.capture.protocols import Capture, Told
from eagle3.errors import CaptureInvalid, ShardInvalid
from eagle3.shards import Sample, ShardReader, TokenRow, encode_samples, same_tokens
from eagle3.store import Store
from eagle3.units import (
    Unit,
    WrittenUnit,
    adopt_unit,
    cut_units,
    longest_row,
    row_lengths,
    write_unit,
)
from eagle3.work import UnitRecord

_BFLOAT16_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is captured, and in which units; `identity` is that of the claim, once there is one."""

    layer_ids: tuple[int, ...]
    hidden_size: int
    max_seq_len: int
    units: tuple[Unit, ...]
    identity: str = ""

    @property
    def num_rows(self) -> int:
        """Rows of all units."""
        return sum(unit.num_rows for unit in self.units)

    def under(self, identity: str) -> Plan:
        """The same plan, for objects that name this identity."""
        return replace(self, identity=identity)


def plan_capture(
    rows: Artifact,
    *,
    layer_ids: tuple[int, ...],
    hidden_size: int,
    unit_rows: int,
    unit_bytes: int,
) -> Plan:
    """Cut the rows into units of at most `unit_rows` rows and `unit_bytes` of hidden states.

    A row that alone is larger is a unit of its own. The rows' lengths are read from the headers
    of their objects, but only where that many of the longest rows would be too large.

    Raises ManifestInvalid, ShardInvalid.
    """
    longest = longest_row(rows)
    unit_tokens = unit_bytes // (_BFLOAT16_BYTES * len(layer_ids) * hidden_size)
    lengths = row_lengths(rows) if unit_rows * longest > unit_tokens else None
    return Plan(
        layer_ids=layer_ids,
        hidden_size=hidden_size,
        max_seq_len=longest,
        units=cut_units(rows.manifest.files, unit_rows, unit_tokens=unit_tokens, lengths=lengths),
    )


@dataclass(frozen=True, kw_only=True)
class CapturedUnit:
    """A unit's rows, the samples made of the good ones, and the others' names and reasons."""

    unit: Unit
    rows: Sequence[TokenRow]
    samples: Sequence[Sample]
    rejected: Mapping[str, str]


def capture_unit(
    capture: Capture,
    plan: Plan,
    unit: Unit,
    rows: Sequence[TokenRow],
    check_stop: Callable[[], None],
    told: Told,
) -> CapturedUnit:
    """Capture a unit's rows and look at each.

    Args:
        check_stop: called before each row is waited for; what it raises gives the unit up, of
            which nothing has been written by then.
        told: hears after each row how many have been captured.

    Raises CaptureInvalid for what no row is to blame for.
    """
    samples: list[Sample] = []
    rejected: dict[str, str] = {}
    prompts = [row.input_ids.tolist() for row in rows]
    captured = capture.capture(prompts)
    for count, (row, ids) in enumerate(zip(rows, prompts, strict=True), start=1):
        check_stop()
        got = next(captured, None)
        assert got is not None, "one captured row for each that was sent"
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
        told(count)
    return CapturedUnit(unit=unit, rows=rows, samples=samples, rejected=rejected)


def write_captured(output: Store, plan: Plan, captured: CapturedUnit, seconds: float) -> UnitRecord:
    """Write a unit's object, if any row is good, and return the record to make of it.

    Where none is, another worker's object may stand: its good rows are not thrown away.

    Raises ShardInvalid where another worker's object stands that is not of this unit, and
    IdentityConflict where it is of other inputs or settings.
    """
    number = captured.unit.number
    path = f"hidden-{number:06d}.safetensors"
    written: WrittenUnit | None = None
    if captured.samples:
        names = {sample.row for sample in captured.samples}
        good = [row for row in captured.rows if row.row in names]
        data = encode_samples(captured.samples, identity=plan.identity)
        written = write_unit(output, path, data, good, identity=plan.identity)
    elif output.exists(path):
        written = adopt_unit(output, path, identity=plan.identity)
    if written and written.adopted:
        _check_adopted(output, written, plan, captured.rows)
    kept = {row.row for row in written.rows} if written else set()
    lost = [row.row for row in captured.rows if row.row not in kept]
    reasons = Counter(captured.rejected.get(row, "rejected_by_another_worker") for row in lost)
    return UnitRecord(
        unit=number,
        rows_in=len(captured.rows),
        rows_kept=len(kept),
        files=(written.entry,) if written else (),
        rejected=dict(reasons),
        measured={"capture_seconds": seconds},
    )


def _check_adopted(
    store: Store, written: WrittenUnit, plan: Plan, rows: Sequence[TokenRow]
) -> None:
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


def check_rejected(rejected: Mapping[str, int], num_rows: int, max_share: float) -> None:
    """Raises CaptureInvalid when more rows are rejected than `extract.max_rejected_share`."""
    if sum(rejected.values()) > max_share * num_rows:
        raise CaptureInvalid(
            "captured hidden_states",
            wanted=f"at most {max_share:.1%} of {num_rows} rows rejected",
            found=", ".join(f"{count} {reason}" for reason, count in sorted(rejected.items())),
            remedy="look at the engine's dtype and kernels, or raise extract.max_rejected_share",
        )
