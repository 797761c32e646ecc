"""Committing an artefact, and gating it: a broken upstream stops a stage before it starts."""

from __future__ import annotations

import secrets
import tracemalloc

import msgspec
import pytest

from eagle3 import artifact as artifacts
from eagle3.errors import ConfigError, IdentityConflict, ManifestInvalid, UpstreamMissing
from eagle3.manifest import MOST_INLINE, FileEntry, Manifest, sealed
from eagle3.store import ObjectInfo, Store, open_store
from eagle3.upstream import cross_check, gate
from tests.upstreams import HIDDEN_STATES, TOKENIZER, VERIFIER, commit, commit_upstreams, rewrite


@pytest.fixture
def run() -> Store:
    return open_store(f"memory://artifact-{secrets.token_hex(4)}")


@pytest.fixture
def ready(run: Store) -> Store:
    commit_upstreams(run)
    return run


def gated(run: Store, kind: str) -> artifacts.Artifact:
    return gate(run.child(kind).url, (kind,))


def test_nothing_is_committed_without_a_manifest(run):
    run.write_bytes("extract/hidden-000000.safetensors", b"states")
    assert artifacts.find(run.child("extract")) is None


def test_a_committed_artefact_is_found_with_its_manifest(ready):
    found = artifacts.find(ready.child("extract"))
    assert found is not None
    assert found.manifest.total_samples == 6
    assert found.ref().digest == found.digest
    assert found.ref().url == ready.child("extract").url


def test_a_manifest_that_contradicts_itself_is_not_written(run):
    with pytest.raises(ManifestInvalid, match="rows_in"):
        commit(run, "prepare", rows_in=7)
    assert artifacts.find(run.child("prepare")) is None


def test_the_same_content_committed_twice_keeps_the_first_manifest(ready):
    first = artifacts.find(ready.child("extract"))
    assert first is not None
    later = msgspec.structs.replace(first.manifest, created_at="later", measured={"seconds": 9.0})
    assert artifacts.commit(ready.child("extract"), later).manifest == first.manifest


def test_other_content_never_replaces_a_manifest(ready):
    first = artifacts.find(ready.child("extract"))
    assert first is not None
    other = msgspec.structs.replace(first.manifest, identity="another")
    with pytest.raises(IdentityConflict, match="prefix of its own"):
        artifacts.commit(ready.child("extract"), other)
    standing = artifacts.find(ready.child("extract"))
    assert standing is not None
    assert standing.manifest == first.manifest


def test_whole_upstreams_pass(ready):
    inputs = {"states": gated(ready, "extract"), "vocab": gated(ready, "vocab")}
    inputs["verifier"] = gated(ready, "verifier")
    cross_check(inputs)


def test_an_uncommitted_upstream_is_missing_and_the_stage_to_run_is_named(run):
    with pytest.raises(UpstreamMissing, match="run extract first"):
        gated(run, "extract")


def test_a_run_s_url_in_place_of_its_artefact_s_is_told(ready):
    with pytest.raises(ConfigError, match=f"write {ready.url}/extract under inputs") as caught:
        gate(ready.url, ("extract",))
    assert caught.value.exit_code == 64


def test_conversations_that_nobody_answered_are_for_regenerate_alone(run):
    commit(run, "prepare", facts={"unanswered": 2})
    url = run.child("prepare").url
    with pytest.raises(ManifestInvalid, match=r"facts\.unanswered.*run regenerate first"):
        gate(url, ("regenerate", "prepare"))
    assert gate(url, ("prepare",)).manifest.facts == {"unanswered": 2}


def test_an_object_more_than_the_manifest_names_does_no_harm(ready):
    ready.write_bytes("extract/left-over", b"of a killed worker")
    gated(ready, "extract")


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("layer_id_convention", "output_of_layer"),
        ("layer_id_convention", None),
        ("final_hidden_state", "post_norm"),
        ("dtype", "float16"),
        ("hidden_size", 128),
        ("num_layers_captured", 3),
        ("layer_ids", (2, 4, 5, 7)),
        ("layer_ids", (2, 5, 4, 8)),
        ("layer_ids", None),
    ],
)
@pytest.mark.fault("B21", "B22")
def test_hidden_states_that_say_something_else_of_themselves_are_refused(run, field, wrong):
    commit(run, "extract", **{**HIDDEN_STATES, field: wrong})
    with pytest.raises(ManifestInvalid) as caught:
        gated(run, "extract")
    # Ids and their number are compared with one another: either may be named.
    assert field in caught.value.field or {field, "num_layers_captured"} == {
        "layer_ids",
        "num_layers_captured",
    }


