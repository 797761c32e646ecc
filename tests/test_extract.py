"""extract on the shipped fake: what it writes, what it refuses, how it goes on."""

import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import yaml

from eagle3.capture import Capture, CapturedRow
from eagle3.capture.units import Plan
from eagle3.errors import (
    CaptureInvalid,
    ConfigError,
    IdentityConflict,
    ServiceUnavailable,
    ShardInvalid,
    Stopped,
    VerifierInvalid,
)
from eagle3.manifest import default_layer_ids
from eagle3.progress import Progress
from eagle3.removal import plan_removal, remove
from eagle3.shards import Sample, ShardReader, encode_samples, header_of
from eagle3.store import Store, open_store
from eagle3.vllm_capture import EngineOptions
from eagle3.work import Work
from jobs import extract, prepare, process
from tests.tiny_run import (
    artifact_at,
    content_of,
    done_in,
    rows_of,
    stage_run,
    start_fake_capture,
    write_config,
    write_conversations,
)
from tests.tiny_verifiers import make_llama

NO_REGENERATE = {"regenerate": {"enabled": False}}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a verifier, a configuration and a run that has been prepared."""
    folder = tmp_path_factory.mktemp("prepared")
    verifier = make_llama(folder / "verifier")
    data = write_conversations(folder / "chats.jsonl", 40)
    config = write_config(folder / "run.yaml", verifier, data, **NO_REGENERATE)
    assert prepare.main(["--config", str(config), "--store", str(folder / "run")]) == 0
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil."""
    return Path(shutil.copytree(prepared, tmp_path / "copy"))


def store_of(folder: Path) -> Store:
    return open_store(str(folder / "run"))


def run_extract(
    folder: Path, start: extract.StartCapture = start_fake_capture, *, index: int = 0
) -> str:
    run = stage_run("extract", folder / "run.yaml", store_of(folder), index=index)
    return extract.story(run, start)


def set_extract(folder: Path, **settings: object) -> None:
    config = yaml.safe_load((folder / "run.yaml").read_text())
    config["extract"] = {**config["extract"], **settings}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))


def never(model: Path, plan: Plan, scratch: Path) -> Capture:
    raise AssertionError("the engine was started")


def test_the_engine_s_start_is_told_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def started(options: EngineOptions, *, layer_ids: Sequence[int], scratch: Path) -> Capture:
        plan = Plan(layer_ids=tuple(layer_ids), hidden_size=64, max_seq_len=256, units=())
        return start_fake_capture(options.model, plan)

    monkeypatch.setattr(extract, "VllmCapture", started)
    arguments = ["--config", str(folder / "run.yaml"), "--store", str(folder / "run")]
    assert extract.main(arguments) == 0
    assert extract.main(arguments) == 0
    assert capsys.readouterr().err.count("extract: starting vLLM\n") == 1


def test_the_bar_moves_within_a_unit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []
    monkeypatch.setattr(Progress, "under_way", lambda self, count: shown.append(count))
    set_extract(folder, unit_rows=10)
    run_extract(folder)
    assert shown[:11] == [*range(1, 11), 1]


class Changed:
    """The fake with one thing done to every row, counted from the first after the gate's."""

    def __init__(self, capture: Capture, change: Callable[[int, CapturedRow], CapturedRow]) -> None:
        self._capture, self._change, self._count = capture, change, 0
        self._gated = False

    def capture(self, rows: Sequence[Sequence[int]]) -> Iterator[CapturedRow]:
        if not self._gated:
            self._gated = True
            yield from self._capture.capture(rows)
            return
        for row in self._capture.capture(rows):
            self._count += 1
            yield self._change(self._count - 1, row)

    def layer_ids(self) -> tuple[int, ...]:
        return self._capture.layer_ids()

    def prompt_logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        return self._capture.prompt_logprobs(ids)

    def close(self) -> None:
        self._capture.close()


