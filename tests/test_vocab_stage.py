"""vocab, whole: committed rows and verifier in, a checked mapping out."""

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from eagle3.artifact import Artifact
from eagle3.coverage import coverage
from eagle3.errors import (
    ConfigError,
    IdentityConflict,
    ManifestInvalid,
    MappingInvalid,
    UpstreamMissing,
)
from eagle3.manifest import MANIFEST_NAME
from eagle3.shards import read_rows
from eagle3.store import open_store
from eagle3.verifier import load_verifier_artifact
from eagle3.vocab import (
    COUNTS_NAME,
    MAPPING_NAME,
    decode,
    encode_counts,
    load_counts,
    load_mapping,
)
from jobs import prepare, vocab
from jobs.process import StageRun
from tests.tiny_run import artifact_at, stage_run, write_config, write_conversations
from tests.tiny_verifiers import make_qwen3

D, V = 320, 512


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration and a run that has gone through prepare."""
    folder = tmp_path_factory.mktemp("run")
    model = make_qwen3(folder / "model")
    data = write_conversations(folder / "chats.jsonl", 40)
    config = write_config(folder / "run.yaml", model, data, vocab={"draft_vocab_size": D},
                          regenerate={"enabled": False})  # fmt: skip
    prepare.story(stage_run("prepare", config, open_store(str(folder / "store"))))
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    """A copy of it, to go on with."""
    shutil.copytree(prepared / "store", tmp_path / "store")
    shutil.copy(prepared / "run.yaml", tmp_path / "run.yaml")
    return tmp_path


def run_of(folder: Path) -> StageRun:
    return stage_run("vocab", folder / "run.yaml", open_store(str(folder / "store")))


def done(folder: Path) -> Artifact:
    vocab.story(run_of(folder))
    return artifact_at(open_store(str(folder / "store")), "vocab")


def edit(path: Path, change: Callable[[str], str]) -> None:
    before = path.read_text()
    path.write_text(change(before))
    assert path.read_text() != before


@pytest.mark.fault("B48")
def test_the_mapping_is_of_the_supervised_tokens_of_the_training_rows(folder: Path) -> None:
    """B48: neither prompts nor held-out conversations are counted."""
    artifact = done(folder)
    store = open_store(str(folder / "store"))
    rows = artifact_at(store, "prepare")
    verifier = load_verifier_artifact(artifact_at(store, "verifier"), folder)
    counted = torch.zeros(V, dtype=torch.int64)
    for entry in rows.manifest.files:
        if entry.samples:
            for row in read_rows(rows.store, entry.path):
                counted += torch.bincount(row.input_ids[row.loss_mask == 1], minlength=V)
    assert torch.equal(load_counts(rows, vocab_size=V), counted)

    mapping = load_mapping(artifact, vocab_size=V, required_ids=verifier.required_ids)
    facts = artifact.manifest.facts
    assert mapping.draft_vocab_size == facts["draft_vocab_size"] == D
    assert facts["coverage"] == coverage(counted, mapping)
    assert facts["supervised_tokens"] == int(counted.sum())
    assert facts["population"] == "supervised tokens of the training rows"
    assert artifact.manifest.inputs["rows"].digest == rows.digest
    assert artifact.manifest.verifier == rows.manifest.verifier
    assert artifact.manifest.tokenizer == rows.manifest.tokenizer


def test_coverage_of_this_size_and_of_others(folder: Path) -> None:
    artifact = done(folder)
    told = json.loads(artifact.store.read_bytes("coverage.json"))
    curve = dict(told["curve"])
    assert {256, D, V, *told["smallest"].values()} == curve.keys()
    assert list(curve.values()) == sorted(curve.values())
    assert curve[D] == told["coverage"] == artifact.manifest.facts["coverage"]
    assert curve[V] == 1.0


def test_a_size_far_off_is_told_in_the_closing_line_and_kept(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(folder / "run.yaml", lambda text: text.replace(f"size: {D}", "size: 8"))
    told = vocab.story(run_of(folder))
    assert told.startswith("wrote a draft vocabulary of 8 of 512 tokens, coverage 0.")
    assert told.endswith("; vocab.draft_vocab_size 256 would cover 99%")
    assert "Supervised tokens inside the draft vocabulary" in capsys.readouterr().out
    artifact = artifact_at(open_store(str(folder / "store")), "vocab")
    assert artifact.manifest.facts["suggested_size"] == 256
    assert vocab.story(run_of(folder)).endswith("; vocab.draft_vocab_size 256 would cover 99%")


def test_killed_before_its_manifest_it_ends_with_the_same_artefact(folder: Path) -> None:
    first = done(folder)
    before = {path: (folder / "store" / "vocab" / path).read_bytes()
              for path in (MAPPING_NAME, "coverage.json")}  # fmt: skip
    (folder / "store" / "vocab" / MANIFEST_NAME).unlink()
    (folder / "store" / "vocab" / "coverage.json").unlink()
    again = done(folder)
    assert again.digest == first.digest
    for path, data in before.items():
        assert (folder / "store" / "vocab" / path).read_bytes() == data


def test_run_again_it_says_so_and_changes_nothing(folder: Path) -> None:
    manifest = folder / "store" / "vocab" / MANIFEST_NAME
    done(folder)
    before = manifest.read_bytes()
    assert vocab.story(run_of(folder)).startswith("already committed, coverage ")
    assert manifest.read_bytes() == before


def test_another_size_in_the_same_prefix_is_refused(folder: Path) -> None:
    done(folder)
    edit(folder / "run.yaml", lambda text: text.replace(f"size: {D}", "size: 300"))
    with pytest.raises(IdentityConflict, match="draft_vocab_size: wanted 320"):
        vocab.story(run_of(folder))


def test_counts_that_are_not_those_of_the_manifest_are_refused(folder: Path) -> None:
    path = folder / "store" / "prepare" / COUNTS_NAME
    path.write_bytes(encode_counts(torch.ones(V, dtype=torch.int64)))
    with pytest.raises(ManifestInvalid, match="as the manifest says"):
        vocab.story(run_of(folder))


def test_b48_counts_of_another_set_than_the_rows_are_refused(folder: Path) -> None:
    """Named by the manifest, and still not those of the tokens that extract will read."""
    store = open_store(str(folder / "store"))
    rows = artifact_at(store, "prepare")
    told = rows.manifest.facts["supervised_tokens"]
    facts = {**rows.manifest.facts, "supervised_tokens": told + 1}
    other = msgspec.structs.replace(rows.manifest, facts=facts)
    with pytest.raises(MappingInvalid, match=f"wanted the {told + 1} supervised .* found {told}"):
        load_counts(Artifact(store=rows.store, manifest=other), vocab_size=V)


def test_b118_mappings_that_lie_about_are_not_picked_up(folder: Path) -> None:
    first = done(folder)
    data = first.store.read_bytes(MAPPING_NAME)
    shutil.rmtree(folder / "store" / "vocab")
    for kind in ("prepare", "verifier"):
        for stray in ("t2d.npy", "d2t.npy", MAPPING_NAME):
            (folder / "store" / kind / stray).write_bytes(b"of another run")
    again = done(folder)
    assert again.store.read_bytes(MAPPING_NAME) == data
    decode(data, MAPPING_NAME, vocab_size=V, required_ids=(0, 1, 2))


def test_without_rows_there_is_nothing_to_count(folder: Path) -> None:
    (folder / "store" / "prepare" / MANIFEST_NAME).unlink()
    with pytest.raises(UpstreamMissing):
        run_of(folder)


@pytest.fixture
def sigterm() -> Iterator[None]:
    """A stage's main takes SIGTERM for itself; afterwards it is as before."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("sigterm")
def test_a_size_that_does_not_fit_ends_with_64_and_one_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(folder / "run.yaml", lambda text: text.replace(f"size: {D}", "size: 5000"))
    store = str(folder / "store")
    assert vocab.main(["--config", str(folder / "run.yaml"), "--store", store]) == 64
    assert capsys.readouterr().err == (
        "vocab: vocab.draft_vocab_size: wanted at most 512, the verifier's vocabulary, "
        "found 5000; lower it.\n"
    )
    assert not (folder / "store" / "vocab" / MANIFEST_NAME).exists()


def test_a_size_that_cannot_be_is_not_held_against_the_next_one(folder: Path) -> None:
    right, wrong = f"draft_vocab_size: {D}", "draft_vocab_size: 513"
    edit(folder / "run.yaml", lambda text: text.replace(right, wrong))
    with pytest.raises(ConfigError, match="at most 512"):
        vocab.story(run_of(folder))
    edit(folder / "run.yaml", lambda text: text.replace(wrong, right))
    assert done(folder).manifest.facts["draft_vocab_size"] == D
