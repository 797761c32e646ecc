"""`eagle3 delete`: nothing goes that something rests on, and nothing is left by halves."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import msgspec
import pytest

from eagle3 import artifact as artifacts
from eagle3.errors import ManifestInvalid, StillNeeded, TemporaryFailure, UpstreamMissing
from eagle3.progress import SILENT_SECONDS, ProgressRecord
from eagle3.removal import plan_removal, remove
from eagle3.store import Store, open_store
from eagle3.work import Work
from jobs import cli
from tests.s3_server import BUCKET, S3Server
from tests.upstreams import HIDDEN_STATES, VERIFIER, commit

STAGES_BEGUN = ("prepare", "extract", "vocab", "train")


def make_run(url: str) -> Store:
    """A run up to its draft, with claims, progress, and a summary."""
    store = open_store(url)
    verifier = commit(store, "verifier")
    rows = commit(store, "prepare", verifier=VERIFIER)
    below = {"rows": rows, "verifier": verifier}
    states = commit(store, "extract", inputs=below, **HIDDEN_STATES)
    vocab = commit(store, "vocab", inputs=below, facts={"draft_vocab_size": 64})
    commit(store, "train", inputs={"states": states, "vocab": vocab, "verifier": verifier})
    for stage in STAGES_BEGUN:
        Work(store, stage).claim({}, {"seed": stage})
        report(store, stage, updated_at=0.0)
    store.write_bytes("work/extract/units/000000.json", b"{}")
    store.write_bytes("summary.json", b"{}")
    return store


def report(store: Store, stage: str, *, updated_at: float) -> None:
    record = ProgressRecord(
        stage=stage,
        index=0,
        step="step",
        unit="rows",
        done=1,
        all=2,
        rate=1.0,
        seconds_left=None,
        host="host",
        updated_at=updated_at,
    )
    store.write_bytes(f"progress/{stage}-0.json", msgspec.json.encode(record))


@pytest.fixture
def run() -> Store:
    return make_run(f"memory://removal-{secrets.token_hex(4)}/runs/first")


@pytest.fixture
def run_on_disk(tmp_path: Path) -> Store:
    return make_run(f"file://{tmp_path}/runs/first")


def second(run: Store, url: str = "") -> Store:
    """Another run, whose training reads the first one's hidden states."""
    store = open_store(url or f"{run.url.removesuffix('first')}second")
    states = artifacts.find(run.child("extract"))
    assert states is not None
    commit(store, "train", inputs={"states": states})
    return store


def paths(store: Store) -> list[str]:
    return [info.path for info in store.list()]


def deleted(url: str, *also: str) -> None:
    remove(plan_removal(url, also), lambda count: None)


class Killed(BaseException):
    """kill -9, as seen from inside."""


def test_without_yes_nothing_is_deleted_and_that_is_said(run, capsys):
    before = paths(run)
    for options in ([], ["--dry-run"]):
        assert cli.main(["delete", run.child("train").url, *options]) == 0
        out = capsys.readouterr().out
        assert "nothing was deleted: --yes deletes these 5 objects" in out
        assert "train" in out
    assert paths(run) == before


def test_both_a_dry_run_and_the_deed_are_refused(run, capsys):
    assert cli.main(["delete", run.url, "--dry-run", "--yes"]) == 64
    assert paths(run)


def test_an_artefact_goes_with_its_work_and_nothing_else_does(run, capsys):
    before = paths(run)
    assert cli.main(["delete", run.child("train").url, "--yes"]) == 0
    gone = set(before) - set(paths(run))
    assert gone == {
        "train/data_config.json",
        "train/train-000000.safetensors",
        "train/train-000001.safetensors",
        "work/train/claim.json",
        "progress/train-0.json",
    }
    assert "deleted 5 objects of" in capsys.readouterr().out


def test_no_empty_folder_stays_on_a_disk(run_on_disk):
    deleted(run_on_disk.child("train").url)
    assert run_on_disk.folders("work") == ("extract", "prepare", "vocab")
    assert "train" not in run_on_disk.folders()
    deleted(run_on_disk.url)
    assert not run_on_disk.local_path().exists()


@pytest.mark.parametrize(
    ("kind", "by"),
    [("prepare", "extract"), ("extract", "train"), ("vocab", "train"), ("verifier", "train")],
)
def test_what_an_artefact_of_the_run_rests_on_is_refused_by_name(run, kind, by, capsys):
    before = paths(run)
    assert cli.main(["delete", run.child(kind).url, "--yes"]) == 65
    assert f"{by} in {run.url}/{by}" in capsys.readouterr().err
    assert paths(run) == before


def test_what_a_run_beside_it_rests_on_is_refused(run):
    other = second(run)
    for url in (run.child("extract").url, run.url):
        with pytest.raises(StillNeeded, match=f"train in {other.url}/train"):
            plan_removal(url)
    deleted(other.url)
    deleted(run.url)


