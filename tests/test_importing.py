"""`eagle3 import`: version 1 taken over whole, with its layer ids translated, or refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from eagle3 import artifact as artifacts
from eagle3.config import RunConfig, parse_config
from eagle3.errors import (
    AcceptanceInvalid,
    ConfigError,
    DataInvalid,
    IdentityConflict,
    ManifestInvalid,
    ShardInvalid,
    TemporaryFailure,
)
from eagle3.legacy import OldFolder, inputs_of
from eagle3.lineage import refuse_trained_on, walk
from eagle3.manifest import Manifest
from eagle3.progress import Progress
from eagle3.removal import plan_removal, remove
from eagle3.shards import ShardReader, rows_of
from eagle3.stages import STAGES, stage_named
from eagle3.store import Store, open_store, sha256_of_file
from eagle3.upstream import gate
from jobs import cli, export, extract, train, vocab
from jobs.importing import take_in
from jobs.process import StageRun, gate_inputs
from tests.old_folder import OLD_LAYER_IDS, make_old_folder, read_rows, write_folder
from tests.tiny_run import stage_run, start_fake_capture
from tests.tiny_verifiers import make_llama

HIDDEN, VOCAB = 64, 512


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("verifier"), dtype="bfloat16")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound folder, which no test changes."""
    folder = tmp_path_factory.mktemp("old") / "states"
    return make_old_folder(folder, hidden_size=HIDDEN, vocab_size=VOCAB)


@pytest.fixture
def old(whole: Path, tmp_path: Path) -> Path:
    """A copy to do harm to."""
    return Path(shutil.copytree(whole, tmp_path / "states"))


def config_of(verifier: Path, **sections: Any) -> RunConfig:
    plain: dict[str, Any] = {
        "verifier": {"source": str(verifier), "serving_name": "tests/tiny"},
        "prepare": {"data": ["imported"], "max_seq_len": 64, "shard_rows": 4},
        "regenerate": {"enabled": False},
        "extract": {"unit_rows": 3},
        "vocab": {"draft_vocab_size": 128},
        "train": {"total_seq_len": 96, "epochs": 1, "dtype": "float32", "validation_share": 0.2},
    }
    return parse_config({**plain, **sections})


