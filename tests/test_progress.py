"""Progress: the object that status reads, JSON lines, and a bar on a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import secrets
import subprocess
import sys

import pytest

from eagle3 import progress as progresses
from eagle3.progress import Progress, ProgressRecord, in_words
from eagle3.store import Store, open_store


@pytest.fixture
def run() -> Store:
    return open_store(f"memory://progress-{secrets.token_hex(4)}")


def record_of(run: Store, name: str = "progress/extract-2.json") -> dict[str, object]:
    record = json.loads(run.read_bytes(name))
    assert isinstance(record, dict)
    return record


def test_a_finished_step_leaves_its_last_word_in_the_store(run):
    with Progress(run, "extract", "capture", total=5, unit="rows", index=2) as progress:
        progress.advance(2, resumed=True)
        progress.advance(3)
    record = record_of(run)
    assert record["done"] == record["all"] == 5
    assert record["seconds_left"] == 0
    assert (record["stage"], record["step"], record["unit"]) == ("extract", "capture", "rows")
    assert record["host"]


def test_the_object_is_written_rarely_and_at_the_end(run, monkeypatch):
    written: list[bytes] = []
    monkeypatch.setattr(Store, "write_bytes", lambda self, path, data: written.append(data))
    with Progress(run, "extract", "capture", total=1000, unit="rows") as progress:
        for _ in range(1000):
            progress.advance()
    assert len(written) == 1


def test_long_work_reports_while_it_runs(run, monkeypatch, capsys):
    monkeypatch.setattr(progresses, "_EVERY_SECONDS", 0.0)
    with Progress(run, "extract", "capture", total=3, unit="rows") as progress:
        progress.advance()
        assert json.loads(run.read_bytes("progress/extract-0.json"))["done"] == 1
        progress.advance(2)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["done"] for line in lines] == [1, 3, 3]


def test_work_of_an_earlier_process_counts_as_done_and_in_no_rate(run):
    with Progress(run, "extract", "capture", total=10, unit="rows", index=2) as progress:
        progress.advance(10, resumed=True)
    record = record_of(run)
    assert (record["done"], record["rate"]) == (10, 0)
    assert record["seconds_left"] is None


def test_what_is_under_way_is_shown_and_counts_only_when_it_is_done(run, monkeypatch, capsys):
    monkeypatch.setattr(progresses, "_EVERY_SECONDS", 0.0)
    with Progress(run, "extract", "capture", total=10, unit="rows", index=2) as progress:
        progress.advance(2, resumed=True)
        progress.under_way(3)
        assert progress.done == 2
        assert record_of(run)["done"] == 5
        assert record_of(run)["rate"]
        progress.under_way(7)
        # A unit of four that others finished meanwhile: ours is given up.
        progress.advance(4, resumed=True)
        assert (record_of(run)["done"], record_of(run)["rate"]) == (6, 0)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["done"] for line in lines] == [2, 5, 9, 6, 6]


def test_a_step_that_fails_does_not_report_itself_as_done(run):
    def failing() -> None:
        with Progress(run, "extract", "capture", total=2, unit="rows") as progress:
            progress.advance()
            raise RuntimeError("the engine died")

    with pytest.raises(RuntimeError):
        failing()
    assert not run.exists("progress/extract-0.json")


def report(index: int, done: int, heard: float, rate: float = 10.0) -> ProgressRecord:
    return ProgressRecord(
        stage="extract",
        index=index,
        step="capture",
        unit="rows",
        done=done,
        all=1000,
        rate=rate,
        seconds_left=None,
        host="n1",
        updated_at=heard,
    )


def test_the_rates_of_workers_that_live_add_up():
    reports = [report(0, 500, 9990.0), report(1, 480, 9980.0)]
    told = in_words(reports, {0: 100.0, 1: 100.0}, 10000.0)
    assert told == "capture 500 of 1000 rows (50%), 20.0 rows/s, 0:00:25 left"


def test_workers_that_are_gone_have_no_rate():
    """Scaled from four to one: three reports lie there that nobody writes any more."""
    reports = [report(index, 500 - index, 9990.0) for index in range(4)]
    told = in_words(reports, {0: 100.0}, 10000.0)
    assert told == "capture 500 of 1000 rows (50%), 10.0 rows/s, 0:00:50 left"


def test_the_report_of_an_earlier_pod_is_no_sign_of_life():
    """A pod that loads for an hour after a restart does not show the dead one's time left."""
    told = in_words([report(0, 500, 5000.0)], {0: 6400.0}, 10000.0)
    assert told == "capture 500 of 1000 rows (50%) by an earlier pod; nothing heard for 1:00:00"
    just_begun = in_words([report(0, 500, 5000.0)], {0: 9990.0}, 10000.0)
    assert just_begun == "capture 500 of 1000 rows (50%) by an earlier pod"


def test_an_old_report_says_how_old_it_is():
    told = in_words([report(0, 500, 6400.0)], {0: 100.0}, 10000.0)
    assert told == "capture 500 of 1000 rows (50%); nothing heard for 1:00:00"
    reports = [report(0, 500, 9990.0), report(1, 480, 2800.0)]
    told = in_words(reports, {0: 100.0, 1: 100.0}, 10000.0)
    assert told.endswith("10.0 rows/s, 0:00:50 left; nothing heard of 1 of 2 for 2:00:00")


def test_a_pod_that_never_reported_is_told_of_after_a_while():
    assert in_words([], {0: 9900.0}, 10000.0) == ""
    assert in_words([], {0: 2800.0}, 10000.0) == "nothing heard for 2:00:00"


GIVEN_UP = """
from eagle3.progress import Progress, ProgressRecord, in_words
from eagle3.store import open_store
with Progress(open_store("memory://bar"), "extract", "capture", total=4, unit="rows") as progress:
    progress.advance()
    progress.under_way(2)
    raise SystemExit
"""

BAR = """
from eagle3.progress import Progress, ProgressRecord, in_words
from eagle3.store import open_store
with Progress(open_store("memory://bar"), "extract", "capture", total=4, unit="rows") as progress:
    for _ in range(4):
        progress.advance(note="2 rejected")
"""


def shown_on_a_terminal(program: str) -> str:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "160"}
    subprocess.run([sys.executable, "-c", program], stderr=theirs, env=environment, check=True)
    os.close(theirs)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    return shown


def test_a_bar_that_stops_shows_what_is_finished_and_not_what_was_under_way():
    shown = shown_on_a_terminal(GIVEN_UP)
    assert re.findall(r"\d/4", shown)[-1] == "1/4"


def test_a_terminal_shows_a_bar_and_no_json():
    shown = shown_on_a_terminal(BAR)
    assert "extract capture" in shown
    assert "4/4" in shown
    assert "rows/s" in shown
    assert "2 rejected" in shown
    assert "{" not in shown
