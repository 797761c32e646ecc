"""`eagle3 verify`: what is whole, each damage at its depth, and what was written wrongly."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save

from eagle3 import artifact as artifacts
from eagle3.manifest import MANIFEST_NAME, FileEntry, sealed
from eagle3.shards import (
    Sample,
    ShardReader,
    encode_rows,
    encode_samples,
    header_sha256_of,
    read_rows,
)
from eagle3.store import open_store
from eagle3.vocab import COUNTS_NAME, Mapping, mapping_sha256
from jobs import cli, extract, prepare, regenerate, verify, vocab
from tests.conftest import ROOT
from tests.damaged import EVERY_KIND, damage_and_verify
from tests.tiny_run import (
    stage_run,
    start_fake_capture,
    start_fake_generator,
    write_config,
    write_conversations,
)
from tests.tiny_verifiers import make_llama
from tests.upstreams import commit, commit_upstreams

SEED = 20261201


@dataclass(frozen=True)
class Told:
    """How the command ended and what it printed."""

    code: int
    text: str


def told(url: str | Path, depth: str = "full") -> Told:
    out = io.StringIO()
    code = verify.run(str(url), depth, Console(file=out, width=200))
    return Told(code, out.getvalue())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run through prepare, regenerate, extract and vocab, on the shipped fakes."""
    folder = tmp_path_factory.mktemp("verify")
    model = make_llama(folder / "verifier")
    data = write_conversations(folder / "chats.jsonl", 24, turns=2)
    config, run = write_config(folder / "run.yaml", model, data), open_store(str(folder / "run"))
    prepare.story(stage_run("prepare", config, run))
    regenerate.story(stage_run("regenerate", config, run), start_fake_generator)
    extract.story(stage_run("extract", config, run), start_fake_capture)
    vocab.story(stage_run("vocab", config, run))
    return folder / "run"


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """The same run elsewhere, so that the inputs lie beside and no more where they were read."""
    copy = tmp_path / "run"
    subprocess.run(["cp", "-r", str(made), str(copy)], check=True)
    return copy


def recommit(run: Path, kind: str, path: str, data: bytes, **fields: object) -> None:
    """Write an object and a manifest that agrees with it, as a faulty stage would."""
    found = artifacts.find(open_store(str(run / kind)))
    assert found is not None
    (run / kind / path).write_bytes(data)
    new = FileEntry(
        path=path,
        bytes=len(data),
        sha256=open_store(str(run / kind)).sha256(path),
        samples=found.entry(path).samples,
        tokens=found.entry(path).tokens,
        header_sha256=header_sha256_of(data) if found.entry(path).header_sha256 else "",
    )
    entries = [new if entry.path == path else entry for entry in found.manifest.files]
    record = msgspec.json.decode((run / kind / MANIFEST_NAME).read_bytes())
    record |= msgspec.to_builtins({"files": entries, **fields})
    (run / kind / MANIFEST_NAME).write_bytes(sealed(record))


def test_a_whole_run_is_whole_at_both_depths_with_a_line_for_each_artefact(run):
    for depth in ("gate", "full"):
        said = told(run, depth)
        assert said.code == 0, said.text
        lines = [line.split() for line in said.text.splitlines() if depth in line]
        assert [line[0] for line in lines] == [
            *("verifier", "prepare", "regenerate", "extract", "vocab")
        ]
        assert all(line[-1] == "whole" for line in lines)


def test_a_hundred_damages_are_all_found_and_by_the_gate_what_it_claims(run, tmp_path):
    done = damage_and_verify(run, tmp_path / "scratch", seed=SEED, times=100)
    assert done.keys() >= EVERY_KIND


def other_states(run: Path) -> None:
    """The states of one row under the ids of another, checksums and all."""
    path = "hidden-000000.safetensors"
    store = open_store(str(run / "extract"))
    reader = ShardReader(store, path)
    one, other, *rest = [reader.read(ref) for ref in reader.refs()]
    length = min(len(one.input_ids), len(other.input_ids))
    assert length > 1
    swapped = Sample(
        row=one.row,
        input_ids=one.input_ids.flip(0),
        loss_mask=one.loss_mask,
        hidden_states=one.hidden_states,
    )
    recommit(run, "extract", path, encode_samples([swapped, other, *rest]))


def states_of_other_settings(run: Path) -> None:
    """What a process left that was taken for dead: rows, shapes and numbers are as they should."""
    path = "hidden-000000.safetensors"
    reader = ShardReader(open_store(str(run / "extract")), path)
    samples = [reader.read(ref) for ref in reader.refs()]
    recommit(run, "extract", path, encode_samples(samples, identity="0" * 64))


def answers_of_other_settings(run: Path) -> None:
    path = "rows-000000.safetensors"
    rows = read_rows(open_store(str(run / "regenerate")), path)
    recommit(run, "regenerate", path, encode_rows(rows, identity="0" * 64))


def not_finite(run: Path) -> None:
    path = "hidden-000000.safetensors"
    reader = ShardReader(open_store(str(run / "extract")), path)
    samples = [reader.read(ref) for ref in reader.refs()]
    samples[0].hidden_states[0, 0, 0] = torch.nan
    recommit(run, "extract", path, encode_samples(samples))


def a_wrong_count(run: Path) -> None:
    counts = load_file(run / "prepare" / COUNTS_NAME)["counts"]
    first, second = counts.nonzero().flatten()[:2].tolist()
    counts[first], counts[second] = counts[first] + 1, counts[second] - 1
    recommit(run, "prepare", COUNTS_NAME, save({"counts": counts}))


