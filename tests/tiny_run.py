"""A tiny run for tests: conversations, a configuration, and what a stage's story is given."""

import json
import random
from pathlib import Path
from typing import Any

import yaml

from eagle3 import artifact as artifacts
from eagle3.artifact import Artifact
from eagle3.capture import Capture, FakeCapture, FakeGenerator, Generator
from eagle3.config import RunConfig, VerifierConfig, load_config
from eagle3.shards import TokenRow, read_rows
from eagle3.stages import stage_named
from eagle3.store import Store
from eagle3.verifier import open_verifier
from eagle3.work import Work
from jobs import extract, regenerate
from jobs.process import StageRun, gate_inputs

TEXT = (
    "the quick brown fox jumps over lazy dog capital France Paris weather mountains winter "
    "function adds two numbers best times worst age wisdom please tell something about"
)


def write_conversations(path: Path, num: int, *, turns: int = 2, seed: int = 0) -> Path:
    """JSON lines of `num` different chats of one to `turns` turns."""
    draw, words = random.Random(seed), TEXT.split()

    def sentence() -> str:
        return " ".join(draw.choices(words, k=draw.randint(4, 20)))

    with path.open("w") as lines:
        for index in range(num):
            messages = []
            for turn in range(1 + index % turns):
                said = f"{sentence()} {index}.{turn}?"
                messages.append({"role": "user", "content": said})
                messages.append({"role": "assistant", "content": f"{sentence()}."})
            lines.write(json.dumps({"messages": messages}) + "\n")
    return path


def write_config(path: Path, verifier: Path, data: Path, **sections: Any) -> Path:
    """A run's YAML file: small units and engines, what `sections` say on top."""
    engine = {"dtype": "float32", "max_num_seqs": 8}
    config: dict[str, Any] = {
        "verifier": {"source": str(verifier), "serving_name": "tests/tiny"},
        "prepare": {
            "data": [str(data)],
            "max_seq_len": 256,
            "heldout_share": 0.2,
            "shard_rows": 16,
        },
        "regenerate": {"max_new_tokens": 24, "unit_rows": 8, "engine": engine},
        "extract": {"unit_rows": 8, "engine": engine},
        "vocab": {"draft_vocab_size": 128},
        "train": {"total_seq_len": 512},
    }
    for name, section in sections.items():
        config[name] = {**config.get(name, {}), **section}
    path.write_text(yaml.safe_dump(config))
    return path


def stage_run(stage: str, config: RunConfig | Path, store: Store, *, index: int = 0) -> StageRun:
    """What a stage's story is given, its inputs gated."""
    found = stage_named(stage)
    config = load_config(config) if isinstance(config, Path) else config
    inputs = gate_inputs(config, store, found)
    return StageRun(stage=found, config=config, store=store, inputs=inputs, index=index)


def artifact_at(store: Store, kind: str) -> Artifact:
    """A committed artefact of the run."""
    found = artifacts.find(store.child(kind))
    assert found is not None, f"no {kind} artefact in {store.url}"
    return found


def done_in(store: Store, stage: str) -> Store:
    """The prefix of what has been done under a stage's claim: its units' records, for one."""
    return Work(store, stage).own


def rows_of(artifact: Artifact) -> list[TokenRow]:
    """Every token row of a committed artefact, in the manifest's order."""
    paths = [entry.path for entry in artifact.manifest.files if entry.samples]
    return [row for path in paths for row in read_rows(artifact.store, path)]


def content_of(store: Store, kind: str) -> dict[str, Any]:
    """What must be equal between two runs that did the same: digest, rows, counts, every byte.

    Objects that hold seconds are left out of it, as the digest leaves them out.
    """
    artifact = artifact_at(store, kind)
    manifest = artifact.manifest
    on_disk = {entry.path: store.child(kind).sha256(entry.path) for entry in manifest.files}
    assert on_disk == {entry.path: entry.sha256 for entry in manifest.files}
    objects = {info.path for info in store.child(kind).list()}
    assert objects == {*on_disk, "data_config.json"}, "an object that no manifest names"
    return {
        "digest": artifact.digest,
        "objects": {entry.path: entry.sha256 for entry in manifest.files if not entry.timed},
        "rows": [row.row for row in rows_of(artifact)],
        "counts": (manifest.rows_in, manifest.rows_kept, manifest.rejected, manifest.total_tokens),
    }


def start_fake_capture(model: Path, plan: extract.Plan, scratch: Path | None = None) -> Capture:
    """The shipped fake on the verifier's own norm and lm_head, so that the gate passes."""
    verifier = open_verifier(VerifierConfig(source=str(model)))
    tensors = verifier.three_tensors()
    return FakeCapture(
        layer_ids=plan.layer_ids,
        norm_weight=tensors.norm,
        lm_head=tensors.lm_head,
        eps=float(verifier.text_config["rms_norm_eps"]),
    )


def start_fake_generator(model: Path, plan: regenerate.Plan) -> Generator:
    """The shipped fake over the ids of the tiny tokenizers, ending at `<|im_end|>`."""
    return FakeGenerator(vocab_size=400, end_id=2)
