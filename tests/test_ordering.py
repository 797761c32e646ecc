"""What an orderer does next, and the records by which a lost Job is known."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.errors import IdentityConflict, ManifestInvalid
from eagle3.ordering import Act, JobRecord, JobRecords, JobState, decide
from eagle3.stages import stage_named
from eagle3.store import open_store

OURS = JobRecord(job="drafts-1-extract", namespace="ml")


@pytest.fixture
def records(tmp_path: Path) -> JobRecords:
    return JobRecords(open_store(str(tmp_path)), stage_named("extract"))


@given(committed=st.booleans(), made=st.booleans(), job=st.sampled_from(JobState))
def test_a_job_is_made_only_where_none_ever_was(committed, made, job):
    act = decide(committed=committed, made=made, job=job)
    never_there = not committed and not made and job is JobState.MISSING
    assert (act is Act.MAKE) == never_there
    assert (act is Act.NOTHING) == committed
    assert (act is Act.MISS) == (made and not committed and job is JobState.MISSING)


def test_the_same_orderer_started_again_finds_its_record(records):
    records.intend(OURS)
    records.intend(OURS)
    assert records.made() is None
    records.note(JobRecord(job=OURS.job, namespace="ml", uid="first"))
    records.note(JobRecord(job=OURS.job, namespace="ml", uid="second"))
    assert records.made() == JobRecord(job=OURS.job, namespace="ml", uid="first")
    assert "uid first" in str(records.vanished())
    assert "eagle3 retry extract" in str(records.vanished())


@pytest.mark.parametrize(
    "other",
    [JobRecord(job="others-1-extract", namespace="ml"), JobRecord(job=OURS.job, namespace="team")],
)
def test_a_prefix_that_another_run_orders_is_refused(records, other):
    records.intend(other)
    with pytest.raises(IdentityConflict, match="a prefix of its own"):
        records.intend(OURS)


def test_what_is_forgotten_may_be_made_again(records):
    records.intend(OURS)
    records.note(OURS)
    records.forget()
    assert records.made() is None
    records.intend(JobRecord(job="another", namespace="ml"))
    records.forget()
    records.forget()


def test_a_damaged_record_is_no_reason_to_make_a_job(records, tmp_path):
    records.note(OURS)
    (tmp_path / "work/extract/job-made.json").write_text("{")
    with pytest.raises(ManifestInvalid, match="eagle3 retry extract"):
        records.made()
