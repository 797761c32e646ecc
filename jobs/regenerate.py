"""regenerate: the verifier answers the prompts itself, turn by turn.

A draft learns best from what it will have to foresee. Conversations are answered in units, each
unit together, and written as token shards of prepare's form. A unit's answers follow from its
conversations, the settings and the seed alone.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from eagle3 import artifact as artifacts
from eagle3 import vllm_capture
from eagle3.capture import Generator, Sampling
from eagle3.config import RegenerateConfig
from eagle3.conversations import Renderer, RowRecord, read_row_records
from eagle3.errors import ConfigError, ConversationsInvalid, ManifestInvalid
from eagle3.manifest import FileEntry, Manifest
from eagle3.onpolicy import Chat, answers_in
from eagle3.shards import encode_rows
from eagle3.units import (
    Unit,
    UnitReader,
    cut_units,
    merge,
    merge_token_counts,
    open_units,
    write_unit,
)
from eagle3.verifier import LoadedVerifier, load_verifier_artifact, open_verifier
from eagle3.vocab import (
    COUNTS_NAME,
    counts_from_dict,
    counts_to_dict,
    encode_counts,
    supervised_counts,
)
from eagle3.work import UnitRecord
from jobs.process import StageRun, run_stage


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is answered, and in which units."""

    settings: RegenerateConfig
    max_seq_len: int
    units: tuple[Unit, ...]

    @property
    def num_rows(self) -> int:
        """Prepared rows of all units; a conversation has one or more."""
        return sum(unit.num_rows for unit in self.units)


StartGenerator = Callable[[Path, Plan], Generator]
"""Starts an engine, given a folder with the whole verifier and the plan."""


def story(run: StageRun, start: StartGenerator) -> str:
    """Claim, answer what nobody has answered, merge the units' records, commit."""
    plan = make_plan(run)
    identity = run.claim()
    if done := run.committed(identity):
        return f"already committed, {done.manifest.total_samples} rows"
    if len(run.work.finished_units()) < len(plan.units):
        answer_units(run, plan, start)
    manifest = finished_manifest(run, plan, identity)
    run.commit(manifest)
    return (
        f"wrote {manifest.total_samples} rows, {manifest.total_tokens} tokens; "
        f"{manifest.facts['turns']} answers, {manifest.facts['clipped']} of them cut at "
        f"{plan.settings.max_new_tokens} tokens; {sum(manifest.rejected.values())} of "
        f"{manifest.rows_in} conversations rejected, "
        f"{manifest.measured['tokens_per_second']:.0f} tokens/s"
    )


def make_plan(run: StageRun) -> Plan:
    """Cut the units. Raises ConfigError where no answer would fit into a row, ManifestInvalid."""
    settings, rows = run.config.regenerate, run.inputs["rows"]
    longest = rows.manifest.max_seq_len
    if longest is None:
        raise ManifestInvalid(
            f"{rows.store.url}: max_seq_len",
            wanted="the longest row allowed",
            found="none",
            remedy="run prepare again under a prefix of its own",
        )
    if settings.max_new_tokens >= longest:
        raise ConfigError(
            "regenerate.max_new_tokens",
            wanted=f"less than {longest}, the longest row that prepare allowed",
            found=settings.max_new_tokens,
            remedy="lower it, or raise prepare.max_seq_len",
        )
    units = cut_units(rows.manifest.files, settings.unit_rows)
    return Plan(settings=settings, max_seq_len=longest, units=units)


def answer_units(run: StageRun, plan: Plan, start: StartGenerator) -> None:
    """Start the engine and answer every open unit; each is recorded when it is done."""
    rows = run.inputs["rows"]
    reader = UnitReader(
        lambda path: read_row_records(rows.store, f"{path.removesuffix('.safetensors')}.jsonl"),
        rows.manifest.files,
    )
    with run.scratch() as scratch:
        trusted = run.config.verifier.trust_remote_code
        verifier = load_verifier_artifact(
            run.inputs["verifier"], scratch / "verifier", trust_remote_code=trusted
        )
        renderer = Renderer(verifier.load_tokenizer(), verifier.stop_ids)
        source = open_verifier(run.config.verifier)
        source.must_be(verifier.facts())
        model = source.local_folder(scratch)
        with (
            closing(start(model, plan)) as generator,
            run.progress("answer", total=plan.num_rows, unit="rows") as progress,
        ):
            done = run.work.finished_units()
            resumed = sum(unit.num_rows for unit in plan.units if unit.number in done)
            progress.advance(resumed, resumed=True)
            for unit in open_units(plan.units, run.work.is_finished, run.index):
                since = time.monotonic()
                chats = answer_unit(generator, renderer, verifier, plan, unit, reader.read(unit))
                record_unit(run, verifier, unit, chats, time.monotonic() - since)
                progress.advance(unit.num_rows)
                run.check_stop()


