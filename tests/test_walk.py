"""The whole way on tiny verifiers with the real engines.

Most stages' entry points are called in this process, which has torch and vLLM already: importing
them takes most of a stage's time. The last of Qwen3's is a process of its own, started as a
container starts it, `python -m jobs.<stage> --config FILE --store URL`, engines included.
"""

import contextlib
import io
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3.conversations import read_heldout, read_row_records
from eagle3.lineage import walk
from eagle3.shards import Sample, ShardReader
from eagle3.stages import ARTIFACT_KINDS, STAGE_NAMES
from eagle3.store import Store, open_store
from eagle3.verification import artifacts_at
from eagle3.vocab import load_counts
from jobs import extract, gate
from tests.damaged import EVERY_KIND, damage_and_verify
from tests.tiny_run import artifact_at, content_of, rows_of, write_config, write_conversations
from tests.tiny_verifiers import make_kimi, make_qwen3

ROOT = Path(__file__).resolve().parent.parent
STAGE_SECONDS = 900
DAMAGE_SEED = 20261201
# Far more than a quiet machine needs: several engines start.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(3000)]

TRAIN = {
    "total_seq_len": 512,
    "learning_rate": 1e-3,
    "dtype": "float32",
    "validation_share": 0.1,
    "max_steps": 2,
}
GEOMETRY = {
    "style": "llama",
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "rope": {"rope_type": "default", "rope_theta": 10000.0},
}


