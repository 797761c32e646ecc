"""`eagle3 plan`: what is done and what is to do, and arithmetic that can be checked by hand."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from eagle3 import artifact as artifacts
from eagle3.config import RunConfig, load_config, parse_config
from eagle3.config_fields import settings_that_affect
from eagle3.errors import ConfigError
from eagle3.manifest import FileEntry, SourceFile, VerifierFacts
from eagle3.planning import (
    DEFAULT_RATES,
    DraftShape,
    RunPlan,
    StagePlan,
    draft_shape,
    extract_bytes,
    frozen_parameters,
    state_bytes,
    trained_parameters,
    training_memory,
)
from eagle3.stages import STAGE_NAMES
from eagle3.store import Store, open_store
from eagle3.work import UnitRecord, Work
from jobs import cli
from jobs.plan import as_json, make_plan, show
from tests.conftest import ROOT
from tests.upstreams import HIDDEN_STATES, VERIFIER, commit

KIMI = VerifierFacts(fingerprint="", num_hidden_layers=61, hidden_size=7168, vocab_size=163840)
KIMI_TEXT = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "kv_lora_rank": 512,
}
LLAMA_TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "vocab_size": 512,
    "intermediate_size": 128,
    "num_attention_heads": 2,
}


def kimi() -> RunConfig:
    return load_config(ROOT / "docs" / "examples" / "kimi-k2.5.yaml")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A verifier's config.json and 4,500 bytes of conversations."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_TEXT))
    (tmp_path / "chats.jsonl").write_bytes(b"x" * 4500)
    return tmp_path


def config_of(folder: Path, **sections: Any) -> RunConfig:
    plain = {
        "verifier": {"source": str(folder / "model"), "serving_name": "org/model"},
        "prepare": {"data": [str(folder / "chats.jsonl")], "max_seq_len": 128},
        "regenerate": {"enabled": False},
        "vocab": {"draft_vocab_size": 64},
    }
    return parse_config({**plain, **sections})


def stages_of(plan: RunPlan) -> dict[str, StagePlan]:
    return {stage.stage: stage for stage in plan.stages}


def test_a_token_of_kimi_is_57344_bytes_of_states():
    # 4 layers x 7,168 numbers x 2 bytes.
    assert state_bytes(7168) == 57_344
    # A million tokens in 500 rows: 57.344 GB, 16 MB of ids and masks, 175 kB of headers.
    assert extract_bytes(1_000_000, 500, 7168) == 57_344_000_000 + 16_000_000 + 175_000


def test_kimi_s_draft_is_counted_by_hand():
    shape = draft_shape(kimi(), KIMI_TEXT)
    assert shape == DraftShape(
        num_layers=1,
        intermediate_size=12288,
        num_attention_heads=64,
        num_key_value_heads=64,
        head_dim=128,
    )
    fc = 3 * 7168 * 7168  # 154,140,672
    queries_keys_values = 3 * (2 * 7168) * 8192  # 352,321,536
    output = 8192 * 7168  # 58,720,256
    mlp = 3 * 7168 * 12288  # 264,241,152
    norms = (3 + 1 + 3) * 7168  # 50,176
    assert fc + queries_keys_values + output + mlp + norms == 829_473_792
    assert trained_parameters(shape, 7168, norm_before_fc=True) == 829_473_792
    # Embedding 163,840 rows, both lm_heads 32,000 each, the verifier's norm one.
    assert frozen_parameters(7168, 163840, 32000) == (163_840 + 64_000 + 1) * 7168


def test_kimi_s_training_memory_is_counted_by_hand():
    config = kimi()
    shape = draft_shape(config, KIMI_TEXT)
    assert shape is not None
    memory = training_memory(config, KIMI, shape, 8)
    # float32: weight, gradient and Muon's one moment of what is trained, the weight of the rest.
    assert memory.states == 4 * (3 * 829_473_792 + 1_633_164_288)
    # A token: 3 steps x (12 x 32,000 + 2 x (20 x 7,168 + 4 x 12,288 + 4 x 8,192)), and its states.
    assert memory.activations == 8192 * (3 * (384_000 + 2 * 225_280) + 57_344)
    assert memory.per_gpu == memory.states // 8 + memory.activations
    assert 20e9 < memory.per_gpu < 30e9


def test_the_draft_s_tensors_are_those_of_a_real_checkpoint():
    """The shapes that upstream saves (tests/tiny_verifiers.py), less what it does not train."""
    hidden, inner, queries, keys = 64, 128, 64, 32
    matrices = 3 * hidden * hidden + 2 * hidden * (queries + 2 * keys) + hidden * queries
    matrices += 3 * hidden * inner
    text = {**LLAMA_TEXT, "num_key_value_heads": 1, "head_dim": 32}
    shape = draft_shape(
        parse_config({"verifier": {"source": "m"}, "prepare": {"data": ["a"]}}), text
    )
    assert shape is not None
    assert trained_parameters(shape, hidden, norm_before_fc=False) == matrices + 4 * hidden


def test_a_latent_attention_verifier_lends_no_shape():
    config = parse_config({"verifier": {"source": "m"}, "prepare": {"data": ["a"]}})
    assert draft_shape(config, KIMI_TEXT) is None
    assert draft_shape(config, LLAMA_TEXT) == DraftShape(
        num_layers=1,
        intermediate_size=128,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
    )


def test_without_a_store_tokens_are_estimated_from_the_files_and_that_is_said(folder):
    plan = make_plan(config_of(folder), None)
    found = stages_of(plan)
    assert plan.counted.startswith("estimated: 4,500 bytes of text")
    assert found["extract"].tokens == 1000
    assert found["extract"].rows == 8
    assert found["extract"].bytes == extract_bytes(1000, 8, 64)
    assert found["train"].tokens == 3000
    assert [stage.state for stage in plan.stages] == ["to run"] * 6
    assert "regenerate" not in found


def test_packed_files_and_patterns_are_taken_by_what_is_inside(folder):
    shutil.copy(folder / "chats.jsonl", folder / "chats-2.jsonl")
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress(b"x" * 900))
    size = (folder / "packed.jsonl.gz").stat().st_size
    data = [str(folder / "chats*.jsonl"), str(folder / "packed.jsonl.gz")]
    plan = make_plan(config_of(folder, prepare={"data": data, "max_seq_len": 128}), None)
    assert plan.counted.startswith(f"estimated: {9000 + int(3.5 * size):,} bytes")


def test_a_bound_on_conversations_bounds_the_tokens(folder):
    data = {"data": [str(folder / "chats.jsonl")], "max_seq_len": 128, "max_conversations": 2}
    plan = make_plan(config_of(folder, prepare=data), None)
    assert stages_of(plan)["extract"].tokens == 256
    assert plan.counted.startswith("at most: 2 conversations of 128 tokens")


def run_up_to_extract(store: Store, folder: Path) -> None:
    data = json.dumps(LLAMA_TEXT).encode()
    store.create_bytes("verifier/config.json", data)
    sha256 = hashlib.sha256(data).hexdigest()
    entry = FileEntry(path="config.json", bytes=len(data), sha256=sha256)
    nothing = {"rows_in": 0, "rows_kept": 0, "total_samples": 0, "total_tokens": 0}
    verifier = commit(store, "verifier", files=(entry,), **nothing)
    chats = str(folder / "chats.jsonl")
    sources = (SourceFile(url=f"file://{chats}", bytes=4500, sha256="c" * 64),)
    rows = commit(store, "prepare", verifier=VERIFIER, sources=sources)
    below = {"rows": rows, "verifier": verifier}
    figures = {"tokens_per_second": 600.0}
    commit(store, "extract", inputs=below, measured=figures, **HIDDEN_STATES)


@pytest.fixture
def store(folder: Path) -> Store:
    store = open_store(f"file://{folder}/run")
    run_up_to_extract(store, folder)
    return store


def test_what_stands_is_cached_and_its_own_counts_and_rates_are_taken(folder, store):
    plan = make_plan(config_of(folder), store)
    found = stages_of(plan)
    assert [found[name].state for name in STAGE_NAMES if name in found] == [
        *["cached"] * 2,
        *["to run"] * 4,
    ]
    assert plan.counted == "counted by extract"
    assert found["train"].tokens == 3 * 60
    assert found["extract"].hours == 0
    assert found["extract"].rate is not None
    assert (found["extract"].rate.tokens_per_second, found["extract"].rate.source) == (
        600.0,
        "measured",
    )
    assert found["extract"].bytes == sum(
        info.bytes for info in store.list("extract") if "data_config" not in info.path
    )
    assert found["vocab"].why == "what it reads is there"
    assert found["export"].why == "waits for train"


def test_other_settings_than_those_that_stand_are_refused_before_they_cost(folder, store):
    recorded = {"unit_rows": 32}
    shutil.rmtree(store.local_path() / "extract")
    commit(store, "extract", config=recorded, **HIDDEN_STATES)
    plan = make_plan(config_of(folder), store)
    assert stages_of(plan)["extract"].state == "refused"
    assert "extract.unit_rows 32, and is 64 now" in stages_of(plan)["extract"].why
    assert any(warning.startswith("extract would be refused") for warning in plan.warnings)


def test_an_input_that_is_another_by_now_is_refused(folder, store):
    shutil.rmtree(store.local_path() / "prepare")
    commit(store, "prepare", verifier=VERIFIER, facts={"other": 1})
    plan = make_plan(config_of(folder), store)
    assert stages_of(plan)["extract"].state == "refused"
    assert "input rows is" in stages_of(plan)["extract"].why


def test_begun_work_goes_on_or_is_refused(folder, store):
    config = config_of(folder)
    Work(store, "train").claim({}, {"epochs": 3})
    train = stages_of(make_plan(config, store))["train"]
    assert (train.state, train.why) == ("to run", "begun; told as if nothing of it were done")
    other = config_of(folder, train={"epochs": 5})
    refused = stages_of(make_plan(other, store))["train"]
    assert refused.state == "refused"
    assert refused.why.startswith("begun with train.epochs 3, and is 5 now")


@pytest.fixture
def begun(folder: Path) -> Store:
    """A run whose extract has not finished: claimed with the ids that `null` stands for."""
    store = open_store(f"file://{folder}/begun")
    run_up_to_extract(store, folder)
    shutil.rmtree(store.local_path() / "extract")
    claimed_extract(folder, store)
    return store


def claimed_extract(folder: Path, store: Store) -> Work:
    rows = artifacts.find(store.child("prepare"))
    assert rows is not None
    claimed = {**settings_that_affect(config_of(folder).extract), "layer_ids": [2, 4, 5, 8]}
    work = Work(store, "extract")
    work.claim({"rows": rows.digest}, claimed)
    return work


def test_begun_with_the_default_layers_goes_on_with_null_and_with_the_same_ids_written(
    folder, begun
):
    for ids in (None, [2, 4, 5, 8]):
        extract = stages_of(make_plan(config_of(folder, extract={"layer_ids": ids}), begun))
        assert extract["extract"].state == "to run", ids
        assert extract["extract"].hours > 0
    other = config_of(folder, extract={"layer_ids": [1, 4, 5, 8]})
    refused = stages_of(make_plan(other, begun))["extract"]
    assert refused.why.startswith(
        "begun with extract.layer_ids [2, 4, 5, 8], and is [1, 4, 5, 8] now"
    )


def test_begun_with_other_layers_than_the_default_is_refused_for_null(folder, begun):
    claim = begun.local_path("work/extract/claim.json")
    assert claim is not None
    claim.write_text(claim.read_text().replace("[2,4,5,8]", "[1,4,5,8]"))
    refused = stages_of(make_plan(config_of(folder), begun))["extract"]
    assert (refused.state, refused.hours) == ("refused", 0.0)
    assert "extract.layer_ids [1, 4, 5, 8], and is [2, 4, 5, 8] now" in refused.why


@pytest.mark.parametrize("damaged", [b"", b"null", b"[]", b"{}", b"[" * 100_000])
def test_a_damaged_claim_is_refused_as_run_refuses_it(folder, begun, damaged):
    begun.write_bytes("work/extract/claim.json", damaged)
    refused = stages_of(make_plan(config_of(folder), begun))["extract"]
    assert (refused.state, refused.hours) == ("refused", 0.0)
    assert "claim.json: wanted the inputs and settings with which" in refused.why


def test_committed_with_the_default_layers_is_cached_by_null_and_by_the_same_ids(folder, store):
    for ids, state in ((None, "cached"), ([2, 4, 5, 8], "cached"), ([1, 4, 5, 8], "refused")):
        config = config_of(folder, extract={"layer_ids": ids})
        shutil.rmtree(store.local_path() / "extract")
        commit(store, "extract", config={"layer_ids": None}, **HIDDEN_STATES)
        assert stages_of(make_plan(config, store))["extract"].state == state, ids


def test_begun_on_another_input_is_refused(folder, begun):
    shutil.rmtree(begun.local_path() / "prepare")
    commit(begun, "prepare", verifier=VERIFIER, facts={"other": 1})
    assert "input rows is" in stages_of(make_plan(config_of(folder), begun))["extract"].why


def test_only_what_no_finished_unit_has_done_is_still_to_come(folder, begun):
    whole = stages_of(make_plan(config_of(folder), begun))["extract"]
    entry = FileEntry(path="hidden-000000.safetensors", bytes=10_000, sha256="d" * 64)
    record = UnitRecord(unit=0, rows_in=4, rows_kept=4, files=(entry,))
    claimed_extract(folder, begun).record(record)
    plan = make_plan(config_of(folder), begun)
    extract = stages_of(plan)["extract"]
    assert extract.why == "begun, 1 units done, 67% of the rows", "4 rows of 6"
    assert extract.hours == pytest.approx(whole.hours / 3)
    assert extract.bytes_to_write == pytest.approx(whole.bytes / 3, abs=1)
    assert extract.bytes == 10_000 + extract.bytes_to_write
    others = sum(stage.bytes_to_write for stage in plan.stages if stage.stage != "extract")
    assert plan.bytes_to_write == others + extract.bytes_to_write
    assert plan.gpu_hours == pytest.approx(sum(one.hours * one.gpus for one in plan.stages))


def test_units_of_answers_are_counted_by_the_rows_they_are_cut_from(folder, begun):
    config = config_of(folder, regenerate={"enabled": True, "unit_rows": 2})
    work = Work(begun, "regenerate")
    work.claim({}, {})
    # Two rows of one conversation: its record counts one.
    work.record(UnitRecord(unit=0, rows_in=1, rows_kept=1))
    assert stages_of(make_plan(config, begun))["regenerate"].why.endswith("33% of the rows")


def appended(folder: Path) -> dict[str, Any]:
    with (folder / "chats.jsonl").open("ab") as file:
        file.write(b"one more\n")
    return {}


def one_more(folder: Path) -> dict[str, Any]:
    shutil.copy(folder / "chats.jsonl", folder / "more.jsonl")
    data = [str(folder / "chats.jsonl"), str(folder / "more.jsonl")]
    return {"prepare": {"data": data, "max_seq_len": 128}}


def other_verifier(folder: Path) -> dict[str, Any]:
    text = json.dumps({**LLAMA_TEXT, "num_hidden_layers": 9})
    (folder / "model" / "config.json").write_text(text)
    return {}


DATA = {
    appended: "chats.jsonl has 4,509 bytes, and had 4,500",
    one_more: "prepare.data names 2 files, and named 1",
    other_verifier: "verifier.source has num_hidden_layers 9, and had 8",
}


@pytest.mark.parametrize("change", DATA, ids=lambda change: change.__name__)
def test_other_conversations_or_another_verifier_than_prepare_read_are_refused(
    change, folder, store
):
    assert stages_of(make_plan(config_of(folder), store))["prepare"].state == "cached"
    found = stages_of(make_plan(config_of(folder, **change(folder)), store))["prepare"]
    assert found.state == "refused"
    assert DATA[change] in found.why


def test_files_that_were_moved_or_are_gone_tell_nothing_of_what_prepare_read(folder, store):
    (folder / "moved").mkdir()
    shutil.move(folder / "chats.jsonl", folder / "moved" / "chats.jsonl")
    assert stages_of(make_plan(config_of(folder), store))["prepare"].state == "cached"
    data = {"data": [str(folder / "moved" / "*.jsonl")], "max_seq_len": 128}
    assert stages_of(make_plan(config_of(folder, prepare=data), store))["prepare"].state == "cached"


def test_begun_prepare_is_refused_for_more_files_and_for_answers_to_come(folder):
    store = open_store(f"file://{folder}/new")
    claim = {"regenerate": {"enabled": False}}
    Work(store, "prepare").claim({"data.0": "c" * 64}, claim)
    assert stages_of(make_plan(config_of(folder), store))["prepare"].state == "to run"
    more = stages_of(make_plan(config_of(folder, **one_more(folder)), store))["prepare"]
    assert more.why.startswith("prepare.data names 2 files, and named 1")
    answers = config_of(folder, regenerate={"enabled": True})
    refused = stages_of(make_plan(answers, store))["prepare"]
    assert refused.why.startswith("begun with regenerate {'enabled': False}, and is")


def test_a_draft_exported_under_another_name_is_refused(folder, store):
    commit(store, "export", facts={"serving_name": "org/model"})
    config = config_of(folder)
    assert stages_of(make_plan(config, store))["export"].state == "cached"
    renamed = {"source": str(folder / "model"), "serving_name": "org/other"}
    refused = stages_of(make_plan(config_of(folder, verifier=renamed), store))["export"]
    assert refused.why.startswith("verifier.serving_name org/model, and is org/other now")


def test_another_run_s_artefact_counts_as_done(folder, store):
    config = config_of(
        folder,
        inputs={
            "train.states": f"{store.url}/extract",
            "train.verifier": f"{store.url}/verifier",
        },
    )
    plan = make_plan(config, open_store(f"file://{folder}/second"))
    assert stages_of(plan)["extract"].why == f"read from {store.url}/extract"


def test_hours_and_gpus_follow_from_rates_and_nodes(folder):
    one = stages_of(make_plan(config_of(folder), None))["extract"]
    rate = DEFAULT_RATES["extract_tokens_per_second"]
    assert one.hours == pytest.approx(1000 / rate / 3600)
    assert one.gpus == 8
    two = make_plan(config_of(folder), None, nodes=2)
    assert stages_of(two)["extract"].hours == pytest.approx(one.hours / 2)
    assert stages_of(two)["extract"].gpus == 16
    assert stages_of(two)["train"].gpus == 8, "only what shares its work is given more nodes"
    assert any("assumed rates" in warning for warning in two.warnings)


def test_given_rates_stand_over_all_others(folder, store):
    path = folder / "rates.json"
    path.write_text(json.dumps({"extract_tokens_per_second": 5, "train_tokens_per_second": 100}))
    measured = folder / "extract.json"
    measured.write_text(json.dumps({"extract_tokens_per_second": 7}))
    plan = make_plan(config_of(folder), store, rates=[path, measured])
    assert stages_of(plan)["train"].hours == pytest.approx(180 / 100 / 3600)
    # 4 x 64 x 2 bytes of states and 16 of ids and mask.
    assert plan.training_bytes_per_second == 100 * (512 + 16)
    assert plan.training_bytes == 60 * 528 * 3
    extract = stages_of(plan)["extract"].rate
    assert extract is not None
    assert extract.source == "extract.json", "the later file counts more"


@pytest.mark.parametrize("text", ["[]", "{", '{"train_tokens_per_second": 0}'])
def test_rates_that_are_none_are_refused(folder, text):
    path = folder / "rates.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"rates\.json"):
        make_plan(config_of(folder), None, rates=[path])


def test_a_store_without_room_is_warned_of(folder, monkeypatch):
    full = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr("jobs.plan.shutil.disk_usage", lambda place: full)
    plan = make_plan(config_of(folder), open_store(f"file://{folder}/new/run"))
    assert any(warning.startswith("the store has room for") for warning in plan.warnings)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"verifier": {"source": "org/model"}}, "of the hub"),
        ({"verifier": {"source": "/nowhere", "serving_name": "x"}}, "FileNotFoundError"),
        ({"prepare": {"data": ["/nowhere/a.jsonl"], "max_seq_len": 128}}, r"prepare\.data"),
    ],
)
def test_what_cannot_be_known_is_refused_by_name(folder, changes, words):
    with pytest.raises(ConfigError, match=words):
        make_plan(config_of(folder, **changes), None)


def test_a_person_reads_tables_and_a_program_json(folder, store, capsys):
    path = folder / "run.yaml"
    path.write_bytes(msgspec.json.encode(config_of(folder)))
    assert cli.main(["plan", "--config", str(path), "--store", store.url]) == 0
    out = capsys.readouterr().out
    assert "cached" in out
    assert "Rows and tokens: counted by extract." in out
    assert "of activations on each" in out
    assert cli.main(["plan", "--config", str(path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["stages"][0]["stage"] == "prepare"
    assert record == json.loads(as_json(make_plan(config_of(folder), None)))
    wide = io.StringIO()
    show(make_plan(config_of(folder), None), Console(file=wide, width=200))
    assert "assumed" in wide.getvalue()


def test_neither_torch_nor_an_engine_is_needed():
    code = "import sys, jobs.plan; print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