def changed(change: Callable[[int, CapturedRow], CapturedRow]) -> extract.StartCapture:
    return lambda model, plan, scratch: Changed(start_fake_capture(model, plan), change)


def nan_in_row(number: int) -> extract.StartCapture:
    def spoil(count: int, row: CapturedRow) -> CapturedRow:
        if count == number:
            row.hidden_states[0, 0, 0] = float("nan")
        return row

    return changed(spoil)


def zero(count: int, row: CapturedRow) -> CapturedRow:
    """Nothing in the rows of the first unit."""
    return CapturedRow(row.token_ids, row.hidden_states * 0) if count < 8 else row


def test_every_prepared_row_comes_out_with_its_ids_mask_and_states(folder: Path) -> None:
    run_extract(folder)
    found, rows = artifact_at(store_of(folder), "extract"), artifact_at(store_of(folder), "prepare")
    wanted = {row.row: row for row in rows_of(rows)}
    plan = Plan(layer_ids=default_layer_ids(8), hidden_size=64, max_seq_len=0, units=())
    capture = start_fake_capture(folder / "verifier", plan)
    samples = [
        reader.read(ref)
        for entry in found.manifest.files
        for reader in [ShardReader(found.store, entry.path)]
        for ref in reader.refs()
    ]
    assert [sample.row for sample in samples] == list(wanted)
    for sample in samples:
        row = wanted[sample.row]
        assert torch.equal(sample.input_ids, row.input_ids)
        assert torch.equal(sample.loss_mask, row.loss_mask)
        (captured,) = capture.capture([row.input_ids.tolist()])
        assert torch.equal(sample.hidden_states, captured.hidden_states.to(torch.bfloat16))


def test_the_manifest_keeps_the_ten_fields_of_version_1_and_names_its_conventions(
    folder: Path,
) -> None:
    run_extract(folder)
    manifest = artifact_at(store_of(folder), "extract").manifest
    rows = artifact_at(store_of(folder), "prepare")
    assert manifest.model_path == str(
        yaml.safe_load((folder / "run.yaml").read_text())["verifier"]["source"]
    )
    assert manifest.layer_ids == (2, 4, 5, 8)
    assert (manifest.max_seq_len, manifest.tp_size, manifest.data_format_version) == (256, 1, 2)
    assert manifest.total_samples == manifest.rows_kept == rows.manifest.total_samples
    assert manifest.total_tokens == rows.manifest.total_tokens
    assert (manifest.hidden_size, manifest.num_layers_captured) == (64, 4)
    assert manifest.total_time_seconds is not None
    assert manifest.total_time_seconds > 0
    assert manifest.layer_id_convention == "input_of_layer"
    assert (manifest.final_hidden_state, manifest.dtype, manifest.codec) == (
        "pre_norm",
        "bfloat16",
        "none",
    )
    assert manifest.inputs["rows"].digest == rows.digest
    assert manifest.measured["gate_rows"] == 4
    assert manifest.measured["gate_mean_nats"] < 1e-3
    assert manifest.measured["gate_stored_nats"] < 0.05
    assert manifest.measured["tokens_per_second"] > 0


def test_committed_work_is_not_done_again(folder: Path) -> None:
    run_extract(folder)
    assert run_extract(folder, never).startswith("already committed")


def test_when_only_the_manifest_is_missing_no_engine_is_started(folder: Path) -> None:
    run_extract(folder)
    before = artifact_at(store_of(folder), "extract")
    content = content_of(store_of(folder), "extract")
    store_of(folder).delete("extract/data_config.json")
    run_extract(folder, never)
    assert content_of(store_of(folder), "extract") == content
    measured = artifact_at(store_of(folder), "extract").manifest.measured
    proven = {name: value for name, value in measured.items() if name.startswith("gate_")}
    assert proven == {name: before.manifest.measured[name] for name in proven}
    assert len(proven) == 7


