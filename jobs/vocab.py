"""vocab: which tokens the draft may propose, from the counts of supervised tokens.

Reads the rows' token counts and the verifier's tokenizer; writes `mapping.safetensors` (t2d and
d2t) and `coverage.json` (what this and other sizes cover), which it prints as a table too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from rich.console import Console

from eagle3 import artifact as artifacts
from eagle3.coverage import advice, coverage_by_size, show
from eagle3.manifest import Manifest
from eagle3.verifier import load_verifier_artifact
from eagle3.vocab import (
    MAPPING_NAME,
    build_mapping,
    check_size,
    encode,
    load_counts,
    mapping_sha256,
)
from jobs.process import StageRun, run_stage

COVERAGE_NAME = "coverage.json"


def story(run: StageRun) -> str:
    """Check the size, claim, build the mapping, write it, commit it."""
    source, size = run.inputs["verifier"].manifest, run.config.vocab.draft_vocab_size
    trusted = run.config.verifier.trust_remote_code
    with run.scratch() as scratch:
        verifier = load_verifier_artifact(
            run.inputs["verifier"], scratch, trust_remote_code=trusted
        )
        vocab_size, required_ids = verifier.vocab_size, verifier.required_ids
    # Before the claim: a size that cannot be is not held against the next one.
    check_size(size, vocab_size, len(required_ids))
    identity = run.claim()
    if done := run.committed(identity):
        return f"already committed, {in_words(done.manifest)}"
    counts = load_counts(run.inputs["rows"], vocab_size=vocab_size)
    mapping = build_mapping(counts, size, required_ids)
    covered = coverage_by_size(counts, size, required_ids)
    told = {
        "draft_vocab_size": size,
        "vocab_size": vocab_size,
        "required_ids": len(required_ids),
        "population": "supervised tokens of the training rows",
        "supervised_tokens": int(counts.sum()),
        "distinct_tokens": int(counts.count_nonzero()),
        "coverage": covered.share,
    }
    objects = {
        MAPPING_NAME: encode(mapping, required_ids=required_ids),
        COVERAGE_NAME: json.dumps({**told, **covered.as_json()}, indent=2).encode() + b"\n",
    }
    manifest = Manifest(
        artifact="vocab",
        identity=identity,
        files=tuple(artifacts.put(run.output(), path, data) for path, data in objects.items()),
        verifier=source.verifier,
        tokenizer=source.tokenizer,
        facts={
            **told,
            "suggested_size": covered.suggested,
            "mapping_sha256": mapping_sha256(mapping),
        },
    )
    run.commit(manifest)
    show(covered, Console())
    return f"wrote a draft vocabulary of {size} of {vocab_size} tokens, {in_words(manifest)}"


def in_words(manifest: Manifest) -> str:
    """What the vocabulary covers, and a better size where there is one."""
    facts = manifest.facts
    told = f"coverage {facts['coverage']:.4f}"
    return told + advice(facts["draft_vocab_size"], facts.get("suggested_size"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stage as this process."""
    return run_stage("vocab", story, argv)


if __name__ == "__main__":
    sys.exit(main())
