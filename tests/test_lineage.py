"""`eagle3 lineage`: the tree from an artefact to the conversations, broken links included."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from eagle3 import artifact as artifacts
from eagle3.errors import UpstreamMissing
from eagle3.lineage import artifact_or_last, trace, walk
from eagle3.manifest import SourceFile
from eagle3.store import Store, open_store
from eagle3.verification.outside import look_at
from jobs import cli
from jobs.lineage import show
from tests.upstreams import HIDDEN_STATES, VERIFIER, commit, rewrite

SOURCES = tuple(
    SourceFile(url=f"s3://chats/{name}.jsonl", bytes=1234, sha256=letter * 64)
    for name, letter in (("first", "a"), ("second", "b"))
)
WHEN = "2026-11-30T12:00:00+00:00"


@pytest.fixture
def run(tmp_path: Path) -> Store:
    """A run up to its draft."""
    store = open_store(f"file://{tmp_path}/run")
    verifier = commit(store, "verifier")
    rows = commit(store, "prepare", sources=SOURCES, created_at=WHEN, rejected={"too_long": 0})
    below = {"rows": rows, "verifier": verifier}
    states = commit(store, "extract", inputs=below, created_at=WHEN, **HIDDEN_STATES)
    vocab = commit(store, "vocab", inputs=below)
    commit(store, "train", inputs={"states": states, "vocab": vocab, "verifier": verifier})
    return store


def shown(url: str) -> tuple[int, str]:
    out = io.StringIO()
    code = show(url, Console(file=out, width=60))
    return code, out.getvalue()


def test_the_tree_leads_from_the_draft_to_every_file_of_conversations(run):
    code, text = shown(run.child("train").url)
    assert code == 0
    for kind in ("verifier", "prepare", "extract", "vocab", "train"):
        found = artifacts.find(run.child(kind))
        assert found is not None
        assert f"{kind} {found.digest[:12]}  {found.store.url}" in text
    for source in SOURCES:
        assert f"{source.url}  1,234 bytes, sha256 {source.sha256}" in text
    assert f"6 rows of 60 tokens, 0 rejected, {WHEN}" in text
    assert f"fingerprint {VERIFIER.fingerprint[:12]}" in text


def test_no_url_is_broken_into_lines_on_a_narrow_terminal(run):
    _, text = shown(run.child("train").url)
    assert len(run.url) > 60
    assert text.count(f"{run.url}/verifier  ") == 3


def test_what_several_inputs_rest_on_is_told_once(run):
    _, text = shown(run.child("train").url)
    assert text.count("sha256 " + "a" * 64) == 1
    assert text.count("as above") == 3, "the rows once more, the verifier twice more"


def test_a_run_s_prefix_stands_for_its_last_artefact(run):
    assert shown(run.url) == shown(run.child("train").url)
    assert artifact_or_last(run.child("extract").url).manifest.artifact == "extract"


def test_a_link_whose_artefact_is_gone_is_shown_in_its_place_and_exits_66(run):
    run.delete("prepare/data_config.json")
    code, text = shown(run.url)
    assert code == 66
    broken = [line for line in text.splitlines() if "BROKEN: found no manifest" in line]
    assert len(broken) == 2, "extract and vocab were both made from it"
    assert all("rows: prepare" in line for line in broken)
    assert "vocab: vocab" in text, "what still stands is shown"


def test_a_link_to_another_content_is_shown_in_its_place_and_exits_65(run):
    rewrite(run, "vocab", facts={"draft_vocab_size": 63})
    code, text = shown(run.url)
    assert code == 65
    line = next(line for line in text.splitlines() if "BROKEN" in line)
    assert "vocab: vocab" in line
    assert "put that vocab back" in text


def test_a_damaged_manifest_in_the_tree_is_a_broken_link(run):
    run.write_bytes("verifier/data_config.json", b"{")
    code, text = shown(run.url)
    assert code == 65
    assert text.count("verifier: verifier") == 3


def test_a_tree_of_all_links_holds_each_error(run):
    run.delete("verifier/data_config.json")
    run.delete("prepare/data_config.json")
    errors = list(trace(artifact_or_last(run.url)).errors())
    assert [type(error) for error in errors] == [UpstreamMissing] * 5


@pytest.fixture
def copied(run: Store, tmp_path: Path) -> Store:
    """The run copied whole to another place, and no longer where it was written."""
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    shutil.rmtree(tmp_path / "run")
    return open_store(f"file://{tmp_path}/copy")


def test_a_run_that_was_copied_whole_is_as_whole_for_lineage_as_for_verify(run, copied):
    code, text = shown(copied.url)
    assert code == 0
    for source in SOURCES:
        assert source.url in text
    assert f"prepare {artifact_or_last(copied.child('prepare').url).digest[:12]}" in text
    assert f"{run.url}/prepare  found at {copied.url}/prepare" in text, "which copy, is said"
    kinds = [found.manifest.artifact for found in walk([artifact_or_last(copied.url)])]
    assert kinds == ["verifier", "prepare", "extract", "vocab", "train"]
    for kind in kinds:
        assert look_at(copied.child(kind)).findings == []


def test_a_copy_beside_of_another_content_is_no_input_and_the_first_place_is_named(run, copied):
    rewrite(copied, "vocab", facts={"draft_vocab_size": 63})
    code, text = shown(copied.url)
    assert code == 66
    assert f"at {run.url}/vocab, or beside it, found no manifest" in text
    assert [type(error) for error in look_at(copied.child("train")).findings] == [UpstreamMissing]


def test_many_files_of_conversations_are_counted_past_twenty(run):
    many = tuple(msgspec.structs.replace(SOURCES[0], url=f"s3://chats/{n}") for n in range(25))
    store = open_store(f"{run.url}-many")
    commit(store, "prepare", sources=many)
    _, text = shown(store.url)
    assert text.count("sha256 ") == 20
    assert "and 5 more files of 6,170 bytes" in text


def test_a_place_without_any_artefact_is_one_sentence_and_66(tmp_path, capsys):
    assert cli.main(["lineage", f"file://{tmp_path}/nothing"]) == 66
    err = capsys.readouterr().err
    assert "none of any kind below" in err
    assert len(err.splitlines()) == 1


def test_the_command_prints_the_tree(run, capsys):
    assert cli.main(["lineage", run.url]) == 0
    assert "train" in capsys.readouterr().out