def test_an_object_without_a_record_is_written_over_by_its_own_bytes_only(folder: Path) -> None:
    run_extract(folder)
    before = content_of(store_of(folder), "extract")
    store_of(folder).delete("extract/data_config.json")
    done_in(store_of(folder), "extract").delete("units/000001.json")
    run_extract(folder)
    assert content_of(store_of(folder), "extract") == before


def orphan(folder: Path, change: Callable[[Sample], Sample], identity: str = "") -> str:
    """Leave unit 1's object with changed samples and no record; returns its sha256.

    Args: identity: that it names; by default the claim's.
    """
    run_extract(folder)
    store = store_of(folder)
    path = "extract/hidden-000001.safetensors"
    reader = ShardReader(store, path)
    samples = [change(reader.read(ref)) for ref in reader.refs()]
    data = encode_samples(samples, identity=identity or Work(store, "extract").identity)
    for name in (path, "extract/data_config.json"):
        store.delete(name)
    done_in(store, "extract").delete("units/000001.json")
    store.create_bytes(path, data)
    return store.sha256(path)


def test_another_workers_object_of_the_same_rows_is_adopted(folder: Path) -> None:
    def rounded_elsewhere(sample: Sample) -> Sample:
        states = sample.hidden_states * 1.01
        return Sample(
            row=sample.row,
            input_ids=sample.input_ids,
            loss_mask=sample.loss_mask,
            hidden_states=states,
        )

    sha256 = orphan(folder, rounded_elsewhere)
    run_extract(folder)
    content = content_of(store_of(folder), "extract")
    assert content["objects"]["hidden-000001.safetensors"] == sha256
    rows = artifact_at(store_of(folder), "prepare")
    assert content["rows"] == [row.row for row in rows_of(rows)]


def test_another_workers_object_of_other_rows_is_refused(folder: Path) -> None:
    def of_another_run(sample: Sample) -> Sample:
        return Sample(
            row=sample.row,
            input_ids=sample.input_ids.flip(0),
            loss_mask=sample.loss_mask,
            hidden_states=sample.hidden_states,
        )

    orphan(folder, of_another_run)
    with pytest.raises(ShardInvalid, match="a row of this unit"):
        run_extract(folder)
    assert not store_of(folder).exists("extract/data_config.json")


def test_an_object_of_other_settings_is_never_adopted_though_its_rows_and_shapes_are_ours(
    folder: Path,
) -> None:
    orphan(folder, lambda sample: sample, identity="0" * 64)
    with pytest.raises(IdentityConflict, match=r"found one of 0{16}; stop the process"):
        run_extract(folder)
    assert not store_of(folder).exists("extract/data_config.json")


def test_every_object_names_the_identity_of_its_manifest(folder: Path) -> None:
    run_extract(folder)
    found = artifact_at(store_of(folder), "extract")
    for entry in found.manifest.files:
        header = header_of(found.store.read_bytes(entry.path), entry.path)
        assert header.identity == found.manifest.identity


def test_a_worker_taken_for_dead_whose_prefix_is_another_s_by_now_adds_nothing_to_it(
    folder: Path,
) -> None:
    """It wakes when the run was deleted and begun with other layers, and before any of its units
    was done there."""
    store = store_of(folder)

    def the_others_come(count: int, row: CapturedRow) -> CapturedRow:
        if count == 2:
            remove(plan_removal(store.child("extract").url, stopped=True), lambda count: None)
            set_extract(folder, layer_ids=[1, 4, 5, 8])
            others = stage_run("extract", folder / "run.yaml", store)
            others.claim(settings={"layer_ids": [1, 4, 5, 8]})
        return row

    with pytest.raises(IdentityConflict, match="the claim under which this process began"):
        run_extract(folder, changed(the_others_come))
    assert store.list("extract") == []
    assert Work(store, "extract").finished_units() == frozenset()
    run_extract(folder)
    assert artifact_at(store, "extract").manifest.layer_ids == (1, 4, 5, 8)


