"""Only what the test cluster started or left is ever ended or removed, and that for certain."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import __main__ as by_hand
from tests.cluster import binaries, cgroups, figures, footprint, machine, testbed
from tests.cluster import conftest as fixtures
from tests.cluster.binaries import NotBuilt
from tests.cluster.footprint import Footprint
from tests.cluster.node import ANSWER_SECONDS, Node
from tests.cluster.places import STATE
from tests.cluster.processes import Process, Processes, stop
from tests.conftest import ROOT

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


class TestWhetherTestsMayBeSkipped:
    """A machine that can have a cluster tests on one: what went wrong there is a failure."""

    @pytest.fixture(autouse=True)
    def able(self, monkeypatch):
        """A machine that lacks nothing but the programs, and no word of anybody's."""
        for name in ("EAGLE3_CLUSTER", "KUBECONFIG"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(machine, "foundation", lambda: None)
        monkeypatch.setattr(cgroups, "writable", lambda: True)
        done = subprocess.CompletedProcess([], 0, "", "")
        monkeypatch.setattr(machine.subprocess, "run", lambda *told, **more: done)
        monkeypatch.setattr(binaries, "absent", lambda: list(binaries.PROGRAMS[2:3]))

    def test_programs_that_could_not_be_built_are_no_excuse(self, monkeypatch, tmp_path, capsys):
        assert machine.obstacle() == "not built yet: tiny-images; run `make testbed`"
        assert machine.expected() is None

        def broken(self):
            raise NotBuilt("probe could not be built")

        monkeypatch.setattr(binaries.GoPrograms, "build", broken)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert by_hand.build() == 1
        assert "probe could not be built" in capsys.readouterr().out

    def test_an_older_go_is_a_reason(self, monkeypatch):
        monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
        for found, reason in (("go1.26.8", None), ("go1.26", "this is 1.26"), ("", "this is none")):
            done = subprocess.CompletedProcess([], 0, f"{found}\n", "")
            monkeypatch.setattr(machine.subprocess, "run", lambda *told, done=done, **more: done)
            told = machine._go()
            assert told is reason or (told and told.endswith(reason))

    @pytest.mark.parametrize(
        ("asked", "lacking", "occupied"),
        [
            ("required", "failed", "failed"),
            ("expected", "failed", "skipped"),
            ("optional", "skipped", "skipped"),
            ("", "skipped", "skipped"),
        ],
    )
    def test_only_another_s_cluster_is_waited_out(self, monkeypatch, asked, lacking, occupied):
        monkeypatch.setenv("EAGLE3_CLUSTER", asked)
        ends = {"failed": pytest.fail.Exception, "skipped": pytest.skip.Exception}
        for end, is_occupied in ((lacking, False), (occupied, True)):
            with pytest.raises(ends[end], match="no cluster"):
                fixtures.skip("no cluster", occupied=is_occupied)

    def test_a_cluster_of_another_process_is_told_from_one_that_cannot_be(self, monkeypatch):
        other = Process.of(os.getppid(), name="tests")
        record = testbed.Record(boot="", footprint=Footprint.taken(), owner=other)
        monkeypatch.setattr(machine, "obstacle", lambda: None)
        monkeypatch.setattr(testbed.Record, "read", lambda: record)
        monkeypatch.setattr(testbed, "_lives", lambda record: True)
        with pytest.raises(testbed.Occupied, match=f"that of process {other.pid}"):
            testbed.up(owner=Process.of(os.getpid(), name="tests"))


@pytest.mark.parametrize(
    ("asked", "expect", "seen"),
    [
        ("", "echo expected", "expected"),
        ("", "true", ""),
        ("required", "echo expected", "required"),
        ("", "exit 3", None),
    ],
)
def test_make_test_passes_on_what_is_asked_and_stops_where_nobody_can_say(
    tmp_path, asked, expect, seen
):
    """A crash of the question must not read as a machine that can have no cluster."""
    python = tmp_path / "python"
    asking = f'case "$*" in *"tests.cluster expect"*) {expect};; '
    python.write_text(f'#!/bin/sh\n{asking} *) echo "saw=$EAGLE3_CLUSTER.";; esac\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "--no-print-directory", "-o", "setup", "test", f"PYTHON={python}", "TESTBED=true"],
        cwd=ROOT,
        env={**os.environ, "EAGLE3_CLUSTER": asked},
        capture_output=True,
        text=True,
    )
    assert (done.returncode == 0) == (seen is not None), done.stderr
    assert (f"saw={seen}." in done.stdout) == (seen is not None)


class TestFootprint:
    """What a cluster leaves goes with it; what others put beside it meanwhile does not."""

    def test_the_images_of_a_program_that_came_meanwhile_stay(self, tmp_path):
        theirs = tmp_path / "containerd" / "snapshots" / "1" / "fs"
        (theirs / "tmp").mkdir(parents=True)
        (theirs / "passwd").write_text("theirs")
        ours = tmp_path / "cni" / "net.d"
        ours.mkdir(parents=True)
        absent = [str(tmp_path / name) for name in ("containerd", "cni", "never-there")]
        Footprint(sysctls={}, absent=absent, namespaces=[]).restore()
        assert (theirs / "passwd").read_text() == "theirs"
        assert (theirs / "tmp").is_dir(), "an empty folder may be a part of an image"
        assert not (tmp_path / "cni").exists()

    def test_containers_are_ours_by_the_folder_they_came_from(self, tmp_path):
        run = tmp_path / "containerd"
        for name, bundle in (("mine", STATE / "n1"), ("theirs", "/run/k3s")):
            (run / "runc" / "k8s.io" / name).mkdir(parents=True)
            state = run / "runc" / "k8s.io" / name / "state.json"
            state.write_text(json.dumps({"config": {"rootfs": f"{bundle}/rootfs"}}))
        footprint.remove_ours(run, footprint.PATHS["/run/containerd"])
        assert [path.name for path in (run / "runc" / "k8s.io").iterdir()] == ["theirs"]
        shutil.rmtree(run / "runc" / "k8s.io" / "theirs")
        footprint.remove_ours(run, footprint.PATHS["/run/containerd"])
        assert not run.exists()

    def test_results_of_plugins_are_ours_by_network_or_name_server(self, tmp_path):
        """Each containerd leaves those of the loopback, under a name that is the same for all."""
        told = {
            "e3-pods-1-eth0": {"networkName": "e3-pods"},
            "cni-loopback-1-lo": {"capabilityArgs": {"dns": {"Servers": ["10.243.0.1"]}}},
            "cni-loopback-2-lo": {"capabilityArgs": {"dns": {"Servers": ["10.96.0.10"]}}},
        }
        (tmp_path / "results").mkdir()
        for name, content in told.items():
            (tmp_path / "results" / name).write_text(json.dumps(content))
        footprint.remove_ours(tmp_path, footprint.PATHS["/var/lib/cni"])
        assert [path.name for path in (tmp_path / "results").iterdir()] == ["cni-loopback-2-lo"]

    def test_a_socket_that_is_answered_stays(self, tmp_path):
        (tmp_path / "s").mkdir()
        with socket.socket(socket.AF_UNIX) as theirs, socket.socket(socket.AF_UNIX) as dead:
            theirs.bind(str(tmp_path / "s" / "theirs"))
            theirs.listen()
            dead.bind(str(tmp_path / "s" / "dead"))
            dead.close()
            footprint.remove_ours(tmp_path, footprint.PATHS["/run/containerd"])
            assert [path.name for path in (tmp_path / "s").iterdir()] == ["theirs"]

    def test_logs_are_ours_by_where_they_point(self, tmp_path):
        (tmp_path / "mine.log").symlink_to(STATE / "n1" / "pod-logs" / "0.log")
        (tmp_path / "theirs.log").symlink_to("/var/log/pods/0.log")
        footprint.remove_ours(tmp_path, footprint.PATHS["/var/log/containers"])
        assert [path.name for path in tmp_path.iterdir()] == ["theirs.log"]

    @pytest.mark.parametrize("alone", [True, False])
    def test_what_any_kubelet_leaves_goes_where_no_other_kubelet_was(self, tmp_path, alone):
        checkpoint = tmp_path / "kubelet" / "device-plugins" / "kubelet_internal_checkpoint"
        checkpoint.parent.mkdir(parents=True)
        checkpoint.write_text("{}")
        if not alone:
            (tmp_path / "kubelet" / "config.yaml").write_text("theirs")
        footprint.remove_ours(tmp_path / "kubelet", footprint.PATHS["/var/lib/kubelet"])
        assert checkpoint.exists() != alone

    def test_a_lock_that_is_held_stays(self, tmp_path):
        path = tmp_path / "xtables.lock"
        with path.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            footprint.remove_ours(path, ())
            assert path.exists()
        footprint.remove_ours(path, ())
        assert not path.exists()


def test_a_containerd_that_hangs_holds_nobody_up_who_takes_the_cluster_down(monkeypatch, tmp_path):
    patience = []

    def hangs(command, *, timeout, **more):
        patience.append(timeout)
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hangs)
    testbed.empty(Node(name="n1", number=1, folder=tmp_path))
    assert patience == [ANSWER_SECONDS]
    monkeypatch.setattr(footprint, "_mounts", lambda: [tmp_path / "stuck"])
    footprint.unmount_below(tmp_path)
    assert len(patience) == 2
