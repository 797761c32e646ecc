"""prepare: conversations to token rows with loss masks, and the verifier's small files.

Commits two artefacts: `verifier/` (three tensors, plain config, tokenizer) and `prepare/` (token
shards, the messages beside them, held-out prompts, token counts). Run again after a kill it goes
over the rows again and finds its own objects, byte for byte.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from eagle3.config import RunConfig
from eagle3.conversations import (
    Converter,
    Preparation,
    Renderer,
    Source,
    open_sources,
    outcomes,
    parallel_outcomes,
    rejected_in_words,
)
from eagle3.errors import ConfigError, ConversationsInvalid
from eagle3.manifest import Manifest, SourceFile
from eagle3.verifier import Verifier, open_verifier
from eagle3.vocab import check_size
from jobs.kept_verifier import commit_verifier
from jobs.process import StageRun, run_stage


def story(run: StageRun) -> str:
    """Measure the sources, claim, commit the verifier, convert every row, commit the rows."""
    config = run.config.prepare
    sources = open_sources(config.data)
    measured = [source.measure() for source in sources]
    refuse_empty([file for file, _ in measured], sum(rows for _, rows in measured))
    verifier = open_verifier(run.config.verifier)
    check_sizes(run.config, verifier)
    # What nobody has answered is of use only where the verifier will.
    unanswered = run.config.regenerate.enabled
    renderer = Renderer(verifier.load_tokenizer(), verifier.stop_ids, today=config.template_date)
    converter = Converter(renderer, config, unanswered=unanswered)
    fingerprints = {
        "verifier": verifier.facts().fingerprint,
        "tokenizer": verifier.tokenizer_facts().fingerprint,
    }
    data = {f"data.{i}": file.sha256 for i, (file, _) in enumerate(measured)}
    settings = {"stop_ids": list(verifier.stop_ids), "regenerate": {"enabled": unanswered}}
    identity = run.claim(inputs={**fingerprints, **data}, settings=settings)
    if done := run.committed(identity):
        return f"already committed, {done.manifest.total_samples} rows"

    commit_verifier(run, verifier)
    num_rows = min(sum(rows for _, rows in measured), config.max_conversations or sys.maxsize)
    manifest = msgspec.structs.replace(
        convert_rows(run, converter, sources, num_rows=num_rows, verifier=verifier),
        identity=identity,
        sources=tuple(file for file, _ in measured),
        verifier=verifier.facts(),
        tokenizer=verifier.tokenizer_facts(),
    )
    run.commit(manifest)
    return told(manifest)


def told(manifest: Manifest) -> str:
    """The closing line: what came of the rows, and what was left out of them, each by itself."""
    facts = manifest.facts
    left_out = {
        f"clipped at {manifest.max_seq_len} tokens": facts["clipped"],
        "without an answer": facts.get("unanswered", 0),
        "rows with too few supervised tokens": facts["rows_too_short"],
    }
    return ", ".join(
        [
            f"{manifest.total_samples} rows, {manifest.total_tokens} tokens of "
            f"{manifest.rows_in} conversations ({facts['growth']:.2f} times one render of each)",
            *(f"{count} {what}" for what, count in left_out.items() if count),
            f"{facts['heldout_prompts']} prompts held out",
            rejected_in_words(manifest.rejected),
        ]
    )


def refuse_empty(files: Sequence[SourceFile], num_rows: int) -> None:
    """Raises ConversationsInvalid where the files hold no row."""
    if not num_rows:
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        raise ConversationsInvalid(
            "prepare.data",
            wanted="at least one conversation",
            found=f"no row in {files[0].url}{more}",
            remedy="name files that hold some",
        )


def check_sizes(config: RunConfig, verifier: Verifier) -> None:
    """What later stages would find wrong about this verifier, hours later. Raises ConfigError."""
    check_size(config.vocab.draft_vocab_size, verifier.vocab_size, len(verifier.required_ids))
    # An engine that captures a row is asked for one token more.
    longest = verifier.longest_context
    if longest is not None and config.prepare.max_seq_len >= longest:
        raise ConfigError(
            "prepare.max_seq_len",
            wanted=f"at most {longest - 1}, one less than the verifier's longest context",
            found=config.prepare.max_seq_len,
            remedy="lower it",
        )


def convert_rows(
    run: StageRun,
    converter: Converter,
    sources: Sequence[Source],
    *,
    num_rows: int,
    verifier: Verifier,
) -> Manifest:
    """Convert the first `num_rows` rows and write all objects of `prepare/`."""
    config = run.config.prepare
    made = Preparation(run.output(), config, rows=num_rows, vocab_size=verifier.vocab_size)
    converted = (
        parallel_outcomes(
            verifier.pinned(run.config.verifier),
            config,
            sources,
            num_rows,
            unanswered=run.config.regenerate.enabled,
        )
        if config.num_workers
        else outcomes(converter, sources, num_rows)
    )
    with run.progress("convert", total=num_rows, unit="rows") as progress:
        for source, where, outcome in converted:
            run.check_stop()
            made.take(outcome, where=where, source=source)
            progress.advance()
    return made.finish()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stage as this process; returns its exit code."""
    return run_stage("prepare", story, argv)


if __name__ == "__main__":
    sys.exit(main())
