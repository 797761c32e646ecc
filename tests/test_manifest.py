"""The manifest: its promise to readers of version 1, what its digest covers, what it refuses."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3.errors import ManifestInvalid
from eagle3.manifest import (
    MOST_INLINE,
    FileEntry,
    InputRef,
    Manifest,
    SourceFile,
    TokenizerFacts,
    VerifierFacts,
    check,
    decode,
    digest,
    encode,
    identity_of,
    sealed,
    split,
    totals,
)

VERSION_1 = {
    "model_path": "/shared/kimi-k2.5-int4",
    "layer_ids": [2, 30, 58, 60],
    "max_seq_len": 2048,
    "tp_size": 8,
    "total_samples": 10,
    "total_tokens": 3875,
    "total_time_seconds": 1.69976,
    "data_format_version": 1,
    "hidden_size": 7168,
    "num_layers_captured": 4,
}

FILES = (
    FileEntry(
        path="hidden-000000.safetensors",
        bytes=10,
        sha256="a" * 64,
        samples=2,
        tokens=7,
        header_sha256="e" * 64,
    ),
    FileEntry(
        path="hidden-000001.safetensors",
        bytes=11,
        sha256="b" * 64,
        samples=1,
        tokens=5,
        header_sha256="f" * 64,
    ),
    FileEntry(path="timings.json", bytes=3, sha256="9" * 64, timed=True),
)

MANIFEST = Manifest(
    artifact="extract",
    identity="i" * 64,
    files=FILES,
    created_at="2026-11-30T12:00:00+00:00",
    produced_by={"eagle3": "0.1.0"},
    inputs={"rows": InputRef(artifact="prepare", url="file:///a/prepare", digest="d" * 64)},
    sources=(SourceFile(url="s3://bucket/chats.jsonl", bytes=4, sha256="c" * 64),),
    config={"unit_rows": 64},
    verifier=VerifierFacts(
        fingerprint="f" * 64, num_hidden_layers=61, hidden_size=7168, vocab_size=163840
    ),
    tokenizer=TokenizerFacts(fingerprint="t" * 64, size=163840),
    rows_in=5,
    rows_kept=3,
    rejected={"too_long": 2},
    total_samples=3,
    total_tokens=12,
    measured={"seconds": 1.5},
    model_path="/shared/kimi-k2.5-int4",
    layer_ids=(2, 30, 58, 61),
    max_seq_len=2048,
    tp_size=8,
    total_time_seconds=1.5,
    hidden_size=7168,
    num_layers_captured=4,
    layer_id_convention="input_of_layer",
    final_hidden_state="pre_norm",
    dtype="bfloat16",
    codec="none",
)


def changed(**fields: object) -> Manifest:
    return msgspec.structs.replace(MANIFEST, **fields)


def test_a_manifest_reads_back_as_it_was_written():
    assert decode(encode(MANIFEST), "m") == MANIFEST


def test_the_same_manifest_is_the_same_bytes_whatever_the_order_of_its_mappings():
    counts = {"too_long": 1, "empty": 1}
    backwards = dict(reversed(counts.items()))
    assert encode(changed(rejected=counts)) == encode(changed(rejected=backwards))


def test_hidden_states_keep_the_ten_fields_of_version_1_with_their_names_and_types():
    record = json.loads(encode(MANIFEST))
    for field, value in VERSION_1.items():
        assert type(record[field]) is type(value), field
    assert record["data_format_version"] == 2


def test_version_1_is_refused_with_the_reason():
    with pytest.raises(ManifestInvalid, match=r"data_format_version.*another convention") as caught:
        decode(json.dumps(VERSION_1).encode(), "old/data_config.json")
    assert caught.value.exit_code == 65


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"artifact": "prepare"}', b'"2"']
)
def test_what_is_no_manifest_is_refused(data):
    with pytest.raises(ManifestInvalid):
        decode(data, "m")


@pytest.mark.parametrize("version", [0, 3, "2", None])
def test_another_version_is_refused(version):
    record = json.loads(encode(MANIFEST)) | {"data_format_version": version}
    with pytest.raises(ManifestInvalid, match="data_format_version"):
        decode(json.dumps(record).encode(), "m")


@pytest.mark.parametrize("field", ["artifact", "identity", "files"])
def test_a_manifest_without_a_required_field_is_refused_by_its_name(field):
    record = json.loads(encode(MANIFEST))
    del record[field]
    with pytest.raises(ManifestInvalid, match=field):
        decode(sealed(record), "m")


def test_a_field_of_a_newer_writer_is_ignored():
    record = json.loads(encode(MANIFEST)) | {"colour": "green", "a": {"seal": "0" * 64}}
    assert decode(sealed(record), "m") == MANIFEST


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("rows_in", {"rows_in": 6}),
        ("rows_in", {"rejected": {"too_long": 1}}),
        ("total_samples", {"total_samples": 4}),
        ("total_tokens", {"total_tokens": 11}),
    ],
)
def test_sums_that_do_not_add_up_are_refused_by_field(field, wrong):
    with pytest.raises(ManifestInvalid, match=field):
        check(changed(**wrong), "m")


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../x",
        "a/../../x",
        "",
        "a//b",
        "./a",
        "a\x1b[2J",
        "data_config.json",
        FILES[0].path,
    ],
)
def test_objects_outside_the_prefix_or_named_twice_are_refused(path):
    entry = FileEntry(path=path, bytes=1, sha256="e" * 64)
    with pytest.raises(ManifestInvalid, match="files"):
        check(changed(files=(*FILES, entry)), "m")


@pytest.mark.parametrize(
    "same",
    [
        {"created_at": "2027-01-01T00:00:00+00:00"},
        {"produced_by": {"eagle3": "9"}},
        {"measured": {"seconds": 9.0}},
        {"total_time_seconds": 9.0},
        {"model_path": "s3://elsewhere/model"},
        {"tp_size": 1},
        {"config": {"unit_rows": 1}},
        {"inputs": {"rows": InputRef(artifact="prepare", url="s3://b/p", digest="d" * 64)}},
        {"sources": (SourceFile(url="/tmp/chats.jsonl", bytes=4, sha256="c" * 64),)},
        {"verifier": msgspec.structs.replace(MANIFEST.verifier, commit="a" * 40)},
    ],
    ids=lambda same: next(iter(same)),
)
def test_the_same_work_done_elsewhere_has_the_same_digest(same):
    assert digest(changed(**same)) == digest(MANIFEST)


@pytest.mark.parametrize(
    "other",
    [
        {"artifact": "prepare"},
        {"identity": "j" * 64},
        {"files": FILES[:1]},
        {"files": FILES[::-1]},
        {"inputs": {"rows": InputRef(artifact="prepare", url="file:///a", digest="0" * 64)}},
        {"sources": (SourceFile(url="s3://bucket/chats.jsonl", bytes=4, sha256="0" * 64),)},
        {"verifier": None},
        {"rejected": {"empty": 2}},
        {"layer_ids": (3, 30, 58, 61)},
        {"layer_id_convention": "output_of_layer"},
        {"facts": {"steps": 1}},
    ],
    ids=lambda other: next(iter(other)),
)
def test_other_content_has_another_digest(other):
    assert digest(changed(**other)) != digest(MANIFEST)


def test_an_object_that_holds_times_is_in_the_manifest_by_its_hash_and_in_the_digest_by_its_name():
    curve = FileEntry(path="metrics.jsonl", bytes=5, sha256="1" * 64, timed=True)
    slower = msgspec.structs.replace(curve, bytes=6, sha256="2" * 64)
    renamed = msgspec.structs.replace(curve, path="curve.jsonl")
    one = changed(files=(*FILES, curve))
    assert digest(changed(files=(*FILES, slower))) == digest(one)
    assert digest(changed(files=(*FILES, renamed))) != digest(one)
    assert digest(MANIFEST) != digest(one)
    assert decode(encode(one), "m") == one


def test_the_digest_survives_writing_and_reading():
    assert digest(decode(encode(MANIFEST), "m")) == digest(MANIFEST)


settings = st.dictionaries(
    st.text(max_size=5), st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5)
)


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=5)), settings, settings)
def test_an_identity_is_the_same_exactly_for_the_same_inputs_and_settings(inputs, one, other):
    def canonical(value: object) -> str:
        return json.dumps(value, sort_keys=True)

    same = canonical(one) == canonical(other)
    assert (identity_of(inputs, one) == identity_of(inputs, other)) == same
    assert identity_of(inputs, dict(reversed(one.items()))) == identity_of(inputs, one)


def test_totals_are_sums_over_objects():
    assert totals(FILES) == (3, 12)
    assert totals(iter(())) == (0, 0)


SMALL = Manifest(
    artifact="prepare",
    identity="ii",
    files=(FileEntry(path="rows-000000.safetensors", bytes=10, sha256="aa", samples=2, tokens=7),),
    rows_in=3,
    rows_kept=2,
    rejected={"too_long": 1},
    total_samples=2,
    total_tokens=7,
)
# What lies in stores today: these bytes must be written and read as they are, forever.
_REST = """  "rejected": {
    "too_long": 1
  },
  "rows_in": 3,
  "rows_kept": 2,
  "seal": "%s",
  "total_samples": 2,
  "total_tokens": 7
}
"""
GOLDEN = (
    """{
  "artifact": "prepare",
  "data_format_version": 2,
  "files": [
    {
      "bytes": 10,
      "path": "rows-000000.safetensors",
      "samples": 2,
      "sha256": "aa",
      "tokens": 7
    }
  ],
  "identity": "ii",
"""
    + _REST % "1e33afdaa3bdcb1961f389b4b941ee074822af5fed80b3236384984ab7576e7d"
)
GOLDEN_WITH_INDEX = (
    """{
  "artifact": "prepare",
  "data_format_version": 2,
  "files": [],
  "identity": "ii",
  "index": {
    "bytes": 83,
    "objects": 1,
    "path": "files-94e62b2112ff68a8.jsonl",
    "sha256": "94e62b2112ff68a80c3c2c259ebf7ce0229f6b0f37c61e9774d1ecbee9d883e9"
  },
"""
    + _REST % "c154add4571f49f4e9b7dec8d28f9b33824662b4c5f11700ac2bd072bcb7e849"
)
GOLDEN_LINES = (
    b'{"bytes":10,"path":"rows-000000.safetensors","samples":2,"sha256":"aa","tokens":7}\n'
)
GOLDEN_DIGEST = "254dd3d3cb5625a9d35f7801bfb4d4e88b6725c60af17c9991d51cc62c53d866"
WHOLE_SHA256 = "5fae552a784e72f4ba521ff077de342b4e3594142dab6a357d11ed2b6e662969"
WHOLE_DIGEST = "d33c1d9080c12de8675af7293eae1f1172b8d4f71cd15c1c8494a0345a96bd84"


WHOLE = encode(MANIFEST)


@given(st.integers(0, 8 * len(WHOLE) - 1))
def test_a_manifest_with_any_bit_flipped_is_refused(bit):
    data = bytearray(WHOLE)
    data[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ManifestInvalid):
        decode(bytes(data), "m")


@given(st.binary(max_size=4), st.integers(0, len(WHOLE)), st.integers(0, 9))
def test_a_manifest_with_any_bytes_more_or_less_is_refused(more, at, less):
    data = WHOLE[:at] + more + WHOLE[at + less :]
    if data == WHOLE:
        return
    with pytest.raises(ManifestInvalid):
        decode(data, "m")


def test_a_manifest_without_its_seal_is_refused_by_name_and_so_is_another_one_s_seal():
    for line, told in (
        (b"", "found none"),
        (b'  "seal": "' + b"5" * 64 + b'",\n', "of other bytes"),
    ):
        data = re.sub(rb'  "seal": "[0-9a-f]*",\n', line, WHOLE)
        with pytest.raises(ManifestInvalid, match=rf"m: seal: wanted .*sha256.*{told}"):
            decode(data, "m")


@pytest.mark.parametrize("seal", [None, 7, "", "A" * 64, ["a" * 64], {"seal": "a" * 64}])
def test_what_is_no_seal_is_refused(seal):
    record = json.loads(WHOLE) | {"seal": seal}
    with pytest.raises(ManifestInvalid, match="m: seal"):
        decode(json.dumps(record).encode(), "m")


def test_the_seal_is_the_hash_of_the_bytes_with_zeros_in_its_place_and_in_no_digest():
    seal = json.loads(WHOLE)["seal"]
    unset = WHOLE.replace(seal.encode(), b"0" * 64)
    assert hashlib.sha256(unset).hexdigest() == seal
    assert digest(changed(created_at="later")) == digest(MANIFEST)
    assert json.loads(encode(changed(created_at="later")))["seal"] != seal


def beside(lines: bytes) -> Callable[[str], bytes]:
    """The index where its manifest says that it is."""
    return {"files-94e62b2112ff68a8.jsonl": lines}.__getitem__


def test_the_bytes_of_a_manifest_are_frozen():
    assert encode(SMALL).decode() == GOLDEN
    assert decode(GOLDEN.encode(), "m") == SMALL
    assert digest(SMALL) == GOLDEN_DIGEST


def test_the_bytes_and_the_digest_of_a_manifest_with_every_field_are_frozen():
    whole = encode(MANIFEST)
    assert hashlib.sha256(whole).hexdigest() == WHOLE_SHA256, whole.decode()
    assert digest(MANIFEST) == WHOLE_DIGEST
    unset = [name for name in MANIFEST.__struct_fields__ if not getattr(MANIFEST, name)]
    assert unset == ["index", "facts"]


def test_the_bytes_of_a_manifest_with_an_index_are_frozen():
    stored, lines = split(SMALL)
    assert (encode(stored).decode(), lines) == (GOLDEN_WITH_INDEX, GOLDEN_LINES)
    found = decode(GOLDEN_WITH_INDEX.encode(), "m", beside(GOLDEN_LINES))
    assert found == SMALL
    assert digest(found) == GOLDEN_DIGEST


def test_fields_of_a_newer_writer_are_ignored_in_an_index_too():
    lines = GOLDEN_LINES.replace(b"{", b'{"colour":"green",')
    record = json.loads(GOLDEN_WITH_INDEX)
    sha256 = hashlib.sha256(lines).hexdigest()
    record["index"] |= {"bytes": len(lines), "sha256": sha256, "codec": "none"}
    assert decode(sealed(record), "m", beside(lines)) == SMALL


def test_many_objects_written_inline_are_still_read():
    many = tuple(
        msgspec.structs.replace(SMALL.files[0], path=f"rows-{i}", samples=0, tokens=0)
        for i in range(MOST_INLINE + 1)
    )
    inline = msgspec.structs.replace(SMALL, files=(*SMALL.files, *many))
    assert decode(encode(inline), "m") == inline


@pytest.mark.parametrize("path", ["../other/files.jsonl", "/etc/passwd", "..", "", "a\nb"])
def test_an_index_is_never_read_outside_its_prefix(path):
    record = json.loads(GOLDEN_WITH_INDEX)
    record["index"]["path"] = path
    with pytest.raises(ManifestInvalid, match="index"):
        decode(sealed(record), "m", lambda _: GOLDEN_LINES)
