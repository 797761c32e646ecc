"""A run that is ready to train: tiny verifier, random hidden states, a mapping, all committed.

The states are random numbers, so nothing can be learnt from them; what they are good for is that
every row differs, so that a row out of place or altered on its way shows in the weights.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from eagle3 import artifact as artifacts
from eagle3.artifact import Artifact
from eagle3.config import RunConfig, VerifierConfig, parse_config
from eagle3.manifest import FileEntry, InputRef, Manifest, totals
from eagle3.shards import Sample, encode_samples, header_sha256_of
from eagle3.stages import stage_named
from eagle3.store import Store, open_store, sha256_of_file
from eagle3.upstream import cross_check, gate
from eagle3.verifier import open_verifier
from eagle3.vocab import MAPPING_NAME, Mapping, build_mapping, encode, mapping_sha256
from jobs.process import StageRun

DRAFT_VOCAB_SIZE = 128
TOTAL_SEQ_LEN = 96


def make_run(url: str, verifier_folder: Path, *, num_rows: int = 24, seed: int = 0) -> Store:
    """Commit `verifier/`, `extract/` and `vocab/` below a URL and return the run's store."""
    store = open_store(url)
    _commit_verifier(store.child("verifier"), verifier_folder)
    _commit_states(store.child("extract"), store, num_rows, seed)
    _commit_vocab(store.child("vocab"), store)
    return store


def copy_of(run: Store, folder: Path) -> Store:
    """A run's copy, to do harm to."""
    source = run.local_path()
    assert source is not None
    shutil.copytree(source, folder / "run")
    return open_store(f"file://{folder}/run")


def config_of(**train: Any) -> RunConfig:
    """A run's configuration for a training that takes a second."""
    quick = {
        "total_seq_len": TOTAL_SEQ_LEN,
        "epochs": 2,
        "learning_rate": 1e-3,
        "validation_share": 0.1,
        "dtype": "float32",
        "seed": 7,
    }
    return parse_config(
        {
            "verifier": {"source": "unused", "serving_name": "org/verifier"},
            "prepare": {"data": ["unused"], "max_seq_len": 64},
            "train": {**quick, **train},
        }
    )


def stage_run(stage: str, store: Store, config: RunConfig) -> StageRun:
    """What a stage's story is given, its inputs taken from the run's own prefixes."""
    found = stage_named(stage)
    inputs = {name: gate(store.child(kinds[0]).url, kinds) for name, kinds in found.reads.items()}
    cross_check(inputs)
    return StageRun(stage=found, config=config, store=store, inputs=inputs)


def artifact_at(store: Store, kind: str) -> Artifact:
    """A committed artefact of the run."""
    found = artifacts.find(store.child(kind))
    assert found is not None
    return found


def recommit(store: Store, kind: str, **changes: Any) -> None:
    """Replace an artefact's manifest by one with other fields, as a faulty writer would have it."""
    record = artifact_at(store, kind).manifest
    child = store.child(kind)
    child.delete("data_config.json")
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    artifacts.commit(child, Manifest(**{**fields, **changes}))


def rewrite_shard(
    store: Store, path: str, samples: Sequence[Sample], *, identity: str = ""
) -> None:
    """Replace a shard of the states and all that the manifest says of it: a sound artefact, with
    whatever is in the samples."""
    data = encode_samples(samples, identity=identity)
    rewrite(store, "extract", path, data, header_sha256=header_sha256_of(data))


def rewrite(store: Store, kind: str, path: str, data: bytes, **said: str) -> None:
    """Replace an object and what the manifest says of its bytes, so that only its content can be
    wrong."""
    store.write_bytes(f"{kind}/{path}", data)
    said |= {"sha256": hashlib.sha256(data).hexdigest()}
    files = tuple(
        msgspec.structs.replace(entry, bytes=len(data), **said) if entry.path == path else entry
        for entry in artifact_at(store, kind).manifest.files
    )
    recommit(store, kind, files=files)