@pytest.mark.parametrize("field", ["fingerprint", "num_hidden_layers", "hidden_size", "vocab_size"])
def test_two_verifiers_are_refused_by_the_fact_that_differs(ready, field):
    other = msgspec.structs.replace(VERIFIER, **{field: "0" if field == "fingerprint" else 1})
    rewrite(ready, "vocab", verifier=other)
    inputs = {"states": gated(ready, "extract"), "vocab": gated(ready, "vocab")}
    with pytest.raises(ManifestInvalid, match=rf"verifier\.{field}.*as input states has it"):
        cross_check(inputs)


def test_the_same_weights_from_another_commit_are_the_same_verifier(ready):
    rewrite(ready, "vocab", verifier=msgspec.structs.replace(VERIFIER, commit="a" * 40))
    inputs = {"states": gated(ready, "extract"), "vocab": gated(ready, "vocab")}
    cross_check(inputs)


def test_two_tokenizers_are_refused(ready):
    rewrite(ready, "vocab", tokenizer=msgspec.structs.replace(TOKENIZER, size=9))
    inputs = {"states": gated(ready, "extract"), "vocab": gated(ready, "vocab")}
    with pytest.raises(ManifestInvalid, match=r"tokenizer\.size"):
        cross_check(inputs)


def test_inputs_made_from_other_rows_are_refused(ready, run):
    other = open_store(f"{run.url}-other")
    rows = commit(other, "prepare", identity="other rows")
    commit(other, "vocab", inputs={"rows": rows})
    inputs = {"states": gated(ready, "extract"), "vocab": gated(other, "vocab")}
    with pytest.raises(ManifestInvalid, match=r"inputs\.rows\.digest"):
        cross_check(inputs)


def test_states_of_prepared_rows_and_a_mapping_of_regenerated_ones_are_refused(ready, run):
    rows = artifacts.find(ready.child("prepare"))
    assert rows is not None
    regenerated = commit(run, "regenerate", inputs={"rows": rows})
    other = open_store(f"{run.url}-other")
    commit(other, "vocab", inputs={"rows": regenerated})
    inputs = {"states": gated(ready, "extract"), "vocab": gated(other, "vocab")}
    with pytest.raises(ManifestInvalid, match=r"inputs\.rows\.digest.*regenerate"):
        cross_check(inputs)


@pytest.mark.parametrize("field", ["verifier", "tokenizer"])
def test_an_artefact_that_does_not_say_whose_it_is_is_refused(ready, field):
    rewrite(ready, "vocab", **{field: None})
    with pytest.raises(ManifestInvalid, match=field):
        gated(ready, "vocab")


def test_an_input_replaced_since_another_was_made_from_it_is_refused(ready):
    rewrite(ready, "verifier", identity="a later one")
    inputs = {"states": gated(ready, "extract"), "verifier": gated(ready, "verifier")}
    with pytest.raises(ManifestInvalid, match=r"inputs\.verifier\.digest"):
        cross_check(inputs)


@pytest.mark.fault("B116")
def test_the_one_missing_object_of_thousands_is_named(run):
    store = run.child("prepare")
    names = [f"rows-{number:06d}.safetensors" for number in range(3000)]
    for name in names:
        store.write_bytes(name, b"1")
    files = tuple(FileEntry(path=name, bytes=1, sha256="a" * 64) for name in names)
    manifest = Manifest(
        artifact="prepare", identity="i", files=files, verifier=VERIFIER, tokenizer=TOKENIZER
    )
    artifacts.commit(store, manifest)
    gated(run, "prepare")
    store.delete(names[1234])
    with pytest.raises(ManifestInvalid, match=names[1234]):
        gated(run, "prepare")


@pytest.fixture(params=["memory", "file"])
def stored(request, tmp_path) -> artifacts.Artifact:
    """A committed artefact, in a store of this machine and in one that is not."""
    url = {"memory": f"memory://artifact-{secrets.token_hex(4)}", "file": str(tmp_path / "run")}
    return commit(open_store(url[request.param]), "prepare")


NAME = "prepare-000001.safetensors"


def read_in_all_ways(artifact: artifacts.Artifact, path: str, folder) -> list[bytes]:
    artifact.fetch(path, folder / "copy")
    here = artifact.local(path, folder / "below")
    return [artifact.read(path), (folder / "copy").read_bytes(), here.read_bytes()]


def test_what_is_read_of_an_artefact_is_what_its_manifest_names(stored, tmp_path):
    assert read_in_all_ways(stored, NAME, tmp_path) == [b"prepare 1" * 10] * 3


def test_a_local_object_is_used_where_it_lies_and_a_remote_one_is_copied(stored, tmp_path):
    here = stored.local(NAME, tmp_path / "below")
    assert here == (stored.store.local_path(NAME) or tmp_path / "below" / NAME)


