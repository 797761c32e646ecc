"""Only what the test cluster started is ever ended, and it is ended for certain."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import figures, machine
from tests.cluster.processes import Process, Processes, stop

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True)"


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    mine = Processes(tmp_path / "processes.jsonl", tmp_path / "logs")
    yield mine
    stop(mine.recorded(), patience=0.0)


def test_a_process_is_found_again_by_its_record(processes, tmp_path):
    started = processes.start("sleep-n1", ["/bin/sleep", "60"])
    again = Processes(tmp_path / "processes.jsonl", tmp_path / "logs")
    assert again.named("sleep-") == [started]
    stop(again.recorded(), patience=5.0)
    assert not started.alive()


def test_another_process_of_the_same_id_is_left_alone(processes):
    started = processes.start("sleep", ["/bin/sleep", "60"])
    former = dataclasses.replace(started, started=started.started - 1)
    former.signal(signal.SIGKILL)
    assert not former.alive()
    assert started.alive()


def test_a_process_deaf_to_term_is_killed(processes):
    deaf = processes.start("deaf", [sys.executable, "-c", f"{STUBBORN}; time.sleep(60)"])
    while not processes.log("deaf").stat().st_size:
        assert deaf.alive()
    stop([deaf], patience=0.2)
    assert not deaf.alive()


def test_a_process_that_is_gone_is_no_process():
    gone = Process.of(2**22 + 1, name="gone")
    assert not gone.alive()
    gone.signal(signal.SIGKILL)


def test_a_record_cut_short_by_a_crash_is_read_as_far_as_it_goes(processes, tmp_path):
    started = processes.start("sleep", ["/bin/sleep", "60"])
    with (tmp_path / "processes.jsonl").open("a") as record:
        record.write('{"name": "half')
    assert processes.recorded() == [started]


def test_figures_of_others_stay(tmp_path, monkeypatch):
    summary = tmp_path / "runs" / "summary.json"
    monkeypatch.setattr(figures, "SUMMARY", summary)
    figures.record(images_seconds=7)
    figures.record(cluster_up_seconds=6.1)
    assert json.loads(summary.read_text()) == {"cluster_up_seconds": 6.1, "images_seconds": 7}


def test_without_root_the_reason_is_a_sentence(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert machine.foundation() == (
        "the test cluster needs root, for network namespaces and containers"
    )


def test_on_another_system_the_reason_is_a_sentence(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert machine.foundation() == "the test cluster needs Linux, and this is darwin"
