"""The gate as an init container runs it: its exit code, one sentence, and no waiting."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from eagle3.errors import PermissionRefused
from eagle3.store import Store, open_store
from jobs import gate
from tests.conftest import ROOT
from tests.upstreams import CONFIG, TOKENIZER, VERIFIER, commit, commit_upstreams, rewrite

VERSION_1 = {"model_path": "/m", "layer_ids": [2, 30, 58, 60], "data_format_version": 1}
SECONDS = 2.0


@dataclass(frozen=True)
class Gated:
    """How a gate process ended, and the processor seconds it took.

    It never waits, so that on a machine with nothing else to do they are its whole time.
    """

    code: int
    out: str
    err: str
    seconds: float
    termination: dict[str, object] | None


class Bench:
    """A run with every upstream of train, and the gate to run over it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = open_store(f"file://{folder}/run")
        self.config = folder / "run.yaml"
        self.config.write_text(CONFIG)

    def gate(self, stage: str = "train", **environment: str) -> Gated:
        log = self.folder / "termination-log"
        command = [sys.executable, "-m", "jobs.gate", "--stage", stage]
        command += ["--config", str(self.config), "--store", self.run.url]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "EAGLE3_TERMINATION_LOG": str(log), **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        record = json.loads(log.read_text()) if log.exists() else None
        return Gated(done.returncode, done.stdout, done.stderr, seconds, record)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path)
    commit_upstreams(bench.run)
    return bench


def test_whole_upstreams_open_the_gate_with_one_line_each(bench):
    gated = bench.gate()
    assert (gated.code, gated.err) == (0, "")
    lines = gated.out.splitlines()
    assert [line.split()[1] for line in lines] == ["train.states", "train.vocab", "train.verifier"]
    assert gated.termination is None


def test_a_stage_without_upstreams_passes(bench):
    assert bench.gate("prepare").code == 0


def test_a_store_that_may_only_be_read_does_not_open_it(bench, monkeypatch):
    """What its stage would end of, again in each new pod, ends the Job here at once."""

    def refuse(store: Store) -> None:
        raise PermissionRefused(store.url, wanted="to write", found="no", remedy="ask")

    arguments = ["--stage", "prepare", "--config", str(bench.config), "--store", bench.run.url]
    before = bench.run.list()
    assert gate.main(arguments) == 0
    assert bench.run.list() == before, "it leaves nothing"
    monkeypatch.setattr(Store, "probe", refuse)
    assert gate.main(arguments) == 77


def no_manifest(run: Store) -> None:
    run.delete("extract/data_config.json")


