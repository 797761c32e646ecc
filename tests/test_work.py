"""Unfinished work: one owner per prefix, and units that are done once."""

from __future__ import annotations

import secrets

import pytest

from eagle3.config import ExtractConfig
from eagle3.config_fields import settings_that_affect
from eagle3.errors import IdentityConflict, ManifestInvalid, TemporaryFailure
from eagle3.manifest import FileEntry
from eagle3.store import Store, open_store
from eagle3.work import UnitRecord, Work

INPUTS = {"rows": "a" * 64, "verifier": "b" * 64}
SETTINGS = {"layer_ids": (2, 4, 5, 8), "engine": {"dtype": "bfloat16", "extra": {}}}


@pytest.fixture
def run() -> Store:
    return open_store(f"memory://work-{secrets.token_hex(4)}")


def claimed(run: Store, stage: str = "extract", **settings: object) -> Work:
    work = Work(run, stage)
    work.claim(INPUTS, {**SETTINGS, **settings})
    return work


def unit(number: int, **changes: object) -> UnitRecord:
    fields = {"unit": number, "rows_in": 3, "rows_kept": 2, "rejected": {"empty": 1}, **changes}
    return UnitRecord(**fields)


def test_the_same_work_claims_again_and_gets_the_same_identity(run):
    first = Work(run, "extract").claim(INPUTS, SETTINGS)
    assert Work(run, "extract").claim(dict(reversed(INPUTS.items())), SETTINGS) == first


def test_another_stage_s_claim_is_its_own(run):
    Work(run, "extract").claim(INPUTS, SETTINGS)
    Work(run, "vocab").claim(INPUTS, {"draft_vocab_size": 8192})


@pytest.mark.parametrize(
    ("inputs", "settings", "field"),
    [
        ({**INPUTS, "rows": "0" * 64}, SETTINGS, "inputs.rows"),
        (INPUTS, {**SETTINGS, "layer_ids": (3, 4, 5, 8)}, "layer_ids"),
        (INPUTS, {**SETTINGS, "engine": {"dtype": "float32", "extra": {}}}, "engine.dtype"),
        (INPUTS, {**SETTINGS, "engine": {"dtype": "bfloat16", "extra": {"a": 1}}}, "engine.extra"),
        (INPUTS, {**SETTINGS, "new": True}, "new"),
        ({"rows": INPUTS["rows"]}, SETTINGS, "inputs.verifier"),
    ],
)
def test_other_inputs_or_settings_are_refused_by_the_field_that_differs(
    run, inputs, settings, field
):
    Work(run, "extract").claim(INPUTS, SETTINGS)
    with pytest.raises(IdentityConflict) as caught:
        Work(run, "extract").claim(inputs, settings)
    assert caught.value.field.startswith(f"extract: {field}")
    assert f"`eagle3 run --config FILE --store {run.url}-2`" in str(caught.value)
    standing, mine = caught.value.wanted, caught.value.found
    assert standing.endswith(", with which this prefix was begun")
    assert mine != standing.partition(",")[0]


def test_a_real_section_claims_again(run):
    settings = settings_that_affect(ExtractConfig(layer_ids=(2, 4, 5, 8)))
    first = Work(run, "extract").claim(INPUTS, settings)
    assert Work(run, "extract").claim(INPUTS, settings) == first
    other = settings_that_affect(ExtractConfig(layer_ids=(2, 4, 5, 8), unit_rows=1))
    with pytest.raises(IdentityConflict, match="unit_rows"):
        Work(run, "extract").claim(INPUTS, other)


def test_a_finished_unit_is_found_with_everything_it_counted(run):
    record = unit(
        7,
        files=(FileEntry(path="hidden-000007.safetensors", bytes=9, sha256="c" * 64, samples=2),),
        token_counts={3: 2, 40000: 1},
        facts={"prefilled": 12},
        measured={"seconds": 0.5},
    )
    claimed(run).record(record)
    assert claimed(run).finished() == {7: record}


def test_the_first_worker_s_record_of_a_unit_stands(run):
    first, second = unit(0, measured={"seconds": 1.0}), unit(0, measured={"seconds": 2.0})
    assert claimed(run).record(first) == first
    assert claimed(run).record(second) == first
    assert claimed(run).finished() == {0: first}


def test_nothing_is_finished_before_anything_is(run):
    assert Work(run, "extract").finished() == {}


def test_a_damaged_record_is_named(run):
    work = claimed(run)
    work.own.write_bytes("units/000003.json", b'{"unit": 3, "rows_')
    with pytest.raises(ManifestInvalid, match=r"000003\.json"):
        work.finished()


