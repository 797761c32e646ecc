"""The `eagle3` command: what it says to a person, and how it runs stages."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from eagle3 import __version__
from eagle3 import artifact as artifacts
from eagle3.artifact import Artifact
from eagle3.config import load_config, parse_config
from eagle3.errors import ConfigError, UpstreamMissing
from eagle3.store import Store, open_store
from jobs import cli, operate
from jobs.cli.tables import table_console
from jobs.local import chosen_stages, config_file, write_summary
from jobs.operate.seen import StageStatus
from tests.conftest import ROOT, started
from tests.tiny_run import write_conversations
from tests.tiny_verifiers import make_llama
from tests.upstreams import CONFIG, commit, commit_upstreams


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("verifier"), num_layers=4)


def write_run(folder: Path, verifier: Path, *, conversations: int = 12) -> Path:
    """A configuration whose data and verifier are real."""
    data = write_conversations(folder / "chats.jsonl", conversations)
    config = {
        "verifier": {"source": str(verifier), "serving_name": "tests/tiny"},
        "prepare": {"data": [str(data)], "max_seq_len": 256, "shard_rows": 4},
        "regenerate": {"enabled": False},
        "vocab": {"draft_vocab_size": 128},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def eagle3(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jobs.cli", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ruun"], "No such command 'ruun'"),
        (["run"], "--config"),
        (["run", "--config"], "requires an argument"),
        (["run", "--config", "x", "--colour", "red"], "--colour"),
        (["run", "--config", "no-such-file.yaml"], "no-such-file.yaml"),
        (["run", "--config", "x", "--from", "trian"], "--from: wanted one of prepare"),
        (["run", "--config", "x", "--until", "trian"], "--until"),
        (["config"], "found neither"),
        (["config", "--config", "x", "--defaults"], "found both"),
        (["train", "--config", "x", "extra"], "extra"),
    ],
)
def test_a_person_s_mistake_is_one_sentence_and_64(arguments, words, capsys):
    assert cli.main(arguments) == 64
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1
    assert err.startswith("eagle3: ")


def test_a_mistake_shows_no_traceback_from_the_shell_either(tmp_path):
    (tmp_path / "run.yaml").write_text("verifier: {sauce: x}")
    done = eagle3("run", "--config", str(tmp_path / "run.yaml"), "--store", str(tmp_path))
    assert done.returncode == 64
    assert done.stderr == (
        "eagle3: verifier.sauce: wanted a known field, found an unknown one; "
        "write verifier.source.\n"
    )


def test_the_version_and_the_help_are_no_mistakes(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"eagle3 {__version__}\n"
    assert cli.main(["--help"]) == 0
    assert cli.main([]) == 0


def test_each_command_s_help_is_whole_on_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["--help"]) == 0
    commands = re.findall(r"^  \w+  +.*$", capsys.readouterr().out, flags=re.MULTILINE)
    assert len(commands) >= 14
    assert [line for line in commands if "..." in line or not line.endswith(".")] == []


def test_a_reason_stays_on_one_line_in_a_pipe_and_fits_a_terminal(monkeypatch, capsys):
    why = "container stage was killed for want of memory; raise the stage's memory " * 3
    rows = [StageStatus(stage="prepare", state="failed", what=why.strip())]
    run = SimpleNamespace(name="r", store=SimpleNamespace(url="s3://b/r"))
    for columns, whole in ((None, True), ("60", False)):
        monkeypatch.delenv("COLUMNS", raising=False)
        if columns:
            monkeypatch.setenv("COLUMNS", columns)
        operate.show(run, rows, table_console())
        printed = capsys.readouterr().out
        assert (why.strip() in printed) is whole
        assert " ".join(why.split()) in " ".join(printed.split())
        if columns:
            assert max(map(len, printed.splitlines())) <= int(columns)


def test_a_reason_keeps_its_brackets(monkeypatch, capsys):
    why = "unmounted volumes=[weights], [/x] [type=missing]: timed out"
    monkeypatch.setenv("COLUMNS", "")
    run = SimpleNamespace(name="r", store=SimpleNamespace(url="s3://b/[r]"))
    operate.show(run, [StageStatus(stage="s", state="failed", what=why)], table_console())
    printed = capsys.readouterr().out
    assert why in printed
    assert "s3://b/[r]" in printed


def test_a_table_on_the_narrowest_terminal_still_says_what_is_in_it(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    rows = [StageStatus(stage="prepare", state="failed", what="the reason")]
    run = SimpleNamespace(name="r", store=SimpleNamespace(url="s3://b/r"))
    operate.show(run, rows, table_console())
    assert "the reason" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["--version"], ["config", "--defaults"]])
def test_a_full_disk_behind_the_output_is_one_sentence(command):
    asked = [sys.executable, "-m", "jobs.cli", *command]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(asked, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert ended.returncode == 75
    assert ended.stderr.startswith("eagle3: standard output: wanted room for it")
    assert len(ended.stderr.splitlines()) == 1


def test_a_stage_whose_output_nobody_reads_says_so_and_keeps_what_it_did(tmp_path, verifier):
    path = write_run(tmp_path, verifier)
    asked = [sys.executable, "-m", "jobs.prepare", "--config", str(path), "--store", str(tmp_path)]
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(asked, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(writer)
    assert ended.returncode == 75
    (line,) = ended.stderr.splitlines()[-1:]
    assert line.startswith("prepare: standard output: wanted somebody who reads it")
    assert "Traceback" not in ended.stderr
    found = artifacts.find(open_store(f"{tmp_path}/prepare"))
    assert found is not None
    assert found.manifest.rows_in == 12


def test_a_letter_that_the_locale_lacks_is_written_as_an_escape(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert cli.main(["--version"]) == 0
    print("ü", flush=True)
    assert written.getvalue().splitlines()[-1] == b"\\xfc"


def test_a_configuration_out_of_a_pipe_is_read_once(tmp_path, capsys):
    os.mkfifo(pipe := tmp_path / "run.yaml")
    writer = threading.Thread(target=pipe.write_text, args=(CONFIG,), daemon=True)
    writer.start()
    store = ["--store", str(tmp_path / "store"), "--until", "prepare", "--from", "vocab"]
    assert cli.main(["run", "--config", str(pipe), *store]) == 64
    assert "does not come after" in capsys.readouterr().err
    writer.join(10)
    assert not writer.is_alive()


def test_the_configuration_is_printed_resolved_with_what_the_command_line_says(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    data = ["--data", "s3://b/a.jsonl", "--data", "b.parquet"]
    assert cli.main(["config", "--config", str(path), "--verifier", "other/model", *data]) == 0
    printed = capsys.readouterr().out
    (tmp_path / "printed.yaml").write_text(printed)
    config = load_config(tmp_path / "printed.yaml")
    assert config.verifier.source == "other/model"
    assert config.prepare.data == ("s3://b/a.jsonl", "b.parquet")
    assert config.prepare.max_seq_len == 128
    assert "# longest row kept (tokens)" in printed


def test_defaults_print_a_template(capsys):
    assert cli.main(["config", "--defaults"]) == 0
    assert isinstance(parse_config(yaml.safe_load(capsys.readouterr().out)), object)


def test_stages_are_chosen_from_one_to_another_without_those_left_out():
    raw = yaml.safe_load(CONFIG)
    config = parse_config(raw)
    names = [stage.name for stage in chosen_stages(config, None, None)]
    assert names == ["prepare", "extract", "vocab", "train", "export", "evaluate"]
    assert [stage.name for stage in chosen_stages(config, "vocab", "train")] == ["vocab", "train"]
    with pytest.raises(ConfigError, match="exchange them"):
        chosen_stages(config, "train", "vocab")
    raw["regenerate"]["enabled"] = True
    assert chosen_stages(parse_config(raw), "regenerate", "regenerate")[0].name == "regenerate"


def test_the_stage_processes_get_the_configuration_as_it_was_resolved(tmp_path):
    config = parse_config({**yaml.safe_load(CONFIG), "extract": {"layer_ids": [2, 4, 5, 8]}})
    with config_file(config) as path:
        assert load_config(path) == config
    assert not path.exists()


@pytest.mark.slow
def test_a_stage_is_run_skipped_when_committed_and_refused_when_it_differs(verifier, tmp_path):
    path = write_run(tmp_path, verifier)
    store = f"file://{tmp_path}/run"
    arguments = ["--config", str(path), "--store", store]

    first = eagle3("run", *arguments, "--until", "prepare")
    assert (first.returncode, first.stderr.count("Traceback")) == (0, 0)
    assert "prepare: " in first.stdout
    assert artifacts.find(open_store(store).child("prepare")) is not None

    again = eagle3("prepare", *arguments)
    assert again.returncode == 0
    assert "committed already as" in again.stdout
    assert "already committed" in again.stdout

    other = write_conversations(tmp_path / "other.jsonl", 12, seed=1)
    refused = eagle3("prepare", *arguments, "--data", str(other))
    assert refused.returncode == 65
    assert "prepare: inputs.data.0" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
def test_a_run_stops_at_the_first_stage_that_fails_with_its_exit_code(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    store = f"file://{tmp_path}/run"
    done = eagle3("run", "--config", str(path), "--store", store, "--from", "vocab")
    assert done.returncode == 66
    assert "run prepare first" in done.stderr
    assert "train" not in done.stdout + done.stderr


def test_the_gate_is_a_command_too(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    store = f"file://{tmp_path}/run"
    commit_upstreams(open_store(store))
    arguments = ["--config", str(path), "--store", store, "--stage", "train"]
    assert eagle3("gate", *arguments).returncode == 0
    open_store(store).delete("vocab/data_config.json")
    assert eagle3("gate", *arguments).returncode == 66


def wait_for(store: Store, path: str, process: subprocess.Popen[str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not store.exists(path):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"no {path} within {seconds} s"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_asked_to_stop_lets_its_stage_save_and_waits_for_it(
    verifier, tmp_path, number
):
    path = write_run(tmp_path, verifier, conversations=20_000)
    store = open_store(f"file://{tmp_path}/run")
    command = [sys.executable, "-m", "jobs.cli", "run", "--config", str(path)]
    with started([*command, "--store", store.url]) as process:
        wait_for(store, "prepare/rows-000000.safetensors", process, 90)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "run it again to continue" in err
    assert "Traceback" not in err
    assert artifacts.find(store.child("prepare")) is None


@pytest.mark.slow
def test_asked_twice_a_run_kills_its_stage_and_the_next_run_continues(verifier, tmp_path):
    path = write_run(tmp_path, verifier, conversations=400)
    store = open_store(f"file://{tmp_path}/run")
    command = [sys.executable, "-m", "jobs.cli", "prepare", "--config", str(path)]
    with started([*command, "--store", store.url]) as process:
        wait_for(store, "work/prepare/claim.json", process, 90)
        # The stage cannot answer the first one while it stands still.
        (child,) = children_of(process.pid)
        os.kill(child, signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 137
    assert "killed by signal 9" in err
    assert eagle3("prepare", "--config", str(path), "--store", store.url).returncode == 0


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


EVALUATED = {
    "acceptance_length_trained": 2.1,
    "acceptance_length_interval": [2.0, 2.2],
    "acceptance_per_position": [0.5, 0.3, 0.2],
    "repeated_4gram_share": 0.1,
    "heldout_prompts": 200,
    "lossless": True,
    "lossless_prompts": 64,
    "near_tie_divergences": 0,
}
RATES = {
    "tokens_per_second_with_draft": 80.0,
    "tokens_per_second_without": 60.0,
    "speedup": 1.33,
    "seconds": 200.0,
}


def finish(run: Store, upstream: Store) -> None:
    """Commit what comes after extract, as a whole run does, on another run's hidden states."""
    states = found(upstream, "extract")
    verifier = found(upstream, "verifier")
    facts = {"draft_vocab_size": 64, "coverage": 0.98}
    below = {"rows": found(upstream, "prepare"), "verifier": verifier}
    vocab = commit(run, "vocab", inputs=below, facts=facts, measured={"seconds": 2.0})
    below = {"states": states, "vocab": vocab, "verifier": verifier}
    seconds = {"seconds": 300.0}
    train = commit(run, "train", inputs=below, facts={"steps": 400}, measured=seconds)
    below = {"train": train, "vocab": vocab, "verifier": verifier}
    export = commit(run, "export", inputs=below)
    below = {"export": export, "prompts": found(upstream, "prepare"), "verifier": verifier}
    commit(run, "evaluate", inputs=below, facts=EVALUATED, measured=RATES)


def found(run: Store, kind: str) -> Artifact:
    artifact = artifacts.find(run.child(kind))
    assert artifact is not None
    return artifact


def test_a_finished_run_ends_in_its_summary_as_one_line_and_as_an_object(tmp_path):
    """Its hidden states are another run's: the summary follows the lineage to them."""
    upstream, run = (open_store(f"file://{tmp_path}/{name}") for name in ("first", "run"))
    commit_upstreams(upstream)
    finish(run, upstream)
    line = write_summary(run, {"train": 333.3})
    record = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert record == json.loads(line)
    assert "\n" not in line
    assert record["samples"] == 6
    assert record["acceptance_length_trained"] == 2.1
    # What was run just now counts with its start; of the rest the manifest's seconds are known.
    assert record["seconds_by_stage"] == {"vocab": 2.0, "train": 333.3, "evaluate": 200.0}
    assert record["seconds_total"] == 535.3


def test_a_run_without_its_evaluation_has_no_summary(tmp_path):
    run = open_store(f"file://{tmp_path}/run")
    commit_upstreams(run)
    with pytest.raises(UpstreamMissing):
        write_summary(run, {})
    assert not run.exists("summary.json")