def _commit_verifier(store: Store, folder: Path) -> None:
    verifier = open_verifier(VerifierConfig(source=str(folder)))
    with tempfile.TemporaryDirectory() as saved:
        files = []
        for name in verifier.save_artifact_files(Path(saved)):
            path = Path(saved) / name
            store.create_file(path, name)
            files.append(
                FileEntry(path=name, bytes=path.stat().st_size, sha256=sha256_of_file(path))
            )
    manifest = Manifest(
        artifact="verifier",
        identity="v",
        files=tuple(files),
        verifier=verifier.facts(),
        tokenizer=verifier.tokenizer_facts(),
    )
    artifacts.commit(store, manifest)


def _commit_states(store: Store, run: Store, num_rows: int, seed: int) -> None:
    verifier = artifact_at(run, "verifier").manifest
    assert verifier.verifier is not None
    facts = verifier.verifier
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for row in range(num_rows):
        length = int(torch.randint(8, 64, (1,), generator=generator))
        mask = torch.ones(length, dtype=torch.int64)
        mask[:3] = 0
        states = torch.randn(length, 4, facts.hidden_size, generator=generator)
        samples.append(
            Sample(
                row=f"row-{row:04d}",
                input_ids=torch.randint(0, facts.vocab_size, (length,), generator=generator),
                loss_mask=mask,
                hidden_states=states.to(torch.bfloat16),
            )
        )
    files = []
    half = num_rows // 2
    for number, part in enumerate((samples[:half], samples[half:])):
        data, path = encode_samples(part), f"hidden-{number:06d}.safetensors"
        store.create_bytes(path, data)
        files.append(
            FileEntry(
                path=path,
                bytes=len(data),
                sha256=hashlib.sha256(data).hexdigest(),
                samples=len(part),
                tokens=sum(len(sample.input_ids) for sample in part),
                header_sha256=header_sha256_of(data),
            )
        )
    num_samples, num_tokens = totals(files)
    n = facts.num_hidden_layers
    manifest = Manifest(
        artifact="extract",
        identity="e",
        files=tuple(files),
        inputs={"verifier": _ref(run, "verifier")},
        verifier=facts,
        tokenizer=verifier.tokenizer,
        rows_in=num_samples,
        rows_kept=num_samples,
        total_samples=num_samples,
        total_tokens=num_tokens,
        layer_ids=(2, n // 2, n - 3, n),
        hidden_size=facts.hidden_size,
        num_layers_captured=4,
        layer_id_convention="input_of_layer",
        final_hidden_state="pre_norm",
        dtype="bfloat16",
    )
    artifacts.commit(store, manifest)


def tiny_mapping(vocab_size: int) -> Mapping:
    """The mapping of every run of `make_run` on a verifier of that size."""
    generator = torch.Generator().manual_seed(1)
    counts = torch.randint(1, 1000, (vocab_size,), generator=generator)
    return build_mapping(counts, DRAFT_VOCAB_SIZE, (0, 1, 2))


def _commit_vocab(store: Store, run: Store) -> None:
    verifier = artifact_at(run, "verifier").manifest
    assert verifier.verifier is not None
    mapping = tiny_mapping(verifier.verifier.vocab_size)
    data = encode(mapping, required_ids=(0, 1, 2))
    store.create_bytes(MAPPING_NAME, data)
    entry = FileEntry(path=MAPPING_NAME, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    manifest = Manifest(
        artifact="vocab",
        identity="m",
        files=(entry,),
        inputs={"verifier": _ref(run, "verifier")},
        verifier=verifier.verifier,
        tokenizer=verifier.tokenizer,
        facts={"mapping_sha256": mapping_sha256(mapping)},
    )
    artifacts.commit(store, manifest)


def _ref(run: Store, kind: str) -> InputRef:
    return artifact_at(run, kind).ref()
