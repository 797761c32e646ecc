"""train, with upstream's real trainer: what it is fed, what it leaves, how it stops and goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load, load_file, save, save_file
from speculators.losses.eager import kl_div_loss
from speculators.train import cli
from speculators.train.config import TrainConfig as UpstreamConfig
from speculators.train.trainer import Trainer
from torch.distributed.elastic.multiprocessing.api import PContext

from eagle3.config import RunConfig
from eagle3.draft.checkpoints import MARKER_NAME, Checkpoints
from eagle3.draft.launch import launch
from eagle3.draft.metrics import CurvePoint, decode_curve
from eagle3.draft.recipe import plan_steps
from eagle3.draft.rows import index_rows, split_rows
from eagle3.draft.seams import upstream_seams
from eagle3.draft.training import Ranks, lay_out
from eagle3.errors import (
    ConfigError,
    DraftInvalid,
    EnvironmentMisconfigured,
    IdentityConflict,
    ManifestInvalid,
    MappingInvalid,
    Stopped,
)
from eagle3.shards import read_sample
from eagle3.store import Store
from eagle3.verifier import load_verifier_artifact
from eagle3.vocab import load_mapping
from eagle3.work import Work
from jobs import train
from jobs.process import records_of_ranks
from tests.tiny_run import done_in
from tests.tiny_verifiers import make_llama
from tests.trainable import (
    artifact_at,
    config_of,
    copy_of,
    make_run,
    recommit,
    rewrite,
    stage_run,
)

pytestmark = pytest.mark.engine

CONFIG = config_of()
# Its first checkpoint comes long before its end, so that a signal then finds it at work.
LONG = {"epochs": 3, "checkpoints_per_epoch": 2}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A run with everything that train reads."""
    folder = tmp_path_factory.mktemp("ready")
    verifier = make_llama(folder / "verifier", dtype="bfloat16")
    return make_run(f"file://{folder}/run", verifier, num_rows=12)