def test_a_run_elsewhere_is_asked_where_it_is_named(run):
    elsewhere = run.url.replace("/runs/first", "/elsewhere")
    other = second(run, f"{elsewhere}/second")
    for also in (other.url, elsewhere, other.child("train").url):
        with pytest.raises(StillNeeded, match="elsewhere/second/train"):
            plan_removal(run.url, [also])
    assert plan_removal(run.url), "unnamed it is not looked for"


def test_a_named_place_without_any_artefact_is_no_protection_and_is_refused(run):
    with pytest.raises(UpstreamMissing, match="--also"):
        plan_removal(run.url, [f"{run.url}-typo"])


def test_a_reader_s_other_spelling_of_the_place_is_seen_through(run_on_disk, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(run_on_disk.local_path())
    second(open_store(f"file://{link}"), f"file://{tmp_path}/runs/second")
    with pytest.raises(StillNeeded, match="second/train"):
        plan_removal(run_on_disk.url)


def test_a_reader_of_another_copy_needs_this_one_only_when_that_is_gone(run):
    copy = make_run(run.url.replace("/runs/", "/copies/"))
    second(copy, f"{run.url.removesuffix('first')}second")
    deleted(run.child("train").url)
    plan_removal(run.child("extract").url)
    copy.delete("extract/data_config.json")
    with pytest.raises(StillNeeded, match="second/train"):
        plan_removal(run.child("extract").url)


def test_a_verifier_is_kept_while_the_rows_beside_it_stand(run):
    for kind in ("train", "vocab", "extract"):
        deleted(run.child(kind).url)
    with pytest.raises(StillNeeded, match="prepare in"):
        plan_removal(run.child("verifier").url)
    deleted(run.child("prepare").url)
    assert run.exists("work/prepare/claim.json"), "the verifier's stage is the same"
    deleted(run.child("verifier").url)
    assert paths(run) == ["summary.json"]


def test_a_damaged_artefact_can_be_deleted_and_a_damaged_reader_stops_it(run):
    run.write_bytes("extract/data_config.json", b"{")
    with pytest.raises(ManifestInvalid, match=r"extract/data_config\.json"):
        plan_removal(run.child("prepare").url)
    with pytest.raises(StillNeeded, match="train in"):
        plan_removal(run.child("extract").url)
    deleted(run.url)
    assert paths(run) == []


def test_what_no_stage_wrote_stays_and_is_told(run, capsys):
    strange = ["notes.txt", "evaluate/mine.txt", "progress/notes", "work/export/x"]
    for path in strange:
        run.write_bytes(path, b"mine")
    assert cli.main(["delete", run.url, "--yes"]) == 0
    assert paths(run) == sorted(strange)
    assert "stays, for no stage wrote it: " in capsys.readouterr().out


def test_a_folder_of_a_stage_s_name_is_no_artefact_by_itself():
    store = open_store(f"memory://removal-{secrets.token_hex(4)}/mine")
    store.write_bytes("train/photos.zip", b"mine")
    for url in (store.url, store.child("train").url):
        with pytest.raises(UpstreamMissing, match="neither a manifest nor the claim"):
            plan_removal(url)


def test_a_stage_that_is_at_work_is_refused(run):
    deleted(run.child("train").url)
    Work(run, "train").claim({}, {})
    report(run, "train", updated_at=time.time())
    with pytest.raises(TemporaryFailure, match="on host; stop it first"):
        plan_removal(run.child("train").url)
    report(run, "train", updated_at=time.time() - SILENT_SECONDS + 30)
    with pytest.raises(TemporaryFailure, match="or wait"):
        plan_removal(run.child("train").url)
    report(run, "train", updated_at=time.time() - SILENT_SECONDS - 1)
    deleted(run.child("train").url)


def test_a_claim_without_a_report_may_be_a_process_that_loads_an_engine(run, capsys):
    deleted(run.child("train").url)
    Work(run, "train").claim({}, {})
    assert cli.main(["delete", run.child("train").url, "--yes"]) == 75
    assert "no report of any process yet" in capsys.readouterr().err
    assert run.exists("work/train/claim.json")
    assert cli.main(["delete", run.child("train").url, "--yes", "--stopped"]) == 0
    assert not run.exists("work/train/claim.json")


def test_a_stage_of_two_artefacts_is_at_work_until_the_last_one_stands(run):
    for kind in ("train", "vocab", "extract", "prepare"):
        deleted(run.child(kind).url)
    report(run, "prepare", updated_at=time.time())
    with pytest.raises(TemporaryFailure, match="on host; stop it first"):
        plan_removal(run.child("verifier").url)


def digest_of(run: Store, kind: str) -> str:
    found = artifacts.find(run.child(kind))
    assert found is not None
    return found.digest


def begin(run: Store, stage: str, **inputs: str) -> None:
    """A stage that has claimed its prefix, and whose process died long ago or works elsewhere."""
    Work(run, stage).claim(inputs, {})
    report(run, stage, updated_at=0.0)


@pytest.mark.parametrize(
    ("stage", "name", "kind"),
    [
        ("extract", "rows", "prepare"),
        ("vocab", "verifier", "verifier"),
        ("train", "states", "extract"),
    ],
)
def test_what_a_stage_at_work_reads_is_kept(run, stage, name, kind):
    """No manifest names it yet, and the claim does."""
    for gone in ("train", "vocab", "extract"):
        if gone != kind and (gone != "extract" or stage != "train"):
            deleted(run.child(gone).url)
    for other in {"prepare", "verifier"} - {kind}:
        run.delete(f"{other}/data_config.json")
    begin(run, stage, **{name: digest_of(run, kind)})
    with pytest.raises(StillNeeded, match=f"unfinished {stage} in {run.url}/{stage}; keep it"):
        plan_removal(run.child(kind).url, stopped=True)
    deleted(run.url)
    assert paths(run) == [], "the run goes with its own unfinished work"


def test_what_a_stage_at_work_in_another_run_reads_is_kept_unless_it_has_a_copy(run):
    other = open_store(f"{run.url.removesuffix('first')}second")
    begin(other, "train", states=digest_of(run, "extract"))
    deleted(run.child("train").url)
    for url in (run.child("extract").url, run.url):
        with pytest.raises(StillNeeded, match=f"unfinished train in {other.url}/train"):
            plan_removal(url)
    states = artifacts.find(run.child("extract"))
    assert states is not None
    for info in states.store.list():
        other.write_bytes(f"extract/{info.path}", states.store.read_bytes(info.path))
    plan_removal(run.child("extract").url)


def test_a_stage_at_work_elsewhere_is_found_where_it_is_named(run):
    elsewhere = run.url.replace("/runs/first", "/elsewhere")
    begin(open_store(f"{elsewhere}/second"), "train", states=digest_of(run, "extract"))
    deleted(run.child("train").url)
    for also in (elsewhere, f"{elsewhere}/second"):
        with pytest.raises(StillNeeded, match=r"unfinished train in .*elsewhere/second"):
            plan_removal(run.url, [also])


def test_a_stage_that_is_done_needs_by_its_manifest_and_not_by_its_claim(run):
    begin(run, "evaluate", states=digest_of(run, "extract"))
    commit(run, "evaluate")
    deleted(run.child("train").url)
    plan_removal(run.child("extract").url)


def test_a_damaged_claim_stops_the_deletion_of_what_it_might_name(run):
    run.write_bytes("work/export/claim.json", b"{")
    with pytest.raises(ManifestInvalid, match=r"work/export/claim\.json"):
        plan_removal(run.child("train").url)


def test_what_a_process_left_that_was_killed_as_it_tried_to_write_goes_with_the_run(run_on_disk):
    for path in (".probe-0123456789abcdef", "export/.probe-mine"):
        run_on_disk.write_bytes(path, b"first")
    assert [info.path for info in plan_removal(run_on_disk.url).left] == ["export/.probe-mine"]
    run_on_disk.delete("export/.probe-mine")
    deleted(run_on_disk.url)
    assert not run_on_disk.local_path().exists()


def test_what_is_committed_as_a_deletion_begins_does_not_outlive_its_objects(run):
    """A process was past its last look when the record of the deletion was written."""
    removal = plan_removal(run.child("train").url)
    manifest = run.read_bytes("train/data_config.json")

    def told(count: int) -> None:
        if run.exists("work/train/claim.json"):
            run.write_bytes("train/data_config.json", manifest)

    remove(removal, told)
    assert not [path for path in paths(run) if path.startswith(("train/", "work/train/"))]


def test_a_bucket_ends_empty_and_refuses_first(s3_environment: S3Server):
    run = make_run(f"s3://{BUCKET}/removal-{secrets.token_hex(4)}/run")
    other = second(run, f"{run.url}-second")
    with pytest.raises(StillNeeded, match="run-second/train"):
        plan_removal(run.url)
    deleted(other.url)
    deleted(run.url)
    assert paths(run) == []


def test_cut_off_anywhere_no_half_artefact_claims_to_be_whole_and_the_next_one_ends(
    run, monkeypatch
):
    """The deletion is killed at each of its steps in turn, the run made anew in between."""
    plain_delete = Store.delete
    total = plan_removal(run.url).num_objects
    for moment in range(total + 1):
        left = [moment]

        def killed(store: Store, path: str, left: list[int] = left) -> None:
            if not left[0]:
                raise Killed
            left[0] -= 1
            plain_delete(store, path)

        make_run(run.url)
        with monkeypatch.context() as patched:
            patched.setattr("eagle3.removal._AT_ONCE", 1)
            patched.setattr(Store, "delete", killed)
            with pytest.raises(Killed):
                deleted(run.url)
        for kind in ("verifier", "prepare", "extract", "vocab", "train"):
            found = artifacts.find(run.child(kind))
            if found is not None:
                artifacts.check_objects(found)
                for ref in found.manifest.inputs.values():
                    assert artifacts.find(open_store(ref.url)), "what it rests on stands"
        deleted(run.url)
        assert paths(run) == []