def lines_of_other_rows(run: Path) -> None:
    path = run / "prepare" / "rows-000000.jsonl"
    first, second, *rest = path.read_bytes().splitlines(keepends=True)
    recommit(run, "prepare", path.name, b"".join([second, first, *rest]))


def another_mapping(run: Path) -> None:
    """Whole by every invariant and its hash, and not the one that the counts give."""
    tensors = load_file(run / "vocab" / "mapping.safetensors")
    t2d = tensors["t2d"]
    unused = (~t2d).nonzero().flatten()[-1]
    t2d[t2d.nonzero().flatten()[-1]], t2d[unused] = False, True
    d2t = t2d.nonzero().flatten() - torch.arange(int(t2d.sum()))
    facts = msgspec.json.decode((run / "vocab" / MANIFEST_NAME).read_bytes())["facts"]
    facts["mapping_sha256"] = mapping_sha256(Mapping(t2d=t2d, d2t=d2t))
    tensors = save({"t2d": t2d, "d2t": d2t})
    recommit(run, "vocab", "mapping.safetensors", tensors, facts=facts)


def a_tensor_of_zeros(run: Path) -> None:
    tensors = load_file(run / "verifier" / "model.safetensors")
    tensors["model.norm.weight"] *= 0
    recommit(run, "verifier", "model.safetensors", save(tensors))


def another_tokenizer(run: Path) -> None:
    path = run / "verifier" / "chat_template.jinja"
    recommit(run, "verifier", path.name, path.read_bytes() + b" ")


WRONG: dict[Callable[[Path], None], tuple[str, str]] = {
    other_states: ("extract", "ids and the mask of that row of its input, found others"),
    states_of_other_settings: ("extract", f"found one of {'0' * 16}"),
    answers_of_other_settings: ("regenerate", f"found one of {'0' * 16}"),
    not_finite: ("extract", "finite hidden states"),
    a_wrong_count: ("prepare", "as counted again"),
    lines_of_other_rows: ("prepare", "a line for each row of rows-000000.safetensors"),
    another_mapping: ("vocab", "the tokens that its rows give, found 2 others"),
    a_tensor_of_zeros: ("verifier", "finite numbers, not all of them zero"),
    another_tokenizer: ("verifier", "tokenizer.fingerprint"),
}


@pytest.mark.parametrize("writing", WRONG, ids=lambda writing: writing.__name__)
def test_what_was_written_wrongly_under_a_whole_manifest_is_found_in_full(run, writing):
    kind, words = WRONG[writing]
    writing(run)
    assert told(run / kind, "gate").code == 0
    said = told(run / kind)
    assert said.code == 65
    assert words in said.text


def test_a_figure_of_the_manifest_that_is_not_the_counted_one_is_named(run):
    path = run / "prepare" / MANIFEST_NAME
    record = json.loads(path.read_bytes())
    record["facts"]["longest_row"] += 1
    path.write_bytes(sealed(record))
    said = told(run / "prepare")
    assert said.code == 65
    assert "facts.longest_row: wanted" in said.text


def test_an_object_of_the_index_is_named_by_the_manifest(tmp_path, monkeypatch):
    monkeypatch.setattr("eagle3.manifest.MOST_INLINE", 1)
    commit(open_store(str(tmp_path)), "evaluate")
    assert len(list((tmp_path / "evaluate").glob("files-*.jsonl"))) == 1
    assert "files-" not in told(tmp_path / "evaluate").text


def test_an_artefact_without_its_manifest_and_an_input_that_is_gone_are_missing(run):
    (run / "prepare" / MANIFEST_NAME).unlink()
    said = told(run, "gate")
    assert said.code == 66
    assert "prepare/data_config.json: wanted a manifest, found none beside" in said.text
    assert "run prepare to its end" in said.text
    alone = told(run / "prepare", "gate")
    assert (alone.code, "wanted a manifest" in alone.text) == (66, True)


def test_an_input_replaced_since_is_told_by_both_digests(tmp_path):
    store = open_store(str(tmp_path))
    commit_upstreams(store)
    store.delete(f"prepare/{MANIFEST_NAME}")
    for info in store.list("prepare"):
        store.delete(info.path)
    commit(store, "prepare", identity="another")
    said = told(tmp_path / "extract", "gate")
    assert said.code == 65
    assert "extract/data_config.json: inputs.rows.digest: wanted" in said.text


def test_another_kind_under_a_kind_s_name_is_told(tmp_path):
    store = open_store(str(tmp_path))
    commit(store, "prepare")
    (tmp_path / "prepare").rename(tmp_path / "extract")
    assert "artifact: wanted extract, found prepare" in told(tmp_path, "gate").text


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nothing"], 66, "wanted a committed artefact, or a run that holds one"),
        ([".", "--depth", "deep"], 64, "wanted gate or full, found deep"),
    ],
)
def test_nothing_to_verify_and_a_depth_that_is_none_are_one_sentence(
    tmp_path, capsys, arguments, code, words
):
    commit(open_store(str(tmp_path)), "evaluate")
    url, *rest = arguments
    assert cli.main(["verify", str(tmp_path / url), *rest]) == code
    assert words in capsys.readouterr().err


def test_the_gate_s_depth_needs_no_torch(tmp_path):
    commit(open_store(str(tmp_path)), "evaluate")
    code = (
        "import sys\nfrom jobs import cli\n"
        f"code = cli.main(['verify', {str(tmp_path)!r}, '--depth', 'gate'])\n"
        "heavy = {'torch', 'transformers', 'vllm', 'speculators', 'numpy'} & set(sys.modules)\n"
        "print(code, heavy)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "0 set()", done.stdout