@pytest.fixture(scope="module")
def trained(ready: Store, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The same run, trained without any disturbance."""
    store = copy_of(ready, tmp_path_factory.mktemp("trained"))
    train.story(stage_run("train", store, CONFIG))
    return store


def curve_of(store: Store) -> list[CurvePoint]:
    return decode_curve(store.read_bytes("train/metrics.jsonl"))


def steps_of(store: Store) -> list[CurvePoint]:
    return [point for point in curve_of(store) if point.kind == "train"]


def draft_of(store: Store, part: str = "draft") -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load(store.read_bytes(f"train/{part}/model.safetensors"))
    return tensors


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


def upstream_alone(store: Store, scratch: Path, **changes: Any) -> Path:
    """Upstream's own trainer and file backend on the same rows: where it saved its checkpoints."""
    states, verifier_artifact = artifact_at(store, "extract"), artifact_at(store, "verifier")
    scratch.mkdir()
    verifier = load_verifier_artifact(verifier_artifact, scratch)
    mapping = load_mapping(
        artifact_at(store, "vocab"), vocab_size=512, required_ids=verifier.required_ids
    )
    alone = Ranks()
    layout = lay_out(CONFIG.train, states, mapping, verifier, scratch, alone)
    folder = layout.paths.dataset / "hidden_states"
    folder.mkdir()
    for number, ref in enumerate(index_rows(states).refs):
        sample = read_sample(states.store, ref)
        tensors = {"hidden_states": sample.hidden_states, "token_ids": sample.input_ids}
        save_file(tensors, folder / f"hs_{number}.safetensors")
    section = CONFIG.train
    values = {
        "verifier_name_or_path": str(layout.paths.verifier),
        "draft_config": str(layout.paths.layer_config),
        "d2t_path": str(layout.paths.d2t),
        "t2d_path": str(layout.paths.t2d),
        "draft_vocab_size": 128,
        "target_layer_ids": [2, 4, 5],
        "mask_token_id": 0,
        "draft_attn_impl": "sdpa",
        "loss_implementation": "eager",
        "data_path": str(layout.paths.dataset),
        "hidden_states_backend": "file",
        "on_missing": "raise",
        "total_seq_len": section.total_seq_len,
        "train_data_ratio": split_rows(12, section.validation_share).ratio,
        "hidden_states_dtype": section.dtype,
        "num_workers": 0,
        "epochs": section.epochs,
        "optimizer": section.optimizer,
        "lr": section.learning_rate,
        "scheduler_type": section.scheduler,
        "scheduler_total_steps": layout.plan.total,
        "scheduler_warmup_ratio": section.warmup_share,
        "seed": section.seed,
        "save_path": str(layout.paths.checkpoints),
        **changes,
    }
    config = UpstreamConfig.from_sources(
        cli=values, argv=["speculators"], backend_cli={"hidden_states_path": None}
    )

    class OnCpus(Trainer):  # type: ignore[misc]
        def setup_trainer(self) -> None:
            self.device_type = "cpu"
            super().setup_trainer()

    with upstream_seams(OnCpus):
        cli.main(config)
    return layout.paths.checkpoints


class TestUndisturbed:
    def test_the_artefact_holds_drafts_and_curve(self, trained: Store) -> None:
        manifest = artifact_at(trained, "train").manifest
        assert [entry.path for entry in manifest.files] == [
            "draft/config.json",
            "draft/model.safetensors",
            "untrained/config.json",
            "untrained/model.safetensors",
            "metrics.jsonl",
        ]
        steps = steps_of(trained)
        assert [point.step for point in steps] == list(range(1, manifest.facts["steps"] + 1))
        assert [p.epoch for p in curve_of(trained) if p.kind == "validation"] == [0, 1]
        assert all(len(p.accuracy) == 3 == len(p.losses) for p in curve_of(trained))
        assert manifest.facts["aux_layer_ids"] == [2, 4, 5]
        assert manifest.rows_in == manifest.rows_kept == 12
        facts = manifest.facts
        assert 0 < facts["out_of_vocabulary_tokens"] < facts["supervised_tokens"]

    def test_status_finds_the_progress_object(self, trained: Store) -> None:
        record = json.loads(trained.read_bytes("progress/train-0.json"))
        total = artifact_at(trained, "train").manifest.facts["steps"]
        assert (record["done"], record["all"], record["unit"]) == (total, total, "steps")

    def test_upstream_alone_trains_the_same_weights(self, trained: Store, tmp_path: Path) -> None:
        saved = upstream_alone(trained, tmp_path / "alone")
        assert_same(load_file(saved / "1" / "model.safetensors"), draft_of(trained))

    def test_untrained_is_upstreams_state_before_the_first_step(
        self, trained: Store, tmp_path: Path
    ) -> None:
        saved = upstream_alone(
            trained, tmp_path / "dry", dry_run=True, hidden_states_dtype="bfloat16"
        )
        assert_same(load_file(saved / "model.safetensors"), draft_of(trained, "untrained"))
        assert not torch.equal(
            draft_of(trained)["fc.weight"], draft_of(trained, "untrained")["fc.weight"]
        )

    def test_again_does_nothing(self, trained: Store) -> None:
        assert "already committed" in train.story(stage_run("train", trained, CONFIG))

    def test_b20_other_settings_are_refused(self, trained: Store) -> None:
        other = stage_run("train", trained, config_of(learning_rate=5e-4))
        with pytest.raises(IdentityConflict, match="learning_rate"):
            train.story(other)

    def test_nothing_stays_on_the_local_disk(
        self, ready: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scratch = tmp_path / "scratch"
        scratch.mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(scratch))
        store = copy_of(ready, tmp_path)
        train.story(stage_run("train", store, config_of(epochs=1, max_steps=2)))
        assert len(steps_of(store)) == 2
        assert list(scratch.iterdir()) == []


class TestResume:
    def test_killed_between_the_last_checkpoint_and_the_manifest(
        self, trained: Store, tmp_path: Path
    ) -> None:
        store = copy_of(trained, tmp_path)
        for name in ("data_config.json", "metrics.jsonl", "untrained/config.json"):
            store.delete(f"train/{name}")
        train.story(stage_run("train", store, CONFIG))
        assert_same(draft_of(store), draft_of(trained))
        assert [p.loss for p in steps_of(store)] == [p.loss for p in steps_of(trained)]

    def test_b58_goes_on_from_the_newest_whole_checkpoint(
        self, trained: Store, tmp_path: Path
    ) -> None:
        store = copy_of(trained, tmp_path)
        for info in store.list("train"):
            store.delete(info.path)
        newest = Checkpoints(done_in(store, "train")).newest()
        assert newest is not None
        done_in(store, "train").delete(f"{newest.prefix}/{MARKER_NAME}")
        train.story(stage_run("train", store, CONFIG))
        wanted, found = steps_of(trained), steps_of(store)
        assert [p.step for p in found] == [p.step for p in wanted]
        assert [p.learning_rate for p in found] == [p.learning_rate for p in wanted]
        # Upstream keeps weights and moments in bfloat16: alike, not equal.
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine.loss == pytest.approx(theirs.loss, rel=0.02)

    def test_checkpoints_of_other_settings_are_never_gone_on_from(
        self, trained: Store, tmp_path: Path
    ) -> None:
        """As where a trainer wakes that was taken for dead: its work was deleted, the prefix begun
        anew, and it saves all the same."""
        store = copy_of(trained, tmp_path)
        stale = done_in(store, "train")
        for info in store.list("train"):
            store.delete(info.path)
        store.delete("work/train/claim.json")
        other = stage_run("train", store, config_of(learning_rate=5e-4))
        other.claim(settings={"world_size": 1})
        assert Checkpoints(stale).newest() is not None
        assert Checkpoints(other.work.own).newest() is None

    def test_stopped_in_the_middle_of_an_epoch(
        self, ready: Store, trained: Store, tmp_path: Path
    ) -> None:
        store = copy_of(ready, tmp_path)
        stopping = stage_run("train", store, CONFIG)
        steps_per_epoch = len([p for p in steps_of(trained) if p.epoch == 0])
        with pytest.MonkeyPatch.context() as patch:
            votes = iter([False] * (steps_per_epoch + 1) + [True])
            patch.setattr(type(stopping), "stopping", property(lambda _: next(votes)))
            with pytest.raises(Stopped):
                train.story(stopping)
        newest = Checkpoints(done_in(store, "train")).newest()
        assert newest is not None
        assert newest.state is not None
        assert newest.state.epoch == 1
        assert newest.state.global_step == steps_per_epoch + newest.state.local_step
        train.story(stage_run("train", store, CONFIG))
        wanted, found = steps_of(trained), steps_of(store)
        assert [(p.step, p.epoch) for p in found] == [(p.step, p.epoch) for p in wanted]
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine.loss == pytest.approx(theirs.loss, rel=0.02)


def start(store: Store, folder: Path, **settings: Any) -> tuple[subprocess.Popen[str], RunConfig]:
    """`python -m jobs.train` on a run, as a container starts it."""
    config = config_of(**settings)
    path = folder / "run.yaml"
    path.write_text(json.dumps(msgspec.to_builtins(config)))
    child = subprocess.Popen(
        [sys.executable, "-m", "jobs.train", "--config", str(path), "--store", store.url],
        env={**os.environ, "OMP_NUM_THREADS": "1", "EAGLE3_TERMINATION_LOG": str(folder / "last")},
        stderr=subprocess.PIPE,
        text=True,
    )
    return child, config


def wait_for(condition: Callable[[], bool], child: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert child.poll() is None, child.communicate()[1]
        assert time.monotonic() < deadline, "the training did not get so far"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(900)
class TestSignals:
    def test_b57_sigterm_saves_and_exits_143(self, ready: Store, tmp_path: Path) -> None:
        store = copy_of(ready, tmp_path)
        child, config = start(store, tmp_path, num_workers=1, **LONG)
        wait_for(lambda: bool(Work(store, "train").identity), child)
        checkpoints = Checkpoints(done_in(store, "train"))
        wait_for(lambda: checkpoints.newest() is not None, child)
        child.send_signal(signal.SIGTERM)
        _, errors = child.communicate(timeout=600)
        assert child.returncode == 143, errors
        assert "run it again to continue" in errors
        assert errors.count("train: starting the trainer\n") == 1
        assert json.loads((tmp_path / "last").read_text())["exit_code"] == 143
        newest = checkpoints.newest()
        assert newest is not None
        assert newest.state is not None
        stopped_at = newest.state.global_step
        # The number of loader processes is no part of the training's identity.
        here = msgspec.structs.replace(config.train, num_workers=0)
        config = msgspec.structs.replace(config, train=here)
        message = train.story(stage_run("train", store, config))
        found = steps_of(store)
        assert stopped_at < len(found) == artifact_at(store, "train").manifest.facts["steps"]
        assert f"trained {len(found)} steps" in message


class TestSeveralProcesses:
    @pytest.mark.parametrize(
        ("codes", "wanted"), [((0, 0), 0), ((0, 65), 65), ((143, 143), 143), ((-9, 0), 75)]
    )
    def test_b92_the_exit_code_of_a_process_is_kept(
        self, codes: tuple[int, int], wanted: int
    ) -> None:
        script = (
            f"import os, sys; code = {codes}[int(os.environ['RANK'])]\n"
            "os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)"
        )
        assert launch(2, ["-c", script]) == wanted

    @pytest.mark.parametrize(
        ("first", "code", "kept"),
        [("sys.exit(65)", 65, "rank 1"), ("os.kill(os.getpid(), 9)", 75, "")],
    )
    def test_the_last_words_are_those_of_the_process_that_failed_first(
        self, tmp_path: Path, first: str, code: int, kept: str
    ) -> None:
        """The other one fails a moment later of its being away, and has its own words."""
        leave = "open(f'{folder}/{rank}.json', 'w').write(f'\"rank {rank}\"')"
        script = (
            "import os, sys, time; rank = int(os.environ['RANK'])\n"
            "folder = os.environ['EAGLE3_RANK_RECORDS']\n"
            f"here = {str(tmp_path)!r}\n"
            "while rank == 0 and not os.path.exists(here + '/went'): time.sleep(0.001)\n"
            f"if rank == 0 or {bool(kept)}: {leave}\n"
            "open(here + '/went', 'w').close()\n"
            f"sys.exit(1) if rank == 0 else {first}"
        )
        assert self.launched(tmp_path, script) == (code, f'"{kept}"' if kept else "")

    @pytest.mark.parametrize("code", [65, 75])
    @pytest.mark.parametrize("end", ["signal.SIG_IGN", "lambda *_: os.abort()"])
    def test_what_the_launcher_ends_itself_is_not_the_cause(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, end: str
    ) -> None:
        """The others wait in a collective for the one that failed: killed, or aborted by NCCL."""
        # Half a minute otherwise.
        monkeypatch.setattr(PContext.close, "__defaults__", (None, 3))
        script = (
            "import os, resource, signal, sys, time; rank = int(os.environ['RANK'])\n"
            f"here = {str(tmp_path)!r}\n"
            "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
            f"if rank == 0: signal.signal(signal.SIGTERM, {end})\n"
            "if rank == 0: open(here + '/waits', 'w').close(); time.sleep(60)\n"
            "while not os.path.exists(here + '/waits'): time.sleep(0.001)\n"
            "open(f\"{os.environ['EAGLE3_RANK_RECORDS']}/1.json\", 'w').write('\"rank 1\"')\n"
            f"sys.exit({code})"
        )
        assert self.launched(tmp_path, script) == (code, '"rank 1"')

    def launched(self, folder: Path, script: str) -> tuple[int, str]:
        """How two processes ended, and the last words that are kept."""
        records, log = folder / "records", folder / "last-words"
        records.mkdir()
        log.touch()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EAGLE3_TERMINATION_LOG", str(log))
            with records_of_ranks(records):
                code = launch(2, ["-c", script], records)
        return code, log.read_text()

    def test_a_drained_process_has_as_long_as_the_launcher_is_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "570")
        seen: list[Any] = []
        monkeypatch.setattr(
            "eagle3.draft.launch.elastic_launch",
            lambda config, *_: seen.append(config) or (lambda *_: None),
        )
        assert launch(2, []) == 0
        assert seen[0].shutdown_timeout == 570

    @pytest.mark.slow
    @pytest.mark.timeout(900)
    def test_two_processes_share_the_steps(self, ready: Store, tmp_path: Path) -> None:
        store = copy_of(ready, tmp_path)
        config = config_of(processes=2, epochs=1)
        message = train.story(stage_run("train", store, config))
        facts = artifact_at(store, "train").manifest.facts
        lengths = [ref.num_tokens for ref in index_rows(artifact_at(store, "extract")).refs]
        plan = plan_steps(lengths, config.train, num_train=facts["train_rows"], world_size=2)
        assert facts["steps"] == plan.total == len(steps_of(store))
        assert message == f"trained {plan.total} steps with 2 processes"
        assert facts["world_size"] == 2
        alone = stage_run("train", store, config_of(epochs=1))
        with pytest.raises(IdentityConflict, match="world_size"):
            train.story(alone)


class TestRefusals:
    def story(self, store: Store, **settings: Any) -> str:
        return train.story(stage_run("train", store, config_of(**settings)))

    def test_b67_a_loss_that_is_not_finite_stops_before_a_checkpoint(
        self, ready: Store, tmp_path: Path
    ) -> None:
        store = copy_of(ready, tmp_path)
        with pytest.raises(DraftInvalid, match="a finite number"):
            self.story(store, learning_rate=1e30, warmup_share=0.0)
        assert Checkpoints(done_in(store, "train")).newest() is None

    @pytest.mark.parametrize(
        "fault",
        [
            {"layer_ids": (2, 4, 5, 7)},
            {"layer_ids": (2, 4, 8), "num_layers_captured": 3},
            {"layer_ids": (4, 2, 5, 8)},
            {"final_hidden_state": "post_norm"},
        ],
        ids=["b21-last-one-early", "two-auxiliary", "not-ascending", "b22-post-norm"],
    )
    def test_states_of_another_convention(
        self, ready: Store, tmp_path: Path, fault: dict[str, Any]
    ) -> None:
        store = copy_of(ready, tmp_path)
        recommit(store, "extract", **fault)
        with pytest.raises(ManifestInvalid, match=r"layer_ids|final_hidden_state"):
            self.story(store)

    def test_rows_longer_than_a_step(self, ready: Store, tmp_path: Path) -> None:
        store = copy_of(ready, tmp_path)
        # Smaller than the rows themselves, though not than prepare.max_seq_len says they are.
        config = config_of()
        small = msgspec.structs.replace(config.train, total_seq_len=40)
        run = stage_run("train", store, msgspec.structs.replace(config, train=small))
        with pytest.raises(ConfigError, match="cut without a word"):
            train.story(run)

    def test_b46_a_mapping_in_another_convention(self, ready: Store, tmp_path: Path) -> None:
        store = copy_of(ready, tmp_path)
        mapping = load(store.read_bytes("vocab/mapping.safetensors"))
        mapping["d2t"] += torch.arange(128)
        rewrite(store, "vocab", "mapping.safetensors", save(mapping))
        with pytest.raises(MappingInvalid, match="d2t"):
            self.story(store)

    def test_b118_another_runs_mapping_of_the_same_size(self, ready: Store, tmp_path: Path) -> None:
        store = copy_of(ready, tmp_path)
        recommit(store, "vocab", facts={"mapping_sha256": "0" * 64})
        with pytest.raises(MappingInvalid, match="of its manifest"):
            self.story(store)

    @pytest.mark.parametrize("unset", ["RANK", "LOCAL_RANK", "WORLD_SIZE"])
    def test_b87_a_rank_that_is_not_told(self, unset: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            monkeypatch.setenv(name, "0")
        monkeypatch.delenv(unset)
        with pytest.raises(EnvironmentMisconfigured, match="torchrun"):
            Ranks.from_environment()


class TestUpstreamsArithmetic:
    """Faults that older versions of upstream had; the pinned one must stay free of them."""

    def test_b56_the_loss_of_bfloat16_logits_is_computed_in_float32(self) -> None:
        generator = torch.Generator().manual_seed(0)
        targets = (5 * torch.randn(1, 64, 200, generator=generator)).to(torch.bfloat16)
        logits = targets + 0.05 * torch.randn(1, 64, 200, generator=generator).to(torch.bfloat16)
        found = kl_div_loss(logits, targets)
        exact = kl_div_loss(logits.double(), targets.double())
        assert found.dtype == torch.float32
        np.testing.assert_allclose(found, exact, rtol=1e-3, atol=1e-6)
