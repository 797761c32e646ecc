"""The published JSON Schema of the manifest says what the code reads, and no byte makes it fall."""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from eagle3.errors import Eagle3Error, ManifestInvalid
from eagle3.manifest import MANIFEST_NAME, check_states, decode, digest, encode, sealed, split
from eagle3.manifest.schema import manifest_schema
from eagle3.store import open_store
from eagle3.upstream import gate
from tests.conftest import ROOT
from tests.test_manifest import MANIFEST, SMALL
from tests.upstreams import commit, commit_upstreams

PUBLISHED = json.loads((ROOT / "docs" / "data_config.schema.json").read_text())
SCHEMA = Draft202012Validator(PUBLISHED)
RECORD: dict[str, Any] = msgspec.json.decode(encode(MANIFEST))

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


def test_the_published_schema_is_the_code_s():
    assert json.loads(json.dumps(manifest_schema())) == PUBLISHED, "run `make manifests`"
    Draft202012Validator.check_schema(PUBLISHED)


def test_manifests_that_are_written_fit_the_schema():
    run = open_store(f"memory://schema-{secrets.token_hex(4)}")
    commit_upstreams(run)
    stored = [
        run.read_bytes(f"{kind}/{MANIFEST_NAME}") for kind in ("verifier", "extract", "vocab")
    ]
    for data in (*stored, encode(MANIFEST), encode(split(SMALL)[0])):
        SCHEMA.validate(json.loads(data))


@pytest.mark.parametrize(
    "wrong",
    [
        {"seal": None},
        {"data_format_version": 1},
        {"artifact": "weights"},
        {"rows_in": -1},
        {"files": [{"path": "a"}]},
        {"layer_ids": "2"},
        {"verifier": {"fingerprint": "f"}},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_what_is_no_manifest_does_not_fit_the_schema(wrong):
    assert not SCHEMA.is_valid(RECORD | wrong)


def test_a_field_of_a_newer_writer_fits_the_schema():
    SCHEMA.validate(RECORD | {"colour": "green"})


def paths(value: object, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Every place in a JSON value, itself left out."""
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, below in parts:
        found.append((*at, key))
        if isinstance(below, dict | list):
            found += paths(below, (*at, key))
    return found


def replaced(place: tuple[str | int, ...], value: object) -> dict[str, Any]:
    """The real manifest with one value replaced."""
    record = json.loads(json.dumps(RECORD))
    inner = record
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return record


def read(data: bytes) -> dict[str, Any] | None:
    """What `decode` takes, as a record; None where it refuses, which it does in one way only."""
    try:
        found = decode(data, "m", {}.__getitem__)
    except ManifestInvalid:
        return None
    assert len(digest(found)) == 64
    assert decode(encode(found), "m") == found
    return json.loads(data)


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_in_one_sentence(data):
    assert read(data) is None


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"data_format_version": 2, "artifact": "\\ud800"}',
        b'{"data_format_version": 2e400}',
        b'{"data_format_version": ' + b"9" * 5000 + b"}",
        b'{"data_format_version": true}',
        b"\xef\xbb\xbf{}",
        b'{"a": "\xff"}',
    ],
    ids=["deep", "deeper", "surrogate", "infinite", "long", "true", "bom", "no utf-8"],
)
def test_bytes_that_bite_readers_are_refused_in_one_sentence(data):
    assert read(data) is None


@given(JSON)
def test_any_json_is_refused_in_one_sentence(value):
    assert read(json.dumps(value).encode()) is None


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(paths(RECORD)), JSON)
def test_a_manifest_with_any_value_replaced_is_read_or_refused_in_one_sentence(place, value):
    record = read(sealed(replaced(place, value)))
    if record is not None:
        SCHEMA.validate(record)
        with contextlib.suppress(ManifestInvalid):
            check_states(decode(sealed(record), "m"), "m")


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60) | st.lists(JSON, max_size=3))
def test_any_lines_as_an_index_are_read_or_refused_in_one_sentence(content):
    lines = (
        content
        if isinstance(content, bytes)
        else b"".join(json.dumps(line).encode() + b"\n" for line in content)
    )
    sha256 = hashlib.sha256(lines).hexdigest()
    index = {"path": "i", "bytes": len(lines), "sha256": sha256, "objects": lines.count(b"\n")}
    data = sealed(RECORD | {"files": [], "index": index})
    with contextlib.suppress(ManifestInvalid):
        decode(data, "m", lambda _: lines)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_the_gate_ends_with_an_error_of_ours_whatever_a_manifest_says(data):
    run = open_store(f"memory://schema-{secrets.token_hex(4)}")
    commit(run, "extract")
    record = msgspec.json.decode(run.read_bytes(f"extract/{MANIFEST_NAME}"))
    record[data.draw(st.sampled_from(sorted(record)))] = data.draw(JSON)
    run.write_bytes(f"extract/{MANIFEST_NAME}", sealed(record))
    with contextlib.suppress(Eagle3Error):
        gate(run.child("extract").url, ("extract",))