@pytest.mark.parametrize("way", ["read", "fetch", "local"])
@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"prepare 2" * 10, r"wanted sha256 .*, other bytes"),
        (b"prepare 1" * 9, r"wanted 90 bytes, as the manifest says, found 81 bytes"),
        (None, r"wanted 90 bytes, as the manifest says, found no object"),
    ],
    ids=["changed", "cut", "gone"],
)
@pytest.mark.fault("B111")
def test_other_bytes_than_the_manifests_are_never_handed_on(stored, tmp_path, way, data, told):
    stored.store.delete(NAME)
    if data is not None:
        stored.store.write_bytes(NAME, data)
    with pytest.raises(ManifestInvalid, match=told) as caught:
        {
            "read": lambda: stored.read(NAME),
            "fetch": lambda: stored.fetch(NAME, tmp_path / "copy"),
            "local": lambda: stored.local(NAME, tmp_path / "below"),
        }[way]()
    assert "run prepare again under a prefix of its own" in str(caught.value)


def test_an_object_that_the_manifest_does_not_name_is_not_read(stored):
    stored.store.write_bytes("rows-000009.jsonl", b"{}")
    with pytest.raises(ManifestInvalid, match="found none of that name"):
        stored.read("rows-000009.jsonl")


def test_what_a_killed_process_left_of_a_timed_object_may_be_deleted(run):
    store = run.child("evaluate")
    artifacts.put(store, "report.html", b"slow", timed=True)
    with pytest.raises(IdentityConflict, match="if no other process of this run is alive, delete"):
        artifacts.put(store, "report.html", b"fast", timed=True)
    assert store.read_bytes("report.html") == b"slow"
    commit(run, "evaluate")
    with pytest.raises(IdentityConflict, match="give this run a store prefix of its own"):
        artifacts.put(store, "report.html", b"fast", timed=True)


def test_of_two_processes_that_end_together_the_later_finds_the_timed_object_committed(run):
    store = run.child("evaluate")

    def made(report: bytes) -> Manifest:
        entry = artifacts.put(store, "report.html", report, timed=True)
        facts = {"verifier": VERIFIER, "tokenizer": TOKENIZER}
        return Manifest(artifact="evaluate", identity="i", files=(entry,), **facts)

    first = artifacts.commit(store, made(b"slow"))
    later = artifacts.commit(store, made(b"fast"))
    assert later.manifest == first.manifest
    assert later.read("report.html") == b"slow"


def commit_many(run: Store, count: int) -> artifacts.Artifact:
    """An artefact that says it has so many objects; only the manifest's part is written."""
    files = tuple(
        FileEntry(
            path=f"hidden-{i:06d}.safetensors",
            bytes=1,
            sha256=f"{i:064x}",
            samples=1,
            header_sha256=f"{i:064x}",
        )
        for i in range(count)
    )
    sums = {"rows_in": count, "rows_kept": count, "total_samples": count, "total_tokens": 0}
    return commit(run, "extract", files=files, **sums, **HIDDEN_STATES)


@pytest.mark.parametrize("count", [MOST_INLINE, MOST_INLINE + 1])
def test_a_manifest_of_many_objects_reads_as_one_of_few(run, count):
    made = commit_many(run, count)
    found = artifacts.find(run.child("extract"))
    assert found is not None
    assert found.manifest == made.manifest
    assert found.digest == made.digest
    names = {info.path for info in run.child("extract").list() if info.path.startswith("files-")}
    assert len(names) == (count > MOST_INLINE)
    assert commit_many(run, count).manifest == made.manifest


@pytest.mark.parametrize("damage", ["gone", "cut", "changed"])
def test_a_damaged_index_is_refused_by_the_gate(run, damage):
    commit_many(run, MOST_INLINE + 1)
    store = run.child("extract")
    (name,) = (info.path for info in store.list() if info.path.startswith("files-"))
    lines = store.read_bytes(name)
    store.delete(name)
    if damage != "gone":
        store.write_bytes(
            name,
            lines[:-1] if damage == "cut" else lines.replace(b'"samples":1', b'"samples":2', 1),
        )
    with pytest.raises(ManifestInvalid, match=r"data_config\.json: index: wanted files-"):
        gated(run, "extract")


def test_an_index_of_another_number_of_objects_is_refused(run):
    commit_many(run, MOST_INLINE + 1)
    manifest = msgspec.json.decode(run.read_bytes("extract/data_config.json"))
    manifest["index"]["objects"] += 1
    run.write_bytes("extract/data_config.json", sealed(manifest))
    with pytest.raises(ManifestInvalid, match=r"1002 objects, found .* 1001 objects"):
        gated(run, "extract")


def test_the_gate_takes_a_hundred_thousand_objects_with_little_memory(run, monkeypatch):
    commit_many(run, 100_000)
    found = [ObjectInfo(path=f"hidden-{i:06d}.safetensors", bytes=1) for i in range(100_000)]
    monkeypatch.setattr(Store, "list", lambda self, splits: found)
    tracemalloc.start()
    assert gated(run, "extract").manifest.total_samples == 100_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 120 * 2**20