def answer_unit(
    generator: Generator,
    renderer: Renderer,
    verifier: LoadedVerifier,
    plan: Plan,
    unit: Unit,
    records: Sequence[RowRecord],
) -> list[Chat]:
    """Have every turn of a unit's conversations answered, one turn of all of them at a time."""
    settings, tokenizer = plan.settings, verifier.load_tokenizer()
    # Only the first row of a conversation brings its messages.
    chats = [
        Chat(
            record.row.partition(".")[0],
            record.messages,
            record.tools,
            max_seq_len=plan.max_seq_len,
            max_new_tokens=settings.max_new_tokens,
        )
        for record in records
        if record.messages
    ]
    for turn in range(settings.max_turns):
        asked = [(chat, chat.next_prompt(renderer)) for chat in chats]
        open_chats = [(chat, prompt) for chat, prompt in asked if prompt is not None]
        if not open_chats:
            break
        sampling = Sampling(
            max_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_k=settings.top_k,
            # Of its own for every call, and the same whenever the call is made again.
            seed=zlib.crc32(f"{settings.seed} {unit.number} {turn}".encode()),
        )
        completions = generator.generate([prompt for _, prompt in open_chats], sampling)
        for (chat, _), completion in zip(open_chats, completions, strict=True):
            text = tokenizer.decode(
                list(completion.token_ids),
                skip_special_tokens=True,
                clean_up_tokenization_spaces=False,
            )
            chat.take_answer(completion.token_ids, str(text))
    return chats


def record_unit(
    run: StageRun, verifier: LoadedVerifier, unit: Unit, chats: Sequence[Chat], seconds: float
) -> UnitRecord:
    """Write a unit's shard, then its record; all counts are taken from what the shard holds."""
    rows = [row for chat in chats for row in chat.rows()]
    files: tuple[FileEntry, ...] = ()
    if rows:
        written = write_unit(
            run.output(), f"rows-{unit.number:06d}.safetensors", encode_rows(rows), rows
        )
        files, rows = (written.entry,), list(written.rows)
    kept = {row.row.partition(".")[0] for row in rows}
    lost = [chat for chat in chats if chat.name not in kept]
    reasons = Counter(chat.reason or "rejected_by_another_worker" for chat in lost)
    answers = [answers_in(row, verifier.stop_ids) for row in rows]
    counts = supervised_counts(rows, verifier.vocab_size)
    return run.work.record(
        UnitRecord(
            unit=unit.number,
            rows_in=len(chats),
            rows_kept=len(chats) - len(lost),
            files=files,
            rejected=dict(reasons),
            facts={
                "turns": sum(count for count, _ in answers),
                "clipped": sum(clipped for _, clipped in answers),
                "supervised_tokens": int(counts.sum()),
            },
            token_counts=counts_to_dict(counts),
            measured={"answer_seconds": seconds},
        )
    )


def finished_manifest(run: StageRun, plan: Plan, identity: str) -> Manifest:
    """Write the token counts of all units, and the manifest that goes with them.

    Raises ConversationsInvalid where no conversation was answered.
    """
    records = run.work.finished()
    merged = merge("regenerate", identity, plan.units, records)
    if not merged.total_samples:
        raise ConversationsInvalid(
            "regenerate",
            wanted="at least one answered conversation",
            found=", ".join(f"{count} {reason}" for reason, count in merged.rejected.items()),
            remedy="lower regenerate.max_new_tokens or raise prepare.max_seq_len",
        )
    source = run.inputs["verifier"].manifest
    assert source.verifier is not None, "a verifier artefact's manifest names its verifier"
    counts = counts_from_dict(merge_token_counts(records.values()), source.verifier.vocab_size)
    data = encode_counts(counts)
    entry = artifacts.put(run.output(), COUNTS_NAME, data)
    seconds = merged.measured.get("answer_seconds", 0.0)
    rate = merged.facts["supervised_tokens"] / seconds if seconds else 0.0
    return msgspec.structs.replace(
        merged,
        files=(*merged.files, entry),
        verifier=source.verifier,
        tokenizer=source.tokenizer,
        max_seq_len=plan.max_seq_len,
        measured={**merged.measured, "tokens_per_second": rate},
    )


def start_vllm(run: StageRun, model: Path, plan: Plan) -> Generator:
    """vLLM on the whole verifier."""
    engine = plan.settings.engine
    options = vllm_capture.EngineOptions(
        model=model,
        max_model_len=plan.max_seq_len,
        dtype=engine.dtype,
        tensor_parallel_size=engine.tensor_parallel_size,
        max_num_seqs=engine.max_num_seqs,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        trust_remote_code=run.config.verifier.trust_remote_code,
        extra=engine.extra,
    )
    return vllm_capture.VllmGenerator(options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stage as this process; returns its exit code."""
    return run_stage("regenerate", lambda run: story(run, partial(start_vllm, run)), argv)


if __name__ == "__main__":
    sys.exit(main())