@pytest.mark.parametrize("damaged", [b'{"inputs": {', b"[1]"])
def test_a_damaged_claim_is_named(run, damaged):
    run.write_bytes("work/extract/claim.json", damaged)
    with pytest.raises(ManifestInvalid, match=r"claim\.json: .*--store"):
        Work(run, "extract").claim(INPUTS, SETTINGS)


@pytest.mark.parametrize("name", [".DS_Store", "1.json", "000001.json.bak", "old/000001.json"])
def test_an_object_of_another_name_is_no_record(run, name):
    work = claimed(run)
    work.record(unit(3))
    work.own.write_bytes(f"units/{name}", b"")
    assert work.finished_units() == {3}
    assert work.finished() == {3: unit(3)}


def test_work_lies_beside_the_artefact_and_never_inside(run):
    work = claimed(run)
    work.record(unit(0))
    assert {info.path for info in run.list()} == {
        "work/extract/claim.json",
        f"work/extract/{work.identity[:16]}/units/000000.json",
    }


def test_what_each_worker_measured_is_kept_and_measured_anew_replaced(run):
    work = claimed(run)
    assert work.kept_figures("gate") == []
    work.keep_figures("gate", 1, {"nats": 0.5})
    work.keep_figures("gate", 0, {"nats": 0.25})
    work.keep_figures("gate", 1, {"nats": 0.75})
    assert work.kept_figures("gate") == [{"nats": 0.25}, {"nats": 0.75}]
    assert len(work.kept_figures("gate", required="nats")) == 2
    with pytest.raises(ManifestInvalid, match=r"gate/000000\.json: wanted the figure tokens"):
        work.kept_figures("gate", required="tokens")
    assert work.finished() == {}


def test_what_is_no_figures_is_refused(run):
    work = claimed(run)
    work.own.write_bytes("gate/000000.json", b"[1]")
    with pytest.raises(ManifestInvalid, match="figures"):
        work.kept_figures("gate")


def test_a_setting_that_came_to_be_later_and_is_null_changes_no_identity(run):
    first = Work(run, "extract").claim(INPUTS, {"a": 1})
    assert Work(run, "extract").claim(INPUTS, {"a": 1, "b": None}) == first
    assert claimed(open_store(f"{run.url}-2"), a=1).identity != first


def test_a_process_whose_claim_was_deleted_records_nothing_for_whoever_claims_next(run):
    stale = claimed(run)
    stale.record(unit(1))
    for info in run.list():
        run.delete(info.path)
    with pytest.raises(IdentityConflict, match=r"claim\.json.*, found none"):
        stale.record(unit(0))
    other = claimed(run, layer_ids=(3, 4, 5, 8))
    with pytest.raises(IdentityConflict, match=f"found one of {other.identity[:16]}"):
        stale.record(unit(0))
    # And what it was writing at that very moment is in no one's way.
    stale.own.write_bytes("units/000000.json", b"{}")
    stale.keep_figures("gate", 0, {"nats": 9.0})
    assert other.finished() == {}
    assert other.kept_figures("gate") == []
    other.record(unit(0))
    assert other.finished() == {0: unit(0)}


def test_a_claim_made_anew_for_the_same_goes_on(run):
    first = claimed(run)
    run.delete("work/extract/claim.json")
    claimed(run)
    first.record(unit(0))
    assert claimed(run).finished_units() == {0}


def test_while_a_deletion_is_going_on_nothing_is_claimed_or_recorded(run):
    work = claimed(run)
    run.write_bytes("work/extract/removal.json", b"{}")
    for attempt in (lambda: claimed(run), lambda: work.record(unit(0)), work.check_held):
        with pytest.raises(TemporaryFailure, match="let `eagle3 delete` finish"):
            attempt()
    assert work.finished_units() == frozenset()
    assert claimed(run, "vocab"), "another stage's is its own"


@pytest.mark.parametrize("path", ["claim.json", "units/000000.json"])
def test_what_is_deleted_between_two_looks_is_a_reason_to_try_again(run, monkeypatch, path):
    work = claimed(run)
    work.record(unit(0))
    plain = Store.read_bytes

    def gone(store: Store, asked: str) -> bytes:
        if asked == path:
            store.delete(path)
        return plain(store, asked)

    monkeypatch.setattr(Store, "read_bytes", gone)
    with pytest.raises(TemporaryFailure, match="an object that was there and is not") as caught:
        (claimed(run, new=True) if path == "claim.json" else work).finished()
    assert caught.value.exit_code == 75
