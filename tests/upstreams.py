"""Committed artefacts without any weights, for tests that stop at the gate."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from eagle3 import artifact as artifacts
from eagle3.artifact import Artifact
from eagle3.manifest import FileEntry, InputRef, Manifest, TokenizerFacts, VerifierFacts, sealed
from eagle3.store import Store

VERIFIER = VerifierFacts(fingerprint="f" * 64, num_hidden_layers=8, hidden_size=64, vocab_size=512)
TOKENIZER = TokenizerFacts(fingerprint="t" * 64, size=504)

HIDDEN_STATES: dict[str, Any] = {
    "layer_ids": (2, 4, 5, 8),
    "num_layers_captured": 4,
    "hidden_size": 64,
    "layer_id_convention": "input_of_layer",
    "final_hidden_state": "pre_norm",
    "dtype": "bfloat16",
    "max_seq_len": 128,
}

CONFIG = """
verifier: {source: org/model}
prepare: {data: [chats.jsonl], max_seq_len: 128}
regenerate: {enabled: false}
"""


def commit_upstreams(run: Store) -> None:
    """Commit everything that train reads: verifier, prepare, extract and vocab."""
    verifier = commit(run, "verifier")
    rows = commit(run, "prepare", verifier=VERIFIER)
    below = {"rows": rows, "verifier": verifier}
    commit(run, "extract", inputs=below, **HIDDEN_STATES)
    commit(run, "vocab", inputs=below, facts={"draft_vocab_size": 64})


def commit(
    run: Store, kind: str, *, inputs: dict[str, Artifact] | None = None, **fields: Any
) -> Artifact:
    """Commit an artefact of two objects of three samples under the run."""
    store = run.child(kind)
    files = []
    for number in range(2):
        data = f"{kind} {number}".encode() * 10
        path = f"{kind}-{number:06d}.safetensors"
        store.create_bytes(path, data)
        digest = hashlib.sha256(data).hexdigest()
        files.append(
            FileEntry(
                path=path,
                bytes=len(data),
                sha256=digest,
                samples=3,
                tokens=30,
                header_sha256=digest,
            )
        )
    refs: dict[str, InputRef] = {name: one.ref() for name, one in (inputs or {}).items()}
    plain = Manifest(
        artifact=kind,
        identity=f"identity of {kind}",
        files=tuple(files),
        inputs=refs,
        verifier=VERIFIER,
        tokenizer=TOKENIZER,
        rows_in=6,
        rows_kept=6,
        total_samples=6,
        total_tokens=60,
    )
    return artifacts.commit(store, msgspec.structs.replace(plain, **fields))


def rewrite(run: Store, kind: str, **fields: Any) -> None:
    """Replace fields of a committed manifest and seal it again, as nobody may: for tests."""
    found = artifacts.find(run.child(kind))
    assert found is not None
    changed = msgspec.json.decode(run.read_bytes(f"{kind}/data_config.json"))
    changed.update(msgspec.to_builtins(fields))
    run.write_bytes(f"{kind}/data_config.json", sealed(changed))