def test_another_workers_object_is_adopted_where_every_row_is_rejected_here(folder: Path) -> None:
    run_extract(folder)
    before = content_of(store_of(folder), "extract")
    store_of(folder).delete("extract/data_config.json")
    done_in(store_of(folder), "extract").delete("units/000000.json")
    set_extract(folder, max_rejected_share=0.9)
    run_extract(folder, changed(zero))
    assert content_of(store_of(folder), "extract") == before


def test_a_row_that_is_not_finite_is_rejected_counted_and_left_out(folder: Path) -> None:
    set_extract(folder, max_rejected_share=0.5)
    run_extract(folder, nan_in_row(3))
    found, rows = artifact_at(store_of(folder), "extract"), artifact_at(store_of(folder), "prepare")
    names = [row.row for row in rows_of(rows)]
    assert found.manifest.rejected == {"non_finite": 1}
    assert found.manifest.rows_in == found.manifest.rows_kept + 1 == len(names)
    assert [row.row for row in rows_of(found)] == names[:3] + names[4:]


@pytest.mark.fault("B26")
def test_too_many_rejected_rows_fail_the_stage(folder: Path) -> None:
    with pytest.raises(CaptureInvalid, match="1 non_finite"):
        run_extract(folder, nan_in_row(3))
    assert not store_of(folder).exists("extract/data_config.json")


def test_a_unit_whose_rows_are_all_rejected_has_a_record_and_no_object(folder: Path) -> None:
    set_extract(folder, max_rejected_share=0.9)
    run_extract(folder, changed(zero))
    manifest = artifact_at(store_of(folder), "extract").manifest
    assert manifest.rejected == {"zero_state": 8}
    assert manifest.files[0].path == "hidden-000001.safetensors"


def test_states_of_other_tokens_stop_the_stage_at_once(folder: Path) -> None:
    def short(count: int, row: CapturedRow) -> CapturedRow:
        return CapturedRow(row.token_ids[1:], row.hidden_states[1:])

    with pytest.raises(CaptureInvalid, match="prefix caching"):
        run_extract(folder, changed(short))


def test_the_numeric_gate_stops_a_wrong_layer_before_anything_is_written(folder: Path) -> None:
    def one_layer_too_early(model: Path, plan: Plan, scratch: Path) -> Capture:
        right = start_fake_capture(model, plan)

        class Shifted(Changed):
            def capture(self, rows: Sequence[Sequence[int]]) -> Iterator[CapturedRow]:
                for row in right.capture(rows):
                    yield CapturedRow(row.token_ids, row.hidden_states.roll(1, dims=1))

        return Shifted(right, lambda _, row: row)

    with pytest.raises(CaptureInvalid, match="numeric gate"):
        run_extract(folder, one_layer_too_early)
    assert store_of(folder).list("extract") == []


def test_other_weights_at_the_verifiers_path_are_refused_before_the_engine(folder: Path) -> None:
    config = yaml.safe_load((folder / "run.yaml").read_text())
    config["verifier"]["source"] = str(make_llama(folder / "finetuned", seed=1))
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(VerifierInvalid, match="fingerprint"):
        run_extract(folder, never)


def test_a_last_layer_id_in_the_older_convention_is_refused(folder: Path) -> None:
    set_extract(folder, layer_ids=[2, 4, 5, 7])
    with pytest.raises(ConfigError, match="the output of layer k"):
        run_extract(folder, never)


def test_other_layers_in_a_begun_prefix_are_refused(folder: Path) -> None:
    run_extract(folder)
    set_extract(folder, layer_ids=[1, 4, 5, 8])
    with pytest.raises(IdentityConflict, match="layer_ids"):
        run_extract(folder, never)