def half_a_manifest(run: Store) -> None:
    data = run.read_bytes("extract/data_config.json")
    run.write_bytes("extract/data_config.json", data[: len(data) // 2])


def an_old_manifest(run: Store) -> None:
    run.write_bytes("extract/data_config.json", json.dumps(VERSION_1).encode())


def a_lost_object(run: Store) -> None:
    run.delete("extract/extract-000001.safetensors")


def a_short_object(run: Store) -> None:
    data = run.read_bytes("extract/extract-000001.safetensors")
    run.write_bytes("extract/extract-000001.safetensors", data[:-1])


def another_kind(run: Store) -> None:
    run.write_bytes("extract/data_config.json", run.read_bytes("prepare/data_config.json"))


def sums_that_do_not_add_up(run: Store) -> None:
    rewrite(run, "extract", rows_in=7)


def another_layer_convention(run: Store) -> None:
    rewrite(run, "extract", layer_id_convention="output_of_layer", layer_ids=[2, 4, 5, 7])


def another_verifier(run: Store) -> None:
    rewrite(run, "vocab", verifier=msgspec.structs.replace(VERIFIER, fingerprint="0" * 64))


def another_tokenizer(run: Store) -> None:
    rewrite(run, "vocab", tokenizer=msgspec.structs.replace(TOKENIZER, fingerprint="0" * 64))


def a_mapping_from_other_rows(run: Store) -> None:
    other = open_store(f"{run.url}-other")
    rows = commit(other, "prepare", identity="other rows")
    made = commit(other, "vocab", inputs={"rows": rows})
    for info in made.store.list():
        run.write_bytes(f"vocab/{info.path}", made.store.read_bytes(info.path))


BROKEN: dict[Callable[[Store], None], tuple[int, str]] = {
    no_manifest: (66, "extract/data_config.json: wanted a committed extract"),
    half_a_manifest: (65, "wanted a JSON object"),
    an_old_manifest: (65, "data_format_version"),
    a_lost_object: (65, "extract-000001.safetensors"),
    a_short_object: (65, "extract-000001.safetensors"),
    another_kind: (65, "artifact: wanted extract, found prepare"),
    sums_that_do_not_add_up: (65, "rows_in"),
    another_layer_convention: (65, "layer_id_convention"),
    another_verifier: (65, "verifier.fingerprint"),
    another_tokenizer: (65, "tokenizer.fingerprint"),
    a_mapping_from_other_rows: (65, "inputs.rows.digest"),
}


@pytest.mark.parametrize("breaking", BROKEN, ids=lambda breaking: breaking.__name__)
def test_a_broken_upstream_is_one_sentence_and_its_exit_code(bench, breaking):
    code, words = BROKEN[breaking]
    breaking(bench.run)
    gated = bench.gate()
    assert gated.code == code
    assert words in gated.err
    assert gated.err.startswith("gate: ")
    assert len(gated.err.splitlines()) == 1
    assert gated.err.rstrip().endswith(".")
    assert gated.termination is not None
    assert gated.termination["exit_code"] == code
    assert gated.termination["retry_can_help"] is False
    assert gated.termination["stage"] == "gate"
    assert gated.seconds < SECONDS


def test_the_gate_loads_nothing_heavy():
    code = "import sys, jobs.gate; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    heavy = {"torch", "transformers", "vllm", "speculators", "numpy", "pyarrow", "typer", "s3fs"}
    assert heavy & set(loaded.stdout.split()) == set()


def test_an_input_named_by_url_is_gated_where_it_lies(bench, tmp_path):
    other = open_store(f"file://{tmp_path}/other")
    commit_upstreams(other)
    a_lost_object(bench.run)
    bench.config.write_text(f"{CONFIG}\ninputs: {{train.states: {other.url}/extract}}\n")
    assert bench.gate().code == 0
    a_lost_object(other)
    assert f"{other.url}/extract/extract-000001" in bench.gate().err


def test_rows_come_from_regenerate_unless_the_run_leaves_it_out(bench):
    assert bench.gate("vocab").code == 0
    bench.config.write_text(CONFIG.replace("enabled: false", "enabled: true"))
    gated = bench.gate("vocab")
    assert gated.code == 66
    assert "run regenerate first" in gated.err


@pytest.mark.parametrize("stage", ["extract", "vocab"])
def test_prompts_that_nobody_answered_do_not_pass_by_leaving_regenerate_out(bench, stage):
    rewrite(bench.run, "prepare", facts={"unanswered": 3})
    gated = bench.gate(stage)
    assert gated.code == 65
    assert "found 3; run regenerate first" in gated.err


@pytest.mark.parametrize("stage", ["tran", ""])
def test_no_stage_of_that_name_is_a_usage_error(bench, stage):
    gated = bench.gate(stage)
    assert gated.code == 64
    assert len(gated.err.splitlines()) == 1


@pytest.mark.slow
def test_the_same_gate_over_s3(s3_environment, bench):
    run = open_store(f"s3://bucket/{bench.folder.name}")
    for info in bench.run.list():
        run.write_bytes(info.path, bench.run.read_bytes(info.path))
    bench.run = run
    assert bench.gate().code == 0
    a_short_object(run)
    assert bench.gate().code == 65
    assert bench.gate(AWS_SECRET_ACCESS_KEY="0" * 40).code == 77