@pytest.fixture(scope="module")
def taken(verifier: Path, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A run that the sound folder was taken over into."""
    store = open_store(f"file://{tmp_path_factory.mktemp('run')}/run")
    told = take_in(str(whole), config_of(verifier), store)
    assert "at layers 2, 4, 5, 8, which were called 1, 3, 4, 7; 0 left out" in told
    return store


def artifact_at(store: Store, kind: str) -> artifacts.Artifact:
    found = artifacts.find(store.child(kind))
    assert found is not None
    return found


def test_the_ids_of_the_known_example_are_translated():
    assert inputs_of((2, 30, 58, 60), 61, "old") == (3, 31, 59, 61)


@pytest.mark.parametrize(
    ("ids", "layers"),
    [
        ((3, 31, 59, 61), 61),
        ((2, 30, 58, 61), 61),
        ((2, 30, 58, 60), 62),
        ((30, 2, 58, 60), 61),
        ((2, 2, 58, 60), 61),
        ((-1, 30, 58, 60), 61),
        ((30, 58, 60), 61),
        ((), 61),
    ],
)
def test_ids_that_do_not_end_in_the_last_layer_or_do_not_rise_are_refused(ids, layers):
    with pytest.raises(ManifestInvalid, match="layer_ids"):
        inputs_of(ids, layers, "old")


def test_every_number_arrives_as_it_was(taken, whole):
    rows, states = artifact_at(taken, "prepare"), artifact_at(taken, "extract")
    shards = [entry.path for entry in rows.manifest.files if entry.samples]
    assert len(shards) == 3, "shard_rows holds"
    found = [row for path in shards for row in rows_of(rows, path)]
    samples = []
    for entry in states.manifest.files:
        assert entry.samples <= 3, "unit_rows holds"
        reader = ShardReader(states.store, entry.path)
        refs = reader.refs(header_sha256=entry.header_sha256)
        samples += [reader.read(ref, finite=True) for ref in refs]
    for row, sample, wanted in zip(found, samples, read_rows(whole), strict=True):
        assert row.row == sample.row
        for one in (row, sample):
            assert torch.equal(one.input_ids, wanted["input_ids"])
            assert torch.equal(one.loss_mask, wanted["loss_mask"])
        for layer, state in enumerate(wanted["hidden_states"]):
            assert torch.equal(sample.hidden_states[:, layer], state)


def test_the_manifests_say_where_it_came_from_and_what_was_translated(taken, whole):
    rows, states = artifact_at(taken, "prepare").manifest, artifact_at(taken, "extract").manifest
    small = ["data_config.json", "token_freq.pt", "t2d.pt", "d2t.pt"]
    names = [*small, *(f"data_{number}.pt" for number in range(10))]
    assert [source.url for source in rows.sources] == [f"file://{whole}/{name}" for name in names]
    assert [source.sha256 for source in rows.sources] == [
        sha256_of_file(whole / name) for name in names
    ]
    for manifest in (rows, states):
        imported = manifest.facts["imported"]
        assert imported["layer_ids"] == list(OLD_LAYER_IDS)
        assert imported["layer_id_convention"] == "output_of_layer"
        assert len(imported["mapping_sha256"]) == 64
    before = json.loads((whole / "data_config.json").read_text())
    kept = set(before) - {"layer_ids", "data_format_version"}
    assert {name: getattr(states, name) for name in kept} == {name: before[name] for name in kept}
    assert states.layer_ids == (2, 4, 5, 8)
    assert states.layer_id_convention == "input_of_layer"
    assert set(states.inputs) == {"rows", "verifier"}


@pytest.mark.parametrize("stage", ["extract", "vocab"])
def test_the_gate_lets_later_stages_begin(taken, verifier, stage):
    assert gate_inputs(config_of(verifier), taken, stage_named(stage)).keys() == {
        "rows",
        "verifier",
    }
    assert gate(taken.child("extract").url, ("extract",))


def test_the_tokens_are_counted_as_they_were(taken, whole, verifier):
    run = StageRun(
        stage=stage_named("vocab"),
        config=config_of(verifier),
        store=open_store(f"{taken.url}-vocab"),
        inputs=gate_inputs(config_of(verifier), taken, stage_named("vocab")),
    )
    vocab.story(run)
    facts = artifact_at(run.store, "vocab").manifest.facts
    assert facts["supervised_tokens"] == int(torch.load(whole / "token_freq.pt").sum())


def test_it_is_taken_over_once(taken, verifier, whole):
    before = taken.list()
    assert "already taken over" in take_in(str(whole), config_of(verifier), taken)
    assert [info.path for info in taken.list()] == [info.path for info in before]


def test_another_folder_does_not_fit_into_the_same_run(taken, verifier, tmp_path):
    other = make_old_folder(tmp_path / "other", hidden_size=HIDDEN, vocab_size=VOCAB, seed=1)
    with pytest.raises(IdentityConflict):
        take_in(str(other), config_of(verifier), taken)


class Killed(BaseException):
    """kill -9, as seen from inside."""


def test_killed_on_the_way_it_goes_on_to_the_same_artefacts(
    taken, verifier, whole, tmp_path, monkeypatch
):
    store = open_store(f"file://{tmp_path}/run")
    plain = Progress.advance

    def killed(self: Progress, *args: Any, **more: Any) -> None:
        plain(self, *args, **more)
        if self._done == 7:
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Progress, "advance", killed)
        with pytest.raises(Killed):
            take_in(str(whole), config_of(verifier), store)
    assert artifacts.find(store.child("extract")) is None
    take_in(str(whole), config_of(verifier), store)
    for kind in ("verifier", "prepare", "extract"):
        assert artifact_at(store, kind).digest == artifact_at(taken, kind).digest


def test_states_that_were_extracted_again_are_another_folder(taken, verifier, old):
    """Names and sizes are the same, and one number is not."""
    row = torch.load(old / "data_4.pt")
    row["hidden_states"][1][3, 7] += 1
    size = (old / "data_4.pt").stat().st_size
    torch.save(row, old / "data_4.pt")
    assert (old / "data_4.pt").stat().st_size == size
    with pytest.raises(IdentityConflict, match=r"prepare: inputs\.samples"):
        take_in(str(old), config_of(verifier), taken)


def test_a_sample_that_changes_while_it_is_taken_over_is_refused(
    verifier, old, tmp_path, monkeypatch
):
    plain = OldFolder.measure

    def changed_since(self: OldFolder, told: Callable[[], None]) -> str:
        measured = plain(self, told)
        row = torch.load(old / "data_4.pt")
        row["hidden_states"][1][3, 7] += 1
        torch.save(row, old / "data_4.pt")
        return measured

    monkeypatch.setattr(OldFolder, "measure", changed_since)
    with pytest.raises(ShardInvalid, match=r"data_4\.pt: wanted sha256 \w{16}, as before"):
        take_in(str(old), config_of(verifier), open_store(f"file://{tmp_path}/run"))


def test_states_of_an_import_that_was_cut_off_are_adopted_by_no_extraction(
    verifier, whole, tmp_path, monkeypatch
):
    """It is killed when its rows stand, beside them all objects of its states, and extract is run,
    which cuts the same units of the same names and would capture the same shapes."""
    config, store = config_of(verifier), open_store(f"file://{tmp_path}/run")
    plain = artifacts.commit

    def killed(target: Store, manifest: Manifest) -> artifacts.Artifact:
        if manifest.artifact == "extract":
            raise Killed
        return plain(target, manifest)

    with monkeypatch.context() as patched:
        patched.setattr(artifacts, "commit", killed)
        with pytest.raises(Killed):
            take_in(str(whole), config, store)
    assert artifacts.find(store.child("prepare"))
    before = store.list("extract")
    assert before
    with pytest.raises(IdentityConflict, match=r"extract: (imported|inputs\.rows)"):
        extract.story(stage_run("extract", config, store), start_fake_capture)
    # Not even where its claim is gone: the objects say whose they are.
    store.delete("work/extract/claim.json")
    with pytest.raises(IdentityConflict, match=r"hidden-000000.*stop the process that wrote it"):
        extract.story(stage_run("extract", config, store), start_fake_capture)
    assert store.list("extract") == before


def test_an_import_that_was_cut_off_can_be_deleted_whole(verifier, whole, tmp_path, monkeypatch):
    store = open_store(f"file://{tmp_path}/run")

    def killed(self: Progress, *args: Any, **more: Any) -> None:
        if store.list("extract"):
            raise Killed

    monkeypatch.setattr(Progress, "advance", killed)
    with pytest.raises(Killed):
        take_in(str(whole), config_of(verifier), store)
    with pytest.raises(TemporaryFailure, match="--stopped"):
        plan_removal(store.url)
    removal = plan_removal(store.url, stopped=True)
    assert not removal.left
    remove(removal, lambda count: None)
    assert not store.local_path().exists()


Harm = Callable[[Path], None]


def changed_row(**values: Any) -> Harm:
    """Sample 4 with other values, or with values made from its own."""

    def harm(folder: Path) -> None:
        row = torch.load(folder / "data_4.pt")
        for name, value in values.items():
            row[name] = value(row[name]) if callable(value) else value
        torch.save(row, folder / "data_4.pt")

    return harm


def changed_manifest(**values: Any) -> Harm:
    def harm(folder: Path) -> None:
        path = folder / "data_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return harm


def saved(name: str, value: Callable[[torch.Tensor], object]) -> Harm:
    def harm(folder: Path) -> None:
        torch.save(value(torch.load(folder / name)), folder / name)

    return harm


def put(tensor: torch.Tensor, at: int, value: int) -> torch.Tensor:
    tensor[at] = value
    return tensor


HARMS: dict[str, tuple[Harm, str]] = {
    "a sample is missing": (lambda folder: (folder / "data_3.pt").unlink(), r"no data_3\.pt"),
    "a sample too many": (
        lambda folder: shutil.copy(folder / "data_3.pt", folder / "data_10.pt"),
        r"also data_10\.pt",
    ),
    "no counts": (lambda folder: (folder / "token_freq.pt").unlink(), "none of that name"),
    "a cut file": (
        lambda folder: os.truncate(folder / "data_4.pt", 900),
        r"data_4\.pt: wanted a file of torch\.save",
    ),
    "no torch file": (lambda folder: (folder / "data_4.pt").write_bytes(b"x"), "torch.save"),
    "another version": (changed_manifest(data_format_version=2), "version 2"),
    "a field of another type": (changed_manifest(tp_size="8"), "ten fields"),
    "other totals": (changed_manifest(total_tokens=1), "total_tokens"),
    "another width": (changed_manifest(hidden_size=128), "hidden_size 64, the verifier's"),
    "ids of today": (changed_manifest(layer_ids=[2, 4, 5, 8]), "layer_ids"),
    "another number of layers": (changed_manifest(num_layers_captured=3), "3 layers"),
    "rows longer than allowed": (changed_manifest(max_seq_len=8), "T up to 8"),
    "ids of another type": (changed_row(input_ids=lambda t: t.float()), "torch.float32"),
    "ids outside the vocabulary": (changed_row(input_ids=lambda t: put(t, 0, 512)), "below 512"),
    "an id below 0": (changed_row(input_ids=lambda t: put(t, 0, -1)), "below 512, found -1"),
    "a mask of another length": (changed_row(loss_mask=lambda t: t[1:]), "loss_mask"),
    "a mask of 2": (changed_row(loss_mask=lambda t: put(t, 4, 2)), "wanted a loss_mask of 0 and 1"),
    "a mask of fractions": (changed_row(loss_mask=lambda t: t.float()), "of integers"),
    "three layers": (changed_row(hidden_states=lambda layers: layers[:3]), "a list of 3"),
    "a layer of float16": (
        changed_row(hidden_states=lambda layers: [layers[0].half(), *layers[1:]]),
        "torch.float16",
    ),
    "a token short": (
        changed_row(hidden_states=lambda layers: [layers[0][1:], *layers[1:]]),
        "hidden_states bfloat16",
    ),
    "the same layer twice": (
        changed_row(hidden_states=lambda layers: [layers[1], *layers[1:]]),
        "different states in every layer",
    ),
    "a sample that is no dict": (saved("data_4.pt", lambda row: [1]), "a list of 1"),
    "a sample without a mask": (
        saved("data_4.pt", lambda row: {"input_ids": row["input_ids"]}),
        "a dict of 1",
    ),
    "counts of other samples": (
        saved("token_freq.pt", lambda counts: put(counts, 7, 10_000)),
        "token 7: wanted .*, found 10000, and 0 more",
    ),
    "counts of another vocabulary": (
        saved("token_freq.pt", lambda counts: torch.cat([counts, counts[:1]])),
        "vocab_size 512, the verifier's|bool of shape",
    ),
    "counts below 0": (saved("token_freq.pt", lambda counts: put(counts, 7, -1)), "counts"),
    "absolute ids in d2t": (
        saved("d2t.pt", lambda d2t: d2t + torch.arange(len(d2t))),
        "offsets",
    ),
    "a short t2d": (saved("t2d.pt", lambda t2d: t2d[1:]), r"\(I4\)"),
}


@pytest.mark.parametrize("name", HARMS)
def test_a_fault_of_the_folder_is_refused_and_nothing_is_committed(name, old, verifier):
    harm, words = HARMS[name]
    harm(old)
    store = open_store(f"memory://importing/{name.replace(' ', '-')}")
    with pytest.raises(DataInvalid, match=words) as caught:
        take_in(str(old), config_of(verifier), store)
    assert caught.value.exit_code == 65
    for kind in ("prepare", "extract"):
        assert artifacts.find(store.child(kind)) is None


class Payload:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.path}",))


@pytest.mark.parametrize("name", ["data_4.pt", "token_freq.pt", "t2d.pt"])
@pytest.mark.fault("B89")
def test_a_file_that_would_run_something_is_refused_and_runs_nothing(name, old, verifier, tmp_path):
    witness = tmp_path / "it-ran"
    torch.save({"input_ids": Payload(witness)}, old / name)
    with pytest.raises(ShardInvalid, match=r"nothing that runs.*Unpickl"):
        take_in(str(old), config_of(verifier), open_store(f"memory://importing/evil-{name}"))
    assert not witness.exists()


def test_samples_that_teach_nothing_are_left_out_and_counted(whole, verifier, tmp_path):
    rows = read_rows(whole)
    rows[2]["loss_mask"] = torch.zeros_like(rows[2]["loss_mask"])
    rows[5]["hidden_states"][1][3, 7] = float("nan")
    write_folder(tmp_path / "states", rows, vocab_size=VOCAB)
    store, url = (
        open_store(f"memory://importing/rejected-{tmp_path.name}"),
        str(tmp_path / "states"),
    )
    with pytest.raises(ShardInvalid, match=r"at most 0\.1% of 10 left out"):
        take_in(url, config_of(verifier), store)
    told = take_in(
        url, config_of(verifier, extract={"unit_rows": 3, "max_rejected_share": 0.2}), store
    )
    assert "2 left out" in told
    manifest = artifact_at(store, "prepare").manifest
    assert manifest.rejected == {"no_supervised_tokens": 1, "non_finite": 1}
    assert (manifest.rows_in, manifest.rows_kept) == (10, 8)
    assert artifact_at(store, "extract").manifest.total_samples == 8
    kept = sum(int(row["loss_mask"].sum()) for at, row in enumerate(rows) if at not in (2, 5))
    assert manifest.facts["supervised_tokens"] == kept


def test_a_run_that_would_ask_again_is_refused(verifier, whole):
    config = config_of(verifier, regenerate={"enabled": True})
    with pytest.raises(ConfigError, match=r"regenerate\.enabled"):
        take_in(str(whole), config, open_store("memory://importing/regenerate"))


def test_another_verifier_is_refused_by_its_figures(whole, tmp_path):
    other = make_llama(tmp_path / "other", num_layers=6, dtype="bfloat16")
    with pytest.raises(ManifestInvalid, match="layer_ids"):
        take_in(str(whole), config_of(other), open_store("memory://importing/other"))


@pytest.mark.parametrize("stage", [stage.name for stage in STAGES if stage.reads])
def test_opened_anywhere_else_it_is_refused_with_the_importer_s_name(stage, whole):
    found = stage_named(stage)
    for kinds in found.reads.values():
        with pytest.raises(ManifestInvalid, match="eagle3 import") as caught:
            gate(str(whole), kinds)
        assert caught.value.exit_code == 65


def test_nobody_can_claim_that_a_prompt_was_never_trained_on(taken):
    lineage = walk([artifact_at(taken, "extract")])
    with pytest.raises(AcceptanceInvalid, match="carry none, as imported ones do"):
        refuse_trained_on({"a" * 32}, lineage)


def test_the_old_manifest_s_fields_are_read_strictly(old):
    assert OldFolder(str(old)).manifest.layer_ids == OLD_LAYER_IDS
    assert len(msgspec.structs.fields(OldFolder(str(old)).manifest)) == 10


@pytest.mark.engine
@pytest.mark.slow
def test_a_draft_is_trained_and_exported_from_what_was_imported(whole, verifier, tmp_path, capfd):
    """By the command, then the real vocab, trainer and export."""
    config, store = config_of(verifier), open_store(f"file://{tmp_path}/run")
    path = tmp_path / "run.yaml"
    path.write_bytes(msgspec.json.encode(config))
    options = ["--config", str(path), "--store", store.url]
    assert cli.main(["import", str(whole), *options]) == 0
    assert "import: took over 10 samples" in capfd.readouterr().out
    for name, story in (("vocab", vocab.story), ("train", train.story), ("export", export.story)):
        stage = stage_named(name)
        inputs = gate_inputs(config, store, stage)
        story(StageRun(stage=stage, config=config, store=store, inputs=inputs))
    assert artifact_at(store, "train").manifest.facts["aux_layer_ids"] == [2, 4, 5]
    assert artifact_at(store, "export").manifest.facts["aux_layer_ids"] == [2, 4, 5]