@pytest.mark.fault("B101")
def test_an_output_prefix_that_cannot_be_written_is_refused_before_the_engine(
    folder: Path,
) -> None:
    (folder / "run" / "extract").write_text("a file where a folder must be")
    with pytest.raises(ConfigError, match="a folder where a prefix is named"):
        run_extract(folder, never)


def test_sigterm_stops_within_a_unit_and_the_next_run_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_stop", threading.Event())
    before = signal.getsignal(signal.SIGTERM)
    captured: list[int] = []

    def stop_in_second_unit(count: int, row: CapturedRow) -> CapturedRow:
        captured.append(count)
        if count == 9:
            process._stop.set()
        return row

    with pytest.raises(Stopped):
        run_extract(folder, changed(stop_in_second_unit))
    assert captured[-1] == 9, "the rest of the unit is not waited for"
    units = done_in(store_of(folder), "extract").list("units")
    assert [info.path[-11:] for info in units] == ["000000.json"]
    assert [info.path for info in store_of(folder).list("extract")] == [
        "extract/hidden-000000.safetensors"
    ]
    process._stop.clear()
    run_extract(folder)
    assert signal.getsignal(signal.SIGTERM) == before
    rows = artifact_at(store_of(folder), "prepare")
    assert content_of(store_of(folder), "extract")["rows"] == [row.row for row in rows_of(rows)]


def test_a_unit_that_was_captured_whole_when_sigterm_came_is_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_stop", threading.Event())

    def stop_at_the_last_row(count: int, row: CapturedRow) -> CapturedRow:
        if count == 7:
            process._stop.set()
        return row

    with pytest.raises(Stopped):
        run_extract(folder, changed(stop_at_the_last_row))
    assert done_in(store_of(folder), "extract").exists("units/000000.json")


def test_an_engine_that_dies_loses_only_the_unit_it_was_at(folder: Path) -> None:
    def die(count: int, row: CapturedRow) -> CapturedRow:
        if count == 9:
            raise ServiceUnavailable("engine", wanted="an answer", found="none", remedy="again")
        return row

    with pytest.raises(ServiceUnavailable):
        run_extract(folder, changed(die))
    assert done_in(store_of(folder), "extract").exists("units/000000.json")
    run_extract(folder)
    rows = artifact_at(store_of(folder), "prepare")
    assert content_of(store_of(folder), "extract")["rows"] == [row.row for row in rows_of(rows)]


@pytest.mark.parametrize("index", [0, 3])
def test_no_object_has_more_bytes_of_states_than_allowed(folder: Path, index: int) -> None:
    """Whoever works cuts the same units; a row that alone is larger has one of its own."""
    bytes_per_token = 4 * 64 * 2
    set_extract(folder, unit_bytes=100 * bytes_per_token)
    run_extract(folder, index=index)
    found = artifact_at(store_of(folder), "extract")
    rows = rows_of(artifact_at(store_of(folder), "prepare"))
    assert [row.row for row in rows_of(found)] == [row.row for row in rows]
    sizes = [(entry.samples, entry.tokens) for entry in found.manifest.files]
    assert all(tokens <= 100 or samples == 1 for samples, tokens in sizes)
    assert any(samples > 1 for samples, _ in sizes)
    assert len(sizes) > len(rows) / 8


def test_workers_share_the_units_and_leave_what_one_alone_would(
    folder: Path, tmp_path: Path
) -> None:
    alone = Path(shutil.copytree(folder, tmp_path / "alone"))
    run_extract(alone)
    done: list[int] = []

    def another_worker_meanwhile(count: int, row: CapturedRow) -> CapturedRow:
        done.append(count)
        if count == 9:
            run_extract(folder, index=1)
        return row

    run_extract(folder, changed(another_worker_meanwhile))
    # The second worker did all but the first unit; the first finished the one that it was at.
    assert len(done) == 16
    assert content_of(store_of(folder), "extract") == content_of(store_of(alone), "extract")