@dataclass
class Walk:
    """A run on disk, and what each stage said and took."""

    config: Path
    store: Store
    said: dict[str, str] = field(default_factory=dict)
    on_the_way: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def arguments(self) -> list[str]:
        """What every stage's process is given."""
        return ["--config", str(self.config), "--store", self.store.url]

    def go(self, stages: Sequence[str]) -> None:
        """Run the stages in this process; each must end with 0."""
        for stage in stages:
            started, said = time.monotonic(), io.StringIO()
            with contextlib.redirect_stdout(said):
                code = import_module(f"jobs.{stage}").main(self.arguments)
            self._note(stage, said.getvalue(), time.monotonic() - started)
            assert code == 0, f"{stage}: {self.said[stage]}"

    def go_alone(self, stage: str) -> None:
        """Run a stage as a process; it must end with 0."""
        started = time.monotonic()
        ended = subprocess.run(
            [sys.executable, "-m", f"jobs.{stage}", *self.arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=STAGE_SECONDS,
            check=False,
        )
        self._note(stage, ended.stdout, time.monotonic() - started)
        self.on_the_way[stage] = ended.stderr
        assert ended.returncode == 0, f"{stage}: {ended.stderr[-3000:]}"

    def _note(self, stage: str, said: str, seconds: float) -> None:
        self.said[stage], self.seconds[stage] = said, round(seconds, 1)
        print(f"{stage}: {self.seconds[stage]} s")


@pytest.fixture(scope="session")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """Kimi-K2.5's shape through prepare, extract, vocab, two training steps and export."""
    folder = tmp_path_factory.mktemp("kimi")
    config = write_config(
        folder / "run.yaml",
        make_kimi(folder / "verifier"),
        write_conversations(folder / "chats.jsonl", 30),
        regenerate={"enabled": False},
        train={**TRAIN, "geometry": GEOMETRY},
    )
    run = Walk(config, open_store(str(folder / "run")))
    run.go(["prepare", "extract", "vocab", "train", "export"])
    return run


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """Qwen3's shape through all stages, to a measured acceptance length."""
    folder = tmp_path_factory.mktemp("qwen3")
    config = write_config(
        folder / "run.yaml",
        make_qwen3(folder / "verifier"),
        write_conversations(folder / "chats.jsonl", 30),
        regenerate={"max_new_tokens": 16, "max_turns": 2},
        train=TRAIN,
        evaluate={
            "num_prompts": 4,
            "max_new_tokens": 16,
            "concurrency": 4,
            "speed_prompts": 1,
            "lossless_prompts": 4,
            "engine": {"dtype": "float32", "max_num_seqs": 8},
        },
    )
    run = Walk(config, open_store(str(folder / "run")))
    run.go(STAGE_NAMES[:-1])
    run.go_alone(STAGE_NAMES[-1])
    return run


def samples_of(store: Store) -> list[Sample]:
    """Every extracted sample, in order."""
    found = artifact_at(store, "extract")
    readers = [ShardReader(found.store, entry.path) for entry in found.manifest.files]
    return [reader.read(ref, finite=True) for reader in readers for ref in reader.refs()]


class TestKimi:
    def test_states_of_every_prepared_row_are_extracted_at_todays_layers(self, kimi: Walk) -> None:
        manifest = artifact_at(kimi.store, "extract").manifest
        assert manifest.layer_ids == (2, 4, 5, 8)
        assert manifest.verifier is not None
        assert manifest.layer_ids[-1] == manifest.verifier.num_hidden_layers
        assert manifest.measured["gate_mean_nats"] < 1e-3
        assert manifest.measured["gate_nearest_other_layer_nats"] > 0.1
        rows = rows_of(artifact_at(kimi.store, "prepare"))
        samples = samples_of(kimi.store)
        assert [sample.row for sample in samples] == [row.row for row in rows]
        for sample, row in zip(samples, rows, strict=True):
            assert torch.equal(sample.input_ids, row.input_ids)
            assert sample.hidden_states.shape == (len(row.input_ids), 4, 64)

    def test_two_steps_were_trained_on_the_vocabulary_of_the_prepared_rows(
        self, kimi: Walk
    ) -> None:
        assert artifact_at(kimi.store, "train").manifest.facts["steps"] == 2
        counts = load_counts(artifact_at(kimi.store, "prepare"), vocab_size=512)
        supervised = sum(
            int(row.loss_mask.sum()) for row in rows_of(artifact_at(kimi.store, "prepare"))
        )
        assert int(counts.sum()) == supervised
        vocab = artifact_at(kimi.store, "vocab").manifest
        assert vocab.inputs["rows"].digest == artifact_at(kimi.store, "prepare").digest

    def test_the_export_names_three_layers_and_the_draft_that_was_asked_for(
        self, kimi: Walk
    ) -> None:
        folder = kimi.store.child("export").local_path()
        assert folder is not None
        config = json.loads((folder / "config.json").read_text())
        layer = config["transformer_layer_config"]
        assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
        assert (layer["vocab_size"], layer["hidden_size"], layer["head_dim"]) == (512, 64, 32)
        trained = load_file(folder / "model.safetensors")
        untrained = load_file(folder / "untrained" / "model.safetensors")
        assert set(trained) == set(untrained)
        assert any(not torch.equal(trained[name], untrained[name]) for name in trained)

    def test_the_export_leads_back_to_the_conversations(self, kimi: Walk) -> None:
        kinds = [found.manifest.artifact for found in walk([artifact_at(kimi.store, "export")])]
        assert set(kinds) == {"verifier", "prepare", "extract", "vocab", "train", "export"}
        (source,) = artifact_at(kimi.store, "prepare").manifest.sources
        assert source.url.endswith("chats.jsonl")

    def test_a_stage_that_is_run_again_says_that_its_work_is_there(
        self, kimi: Walk, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = content_of(kimi.store, "extract")
        assert extract.main(kimi.arguments) == 0
        assert "already committed" in capsys.readouterr().out
        assert content_of(kimi.store, "extract") == before


class TestQwen3:
    def test_every_training_row_is_the_verifiers_own_answer(self, qwen3: Walk) -> None:
        regenerated = artifact_at(qwen3.store, "regenerate")
        facts = regenerated.manifest.facts
        assert facts["turns"] > 0
        assert facts["supervised_tokens"] <= 16 * facts["turns"]
        extracted = artifact_at(qwen3.store, "extract").manifest
        assert extracted.inputs["rows"].digest == regenerated.digest
        assert [s.row for s in samples_of(qwen3.store)] == [r.row for r in rows_of(regenerated)]

    def test_no_held_out_prompt_was_trained_on(self, qwen3: Walk) -> None:
        prepared = artifact_at(qwen3.store, "prepare")
        lines = [e.path for e in prepared.manifest.files if e.path.startswith("rows-")]
        records = [
            record
            for path in lines
            if path.endswith(".jsonl")
            for record in read_row_records(prepared, path)
        ]
        heldout = {prompt.conversation for prompt in read_heldout(prepared)}
        assert len(heldout) >= 4
        assert heldout.isdisjoint({record.conversation for record in records})

    def test_a_real_engine_measured_acceptance_without_a_changed_output(self, qwen3: Walk) -> None:
        facts = artifact_at(qwen3.store, "evaluate").manifest.facts
        assert 1.0 <= facts["acceptance_length_trained"] <= 4.0
        assert len(facts["acceptance_per_position"]) == 3
        assert facts["heldout_prompts"] == 4
        assert facts["lossless"]
        assert facts["near_tie_divergences"] == 0

    def test_the_report_is_one_file_that_asks_for_nothing_else(self, qwen3: Walk) -> None:
        page = qwen3.store.read_bytes("evaluate/report.html").decode()
        assert "<svg" in page or "data:image" in page
        assert "<script src" not in page
        assert 'rel="stylesheet"' not in page

    def test_every_stage_left_its_progress_and_passes_the_gate_of_the_next(
        self, qwen3: Walk, capsys: pytest.CaptureFixture[str]
    ) -> None:
        reported = {info.path for info in qwen3.store.list("progress")}
        assert reported >= {
            f"progress/{stage}-0.json" for stage in ("prepare", "regenerate", "extract", "train")
        }
        for stage in STAGE_NAMES:
            assert gate.main(["--stage", stage, *qwen3.arguments]) == 0
        assert "gate: evaluate.export" in capsys.readouterr().out

    def test_each_engine_s_start_is_told_once(self, qwen3: Walk) -> None:
        lines = qwen3.on_the_way["evaluate"].splitlines()
        assert [line for line in lines if line.startswith("evaluate: starting vLLM ")] == [
            "evaluate: starting vLLM with the trained draft",
            "evaluate: starting vLLM with the untrained draft",
            "evaluate: starting vLLM without a draft",
        ]

    def test_every_one_of_500_damages_is_found_and_by_the_gate_what_it_claims(
        self, qwen3: Walk, tmp_path: Path
    ) -> None:
        committed = [store.url.rpartition("/")[2] for store in artifacts_at(qwen3.store.url)]
        assert sorted(committed) == sorted(ARTIFACT_KINDS)
        folder = qwen3.store.local_path()
        assert folder is not None
        # In place, so that inputs are read where they were, and put back after each damage.
        done = damage_and_verify(folder, tmp_path, seed=DAMAGE_SEED, times=500)
        print(dict(done))
        assert done.total() - done["gate"] == 500
        assert all(done[kind] >= 50 for kind in EVERY_KIND), done

    def test_each_stage_ends_with_one_line(self, qwen3: Walk) -> None:
        for stage, said in qwen3.said.items():
            last = said.strip().splitlines()[-1]
            assert last.startswith(f"{stage}: "), last
            assert last.endswith(" s"), last
