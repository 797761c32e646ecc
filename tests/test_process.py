"""A stage as a process: arguments, exit codes, last words, SIGTERM, and what it commits."""

from __future__ import annotations

import errno
import json
import signal
import sys
import textwrap
from pathlib import Path

import pytest

from eagle3 import __version__, errors
from eagle3 import artifact as artifacts
from eagle3.manifest import Manifest
from eagle3.store import open_store
from jobs import runner
from jobs.process import TERMINATION_BYTES, StageRun, run_stage
from tests.conftest import started
from tests.upstreams import CONFIG, commit_upstreams


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments of a stage whose upstreams stand."""
    monkeypatch.setenv("EAGLE3_TERMINATION_LOG", str(tmp_path / "termination-log"))
    (tmp_path / "run.yaml").write_text(CONFIG)
    url = f"file://{tmp_path}/run"
    commit_upstreams(open_store(url))
    return ["--config", str(tmp_path / "run.yaml"), "--store", url]


def termination(tmp_path: Path) -> dict[str, object]:
    record = json.loads((tmp_path / "termination-log").read_text())
    assert isinstance(record, dict)
    return record


def test_a_story_gets_its_gated_inputs_and_ends_in_one_line(arguments, capsys):
    seen: list[StageRun] = []

    def story(run: StageRun) -> str:
        seen.append(run)
        return "wrote 2 objects"

    assert run_stage("train", story, arguments) == 0
    assert list(seen[0].inputs) == ["states", "vocab", "verifier"]
    assert seen[0].inputs["states"].manifest.total_samples == 6
    assert capsys.readouterr().out == "train: wrote 2 objects, 0 s\n"


ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.Eagle3Error) and "exit_code" in vars(kind)
]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_an_error_of_ours_is_an_exit_code_a_sentence_and_a_record(
    arguments, tmp_path, capsys, kind
):
    def story(run: StageRun) -> str:
        raise kind("a field", wanted="one", found="other", remedy="change it")

    assert run_stage("train", story, arguments) == kind.exit_code
    assert capsys.readouterr().err == "train: a field: wanted one, found other; change it.\n"
    assert termination(tmp_path)["error"] == kind.__name__


@pytest.mark.parametrize("kind", [ZeroDivisionError, BrokenPipeError])
def test_a_fault_of_ours_keeps_its_traceback_and_is_recorded_too(arguments, tmp_path, kind):
    def story(run: StageRun) -> str:
        raise kind("a bug")

    with pytest.raises(kind):
        run_stage("train", story, arguments)
    assert termination(tmp_path) == {"stage": "train", "error": kind.__name__, "found": "a bug"}


@pytest.mark.parametrize("letter", ["x", "ü", '"', "\n"])
def test_a_record_fits_the_termination_log_whatever_was_found(arguments, tmp_path, letter):
    def story(run: StageRun) -> str:
        raise errors.ShardInvalid("f", wanted=letter * 9000, found=letter * 9000, remedy="r")

    assert run_stage("train", story, arguments) == 65
    assert (tmp_path / "termination-log").stat().st_size <= TERMINATION_BYTES
    assert termination(tmp_path)["exit_code"] == 65


@pytest.mark.parametrize(
    "wrong", [[], ["--config"], ["--config", "nope"], ["--config", "nope", "--colour", "red"]]
)
def test_wrong_arguments_are_a_usage_error(wrong, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("EAGLE3_TERMINATION_LOG", str(tmp_path / "termination-log"))
    assert run_stage("train", lambda run: "never", wrong) == 64
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([], "--config, --jobs"),
        (["--config", "r", "--jobs", "j", "--x"], "unrecognized arguments: --x"),
        (["--config", "r", "--jobs", "j", "--poll-seconds", "0"], "seconds above 0, found '0'"),
        (["--config", "r", "--jobs", "j", "--poll-seconds", "x"], "seconds above 0, found 'x'"),
    ],
)
def test_the_runner_s_wrong_arguments_are_a_usage_error_too(wrong, words, capsys):
    assert runner.main(wrong) == 64
    told = capsys.readouterr().err
    assert told.startswith("runner: arguments: ")
    assert words in told
    assert told.count("\n") == 1


def test_a_run_without_a_store_is_a_usage_error(arguments, capsys, monkeypatch):
    monkeypatch.delenv("EAGLE3_STORE", raising=False)
    assert run_stage("train", lambda run: "never", arguments[:2]) == 64
    assert "--store" in capsys.readouterr().err


def test_the_store_may_come_from_the_environment(arguments, monkeypatch):
    monkeypatch.setenv("EAGLE3_STORE", arguments[3])
    assert run_stage("train", lambda run: run.store.url, arguments[:2]) == 0


def test_a_missing_upstream_ends_the_stage_before_its_story(arguments):
    open_store(arguments[3]).delete("extract/data_config.json")

    def story(run: StageRun) -> str:
        raise AssertionError("the story began")

    assert run_stage("train", story, arguments) == 66


def test_a_commit_records_lineage_settings_and_versions(arguments, monkeypatch):
    monkeypatch.setenv("EAGLE3_GIT_COMMIT", "abc123")

    def story(run: StageRun) -> str:
        identity = run.claim()
        run.commit(Manifest(artifact="train", identity=identity, files=()))
        return "done"

    assert run_stage("train", story, arguments) == 0
    found = artifacts.find(open_store(arguments[3]).child("train"))
    assert found is not None
    manifest = found.manifest
    upstream = artifacts.find(open_store(arguments[3]).child("extract"))
    assert upstream is not None
    assert manifest.inputs["states"] == upstream.ref()
    assert manifest.config["epochs"] == 3
    assert manifest.produced_by["eagle3"] == __version__
    assert manifest.produced_by["git"] == "abc123"
    assert manifest.created_at
    assert manifest.measured["seconds"] >= 0


def test_nothing_is_committed_that_names_a_lost_object(arguments, capsys):
    def story(run: StageRun) -> str:
        entry = artifacts.put(run.output(), "part", b"bytes")
        run.output().delete("part")
        run.commit(Manifest(artifact="train", identity=run.claim(), files=(entry,)))
        return "done"

    assert run_stage("train", story, arguments) == 65
    assert "/units, and run again" in capsys.readouterr().err
    assert artifacts.find(open_store(arguments[3]).child("train")) is None


def test_a_full_scratch_disk_is_one_sentence(arguments, capsys):
    def story(run: StageRun) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/x")

    assert run_stage("train", story, arguments) == 75
    assert "set TMPDIR to a larger disk" in capsys.readouterr().err


def test_a_store_that_dies_with_the_process_is_refused(arguments, capsys):
    assert run_stage("train", lambda run: "never", [*arguments[:2], "--store", "memory://x"]) == 64
    assert "outlives this process" in capsys.readouterr().err


def test_other_settings_on_the_same_prefix_are_refused(arguments, tmp_path, capsys):
    assert run_stage("train", lambda run: run.claim(), arguments) == 0
    assert run_stage("train", lambda run: run.claim(), arguments) == 0
    config = tmp_path / "run.yaml"
    config.write_text(f"{CONFIG}\ntrain: {{epochs: 4}}\n")
    assert run_stage("train", lambda run: run.claim(), arguments) == 65
    assert "train: epochs: wanted 3" in capsys.readouterr().err


def test_a_stage_neither_begins_nor_commits_while_a_deletion_is_going_on(arguments, capsys):
    store = open_store(arguments[3])
    record = "work/train/removal.json"

    def story(run: StageRun) -> str:
        identity = run.claim()
        store.write_bytes(record, b"{}")
        run.commit(Manifest(artifact="train", identity=identity, files=()))
        return "done"

    for _ in range(2):
        assert run_stage("train", story, arguments) == 75
        assert "let `eagle3 delete` finish" in capsys.readouterr().err
    assert artifacts.find(store.child("train")) is None


def test_a_stage_whose_claim_was_deleted_commits_nothing(arguments, capsys):
    store = open_store(arguments[3])

    def story(run: StageRun) -> str:
        identity = run.claim()
        store.delete("work/train/claim.json")
        run.commit(Manifest(artifact="train", identity=identity, files=()))
        return "done"

    assert run_stage("train", story, arguments) == 65
    assert "the claim under which this process began" in capsys.readouterr().err
    assert artifacts.find(store.child("train")) is None


def test_a_setting_that_came_to_be_after_a_stage_was_done_leaves_it_done(arguments, capsys):
    later: dict[str, None] = {}

    def story(run: StageRun) -> str:
        identity = run.claim(settings=later)
        if run.committed(identity):
            return "already committed"
        run.commit(Manifest(artifact="train", identity=identity, files=()))
        return "done"

    assert run_stage("train", story, arguments) == 0
    later["of_later"] = None
    assert run_stage("train", story, arguments) == 0
    assert "already committed" in capsys.readouterr().out


def test_settings_that_change_no_result_may_differ(arguments, tmp_path):
    assert run_stage("train", lambda run: run.claim(), arguments) == 0
    config = tmp_path / "run.yaml"
    config.write_text(f"{CONFIG}\ntrain: {{num_workers: 2}}\n")
    assert run_stage("train", lambda run: run.claim(), arguments) == 0


def test_an_artefact_of_another_identity_is_no_work_done(arguments, capsys):
    """As when the claim was deleted with the rest of the work, and the settings changed since."""

    def story(run: StageRun) -> str:
        identity = run.claim()
        if run.committed(identity):
            return "already committed"
        run.commit(Manifest(artifact="train", identity=identity, files=()))
        return "done"

    assert run_stage("train", story, arguments) == 0
    assert run_stage("train", story, arguments) == 0
    assert "already committed" in capsys.readouterr().out
    run = open_store(arguments[3])
    run.delete("work/train/claim.json")
    config = Path(arguments[1])
    config.write_text(f"{CONFIG}\ntrain: {{epochs: 4}}\n")
    assert run_stage("train", story, arguments) == 65
    assert "identity" in capsys.readouterr().err


def test_the_worker_s_index_comes_from_the_job(arguments, monkeypatch, capsys):
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    assert run_stage("train", lambda run: f"worker {run.index}", arguments) == 0
    assert "worker 3" in capsys.readouterr().out
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "three")
    assert run_stage("train", lambda run: "never", arguments) == 78


def test_scratch_is_gone_whatever_happens(arguments):
    folders: list[Path] = []

    def story(run: StageRun) -> str:
        with run.scratch() as folder:
            folders.append(folder)
            (folder / "file").write_text("")
            raise errors.TemporaryFailure("f", wanted="w", found="f", remedy="r")

    assert run_stage("train", story, arguments) == 75
    assert not folders[0].exists()


WORKING = """
import signal, sys, time
from jobs.process import run_stage

# A shell that starts the tests in the background has it ignored, which children inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

def story(run):
    print("working", flush=True)
    for _ in range(600):
        time.sleep(0.05)
        run.check_stop()
    return "never"

sys.exit(run_stage("train", story))
"""


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (signal.SIGTERM, 143, "to continue from what is finished"),
        (signal.SIGINT, 130, "run it again to continue"),
    ],
)
@pytest.mark.fault("B76")
def test_a_stage_that_is_asked_to_stop_never_ends_in_success(arguments, number, code, words):
    with started([sys.executable, "-c", textwrap.dedent(WORKING), *arguments]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "working\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert words in err
    assert err.count("train:") == 1
    assert "Traceback" not in err
