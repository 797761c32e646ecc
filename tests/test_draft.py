"""The draft's parts one by one: what upstream is given, what it says, and what is stored of it.

Protects the silent faults of training: names of upstream that are gone, a shape or a rotation that
nobody asked for, rows of another shape or order, a mask over tokens that the draft cannot say, a
field that never arrived, numbers that no sound training has, a checkpoint that is not whole.
"""

import ast
import json
import pickle
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from speculators.losses import resolve_loss_config
from speculators.models.eagle3.metrics import compute_metrics
from speculators.train.data import ArrowDataset
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

import eagle3.draft
from eagle3.config import GeometryConfig
from eagle3.draft.backend import BACKEND, StoreTransfer
from eagle3.draft.checkpoints import MARKER_NAME, Checkpoints, Marker
from eagle3.draft.geometry import check_rope, layer_config, rope_table
from eagle3.draft.metrics import decode_curve, encode_curve, read_record
from eagle3.draft.recipe import Paths, plan_steps, upstream_config
from eagle3.draft.rows import (
    check_rows,
    index_rows,
    save_dataset,
    split_rows,
    within_vocabulary,
)
from eagle3.errors import (
    ConfigError,
    DraftInvalid,
    EnvironmentMisconfigured,
    IdentityConflict,
    ManifestInvalid,
    ShardInvalid,
    VerifierInvalid,
)
from eagle3.shards import ShardReader, encode_samples, read_sample
from eagle3.store import Store, open_store
from eagle3.verifier.families import resolve_text_config
from tests.tiny_verifiers import make_kimi, make_llama, make_qwen3
from tests.trainable import (
    artifact_at,
    config_of,
    copy_of,
    make_run,
    recommit,
    rewrite_shard,
)

UPSTREAM = ("speculators", "hs_connectors", "datasets")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("draft")
    return make_run(f"file://{folder}/run", make_llama(folder / "verifier", dtype="bfloat16"))


def text_config(make: Any, folder: Path) -> dict[str, Any]:
    make(folder)
    return resolve_text_config(json.loads((folder / "config.json").read_text()), "config.json")


class TestUpstreamNames:
    """A rename upstream fails here, with the name, and not in the middle of a training."""

    listed = re.findall(
        r"^    ((?:hs_connectors|datasets|speculators)\.[\w.]+)", eagle3.draft.__doc__, re.M
    )

    @pytest.mark.parametrize("name", listed)
    def test_exists(self, name: str) -> None:
        parts = name.split(".")
        for cut in range(len(parts) - 1, 0, -1):
            try:
                found: Any = import_module(".".join(parts[:cut]))
            except ModuleNotFoundError:
                continue
            for part in parts[cut:]:
                found = getattr(found, part)
            return
        pytest.fail(f"{name} cannot be imported")

    def test_every_import_is_listed(self) -> None:
        for path in Path(eagle3.draft.__file__).parent.glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module:
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                elif isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                else:
                    continue
                for name in names:
                    if name.split(".")[0] in UPSTREAM:
                        known = any(item.startswith(name) for item in self.listed)
                        assert known, (
                            f"{path.name} uses {name}: list it in eagle3/draft/__init__.py"
                        )


YARN = {"factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0}


class TestGeometry:
    def test_a_plain_verifiers_own_shape_is_taken(self, tmp_path: Path) -> None:
        layer = layer_config(GeometryConfig(), text_config(make_llama, tmp_path))
        assert layer["head_dim"] == 32
        assert layer["num_attention_heads"] == 2
        assert layer["vocab_size"] == 512
        assert "sliding_window" not in layer

    def test_a_qwen3_style_draft_has_no_window(self, tmp_path: Path) -> None:
        layer = layer_config(GeometryConfig(style="qwen3"), text_config(make_qwen3, tmp_path))
        assert layer["use_sliding_window"] is False
        assert layer["sliding_window"] is None

    def test_nothing_is_derived_from_latent_attention(self, tmp_path: Path) -> None:
        text = text_config(make_kimi, tmp_path)
        with pytest.raises(ConfigError, match=r"state .*head_dim, rope"):
            layer_config(GeometryConfig(), text)
        with pytest.raises(ConfigError, match="state rope"):
            layer_config(
                GeometryConfig(
                    intermediate_size=128,
                    num_attention_heads=2,
                    num_key_value_heads=2,
                    head_dim=32,
                ),
                text,
            )

    def test_another_epsilon_than_the_verifiers_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="rms_norm_eps"):
            layer_config(GeometryConfig(rms_norm_eps=1e-6), text_config(make_llama, tmp_path))

    @pytest.mark.parametrize(
        "schema",
        [
            {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", **YARN}},
            {"rope_theta": 5e4, "rope_scaling": {"rope_type": "yarn", **YARN}},
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, **YARN}},
        ],
        ids=["type", "rope_type", "rope_parameters"],
    )
    def test_b54_yarn_survives_in_every_schema(
        self, tmp_path: Path, schema: dict[str, Any]
    ) -> None:
        text = text_config(make_llama, tmp_path)
        text.pop("rope_parameters", None)
        text |= {**schema, "max_position_embeddings": 262144}
        layer = layer_config(GeometryConfig(), text)
        reloaded = json.loads(json.dumps(layer))
        frequencies, factor = rope_table(reloaded)
        # YaRN by its paper: the slowest frequency is interpolated by the whole factor, the
        # fastest not at all, and attention is scaled by 0.1 ln(factor) + 1.
        plain = 5e4 ** (-torch.arange(0, 32, 2) / 32)
        assert frequencies[0] == plain[0]
        torch.testing.assert_close(frequencies[-1], plain[-1] / 64)
        assert factor == pytest.approx(0.1 * np.log(64) + 1)
        assert "type" not in layer["rope_parameters"]

    def test_b54_a_lost_rope_is_found_by_number(self, tmp_path: Path) -> None:
        text = text_config(make_llama, tmp_path)
        layer = layer_config(GeometryConfig(), text)
        layer["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
        with pytest.raises(DraftInvalid, match="other frequencies"):
            check_rope(layer, text)

    def test_a_rope_that_serving_computes_otherwise_is_refused(self, tmp_path: Path) -> None:
        text = text_config(make_llama, tmp_path)
        text["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
        with pytest.raises(VerifierInvalid, match="rope_type among"):
            layer_config(GeometryConfig(), text)


class TestRows:
    def test_a_row_longer_than_a_step_is_refused(self, run: Store) -> None:
        index = index_rows(artifact_at(run, "extract"))
        longest = max(ref.num_tokens for ref in index.refs)
        check_rows(index, layers=4, hidden_size=64, total_seq_len=longest)
        with pytest.raises(ConfigError, match="total_seq_len"):
            check_rows(index, layers=4, hidden_size=64, total_seq_len=longest - 1)

    def test_b98_states_of_another_shape_are_refused(self, run: Store) -> None:
        index = index_rows(artifact_at(run, "extract"))
        with pytest.raises(ManifestInvalid, match="hidden states"):
            check_rows(index, layers=4, hidden_size=32, total_seq_len=96)

    def test_a_shard_with_other_rows_than_its_manifest_is_refused(
        self, run: Store, tmp_path: Path
    ) -> None:
        store = copy_of(run, tmp_path)
        manifest = artifact_at(store, "extract").manifest
        swapped = tuple(
            msgspec.structs.replace(entry, samples=other.samples, tokens=other.tokens)
            for entry, other in zip(manifest.files, reversed(manifest.files), strict=True)
        )
        assert swapped != manifest.files
        recommit(store, "extract", files=swapped)
        with pytest.raises(ManifestInvalid, match="samples of"):
            index_rows(artifact_at(store, "extract"))

    @pytest.mark.fault("B116")
    def test_a_shard_in_another_ones_place_is_refused(self, run: Store, tmp_path: Path) -> None:
        """As many rows and tokens, each row whole by its own checksum: only the header tells."""
        store = copy_of(run, tmp_path)
        states = artifact_at(store, "extract")
        path = states.manifest.files[0].path
        refs = ShardReader(states.store, path).refs()
        samples = [read_sample(states.store, ref) for ref in refs]
        other = [replace(sample, row=f"x{sample.row[1:]}") for sample in samples]
        states.store.write_bytes(path, encode_samples(other))
        with pytest.raises(ShardInvalid, match="another shard"):
            index_rows(artifact_at(store, "extract"))

    def test_a_shard_of_other_settings_is_refused(self, run: Store, tmp_path: Path) -> None:
        """Whole, of the right rows and shapes, and named by the manifest."""
        store = copy_of(run, tmp_path)
        states = artifact_at(store, "extract")
        path = states.manifest.files[0].path
        samples = [read_sample(states.store, ref) for ref in ShardReader(states.store, path).refs()]
        rewrite_shard(store, path, samples, identity="0" * 64)
        with pytest.raises(IdentityConflict, match="found one of 0000"):
            index_rows(artifact_at(store, "extract"))

    @pytest.mark.parametrize("num_rows", [2, 3, 7, 24, 1000, 99_991])
    @pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 1.0])
    def test_the_split_is_the_one_upstream_makes(self, num_rows: int, share: float) -> None:
        split = split_rows(num_rows, share)
        assert int(num_rows * split.ratio) == split.num_train
        assert split.num_train + split.num_validation == num_rows
        assert split.num_train >= 1
        assert split.num_validation >= 1

    def test_b60_every_process_has_rows_of_both_parts(self) -> None:
        assert split_rows(20, 0.01, world_size=8).num_validation == 8
        assert split_rows(20, 0.99, world_size=8).num_train == 8
        with pytest.raises(ConfigError, match="at least 16"):
            split_rows(15, 0.1, world_size=8)

    def test_ids_that_the_verifier_lacks_are_refused(self, run: Store, tmp_path: Path) -> None:
        index = index_rows(artifact_at(run, "extract"))
        with pytest.raises(ManifestInvalid, match="token ids below 100"):
            save_dataset(index, tmp_path, t2d=torch.ones(100, dtype=torch.bool))


class TestVocabulary:
    """B47: what follows outside the draft vocabulary is no target."""

    t2d = torch.arange(10) < 5

    def test_b47_positions_before_a_token_outside_are_masked(self) -> None:
        ids = torch.tensor([1, 7, 2, 9, 8, 3, 9])
        mask = torch.tensor([0, 1, 1, 1, 1, 1, 1])
        # 7 precedes 2, 2 precedes 9, 9 precedes 8, 8 precedes 3, 3 precedes 9; the last is kept.
        assert within_vocabulary(ids, mask, self.t2d).tolist() == [0, 1, 0, 0, 1, 0, 1]

    def loss(
        self, logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor, step: int = 0
    ) -> torch.Tensor:
        """Upstream's loss of one training-time-test step."""
        config = resolve_loss_config("kl_div", "eager")
        found: torch.Tensor
        found, _ = compute_metrics(logits, targets, mask, mask.bool(), step, 1.0, config)
        return found

    @pytest.mark.parametrize("step", [0, 1, 2])
    def test_b47_upstreams_mask_belongs_to_the_target_at_every_step(self, step: int) -> None:
        generator = torch.Generator().manual_seed(0)
        logits, targets = torch.randn(2, 1, 6, 5, generator=generator)
        changed = targets.clone()
        changed[0, 4] += torch.randn(5, generator=generator)
        everything, masked = torch.ones(1, 6), torch.ones(1, 6)
        masked[0, 4] = 0
        assert self.loss(logits, targets, masked, step) == self.loss(logits, changed, masked, step)
        assert self.loss(logits, targets, everything, step) != self.loss(
            logits, changed, everything, step
        )

    def test_b47_a_step_that_is_masked_whole_teaches_nothing(self) -> None:
        logits = torch.randn(1, 6, 5, requires_grad=True)
        loss = self.loss(logits, torch.randn(1, 6, 5), torch.zeros(1, 6))
        loss.backward()
        assert loss == 0
        assert logits.grad is not None
        assert not logits.grad.any()

    def test_b47_the_rows_are_masked_and_what_is_left_out_is_counted(
        self, run: Store, tmp_path: Path
    ) -> None:
        index = index_rows(artifact_at(run, "extract"))
        t2d = torch.arange(512) < 128
        found = save_dataset(index, tmp_path, t2d=t2d)
        saved = ArrowDataset(96, tmp_path, StoreTransfer(index)).data
        kept = 0
        for number, ref in enumerate(index.refs):
            sample = read_sample(index.open(), ref)
            wanted = within_vocabulary(sample.input_ids, sample.loss_mask, t2d)
            assert torch.equal(saved[number]["loss_mask"], wanted)
            kept += int(wanted.sum())
        assert 0 < kept == found.supervised - found.out_of_vocabulary < found.supervised

    def test_b47_rows_without_anything_to_learn_are_refused(
        self, run: Store, tmp_path: Path
    ) -> None:
        store = copy_of(run, tmp_path)
        index = index_rows(artifact_at(store, "extract"))
        for path in {ref.path for ref in index.refs}:
            samples = [read_sample(index.open(), ref) for ref in index.refs if ref.path == path]
            for sample in samples:
                sample.loss_mask[-1] = 0
            rewrite_shard(store, path, samples)
        index = index_rows(artifact_at(store, "extract"))
        with pytest.raises(ManifestInvalid, match="that the draft vocabulary holds"):
            save_dataset(index, tmp_path / "rows", t2d=torch.zeros(512, dtype=torch.bool))


class TestBackend:
    def test_bit_equal_to_upstreams_file_backend(self, run: Store, tmp_path: Path) -> None:
        index = index_rows(artifact_at(run, "extract"))
        save_dataset(index, tmp_path, t2d=torch.ones(512, dtype=torch.bool))
        (tmp_path / "hidden_states").mkdir()
        for number, ref in enumerate(index.refs):
            sample = read_sample(index.open(), ref)
            save_file(
                {"hidden_states": sample.hidden_states, "token_ids": sample.input_ids},
                tmp_path / "hidden_states" / f"hs_{number}.safetensors",
            )
        common = {"max_len": 96, "datapath": tmp_path, "on_missing": "raise", "split": "val"}
        common["train_ratio"] = split_rows(len(index.refs), 0.3).ratio
        theirs = ArrowDataset(**common)
        ours = ArrowDataset(**common, transfer=pickle.loads(pickle.dumps(StoreTransfer(index))))
        assert len(ours) == 7
        for number in range(len(ours)):
            wanted, found = theirs[number], ours[number]
            assert wanted.keys() == found.keys()
            for key in wanted:
                assert torch.equal(wanted[key], found[key]), key

    @pytest.mark.fault("B100")
    def test_a_missing_row_raises(self, run: Store, tmp_path: Path) -> None:
        store = copy_of(run, tmp_path)
        transfer = StoreTransfer(index_rows(artifact_at(store, "extract")))
        store.child("extract").delete("hidden-000001.safetensors")
        transfer.get_cached(0)
        with pytest.raises(FileNotFoundError):
            transfer.get_cached(20)

    def test_b26_a_state_that_is_not_finite_raises(self, run: Store, tmp_path: Path) -> None:
        store = copy_of(run, tmp_path)
        index = index_rows(artifact_at(store, "extract"))
        path = index.refs[0].path
        samples = [read_sample(index.open(), ref) for ref in index.refs if ref.path == path]
        samples[3].hidden_states[1, 2, 3] = torch.nan
        # Written so: length and checksums are right, only the number is not.
        rewrite_shard(store, path, samples)
        transfer = StoreTransfer(index_rows(artifact_at(store, "extract")))
        transfer.get_cached(2)
        with pytest.raises(ShardInvalid, match="NaN or infinity"):
            transfer.get_cached(3)


class TestRecipe:
    @pytest.mark.fault("B100")
    def test_every_field_arrives(self, tmp_path: Path) -> None:
        config = config_of(optimizer="adamw", scheduler="linear", ttt_steps=4).train
        split = split_rows(24, 0.1)
        plan = plan_steps([40] * 24, config, num_train=split.num_train, world_size=1)
        facts = {"target_layer_ids": [2, 4, 5], "draft_vocab_size": 128}
        flat = upstream_config(config, Paths.below(tmp_path), plan, split, facts).flatten()
        assert flat["optimizer"] == "adamw"
        assert flat["ttt_steps"] == 4
        assert flat["hidden_states_backend"] == BACKEND
        assert flat["target_layer_ids"] == [2, 4, 5]
        assert flat["on_missing"] == "raise"

    def test_a_field_that_upstream_does_not_know_is_an_error(self, tmp_path: Path) -> None:
        config = config_of().train
        split = split_rows(24, 0.1)
        plan = plan_steps([40] * 24, config, num_train=split.num_train, world_size=1)
        with pytest.raises(EnvironmentMisconfigured, match="draft_vocabulary_size"):
            upstream_config(
                config, Paths.below(tmp_path), plan, split, {"draft_vocabulary_size": 128}
            )

    def test_the_plan_counts_what_upstreams_sampler_yields(self) -> None:
        lengths = torch.randint(8, 90, (61,), generator=torch.Generator().manual_seed(0)).tolist()
        config = config_of(epochs=5).train
        plan = plan_steps(lengths, config, num_train=60, world_size=2)
        sampler = MultipackDistributedBatchSamplerV2(96, lengths[:60], 2, 1, seed=config.seed)
        counts = []
        for epoch in range(5):
            sampler.set_epoch(epoch)
            counts.append(len(list(sampler)))
        assert plan.steps_per_epoch == tuple(counts)

    def test_max_steps_ends_inside_an_epoch_without_touching_the_next(self) -> None:
        config = config_of(epochs=9, max_steps=15).train
        plan = plan_steps([90] * 10, config, num_train=10, world_size=1)
        assert plan.steps_per_epoch == (10, 5)

    def test_b60_too_few_rows_for_all_processes_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="each of 8 processes"):
            plan_steps([90] * 4, config_of().train, num_train=4, world_size=8)


GOOD: dict[str, Any] = {
    "train": {
        "loss": 3.0,
        "loss_0": 1.0,
        "loss_1": 2.0,
        "full_acc_0": 0.5,
        "full_acc_1": 0.25,
        "cond_acc_0": 0.5,
        "cond_acc_1": 0.5,
        "error_records": 0.0,
    },
    "epoch": 1,
    "lr": {"Muon": 0.001, "AdamW": 0.001},
    "global_step": 6,
}


class TestMetrics:
    def broken(self, **values: float) -> dict[str, Any]:
        return {**GOOD, "train": {**GOOD["train"], **values}}

    def test_a_record_becomes_a_point(self) -> None:
        point = read_record(GOOD, step=6, seconds=2.0)
        assert point is not None
        assert (point.step, point.losses, point.accuracy) == (7, (1.0, 2.0), (0.5, 0.25))
        assert decode_curve(encode_curve([point])) == [point]

    def test_a_validation_takes_the_step_it_is_told(self) -> None:
        record = {"val": {f"{k}_epoch": v for k, v in GOOD["train"].items()}, "epoch": 0}
        point = read_record(record, step=9, seconds=2.0)
        assert point is not None
        assert (point.kind, point.step, point.loss) == ("validation", 9, 3.0)

    def test_the_configuration_is_no_point(self) -> None:
        assert read_record({"seed": 1}, step=0, seconds=0.0) is None

    @pytest.mark.parametrize("name", ["loss", "loss_1"])
    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_b67_a_loss_that_is_not_finite_stops(self, name: str, value: float) -> None:
        with pytest.raises(DraftInvalid, match="a finite number"):
            read_record(self.broken(**{name: value}), step=6, seconds=0.0)

    @pytest.mark.parametrize("name", ["full_acc_0", "cond_acc_1"])
    @pytest.mark.parametrize("value", [1.42, -0.1, float("nan")])
    def test_b64_an_accuracy_above_one_stops(self, name: str, value: float) -> None:
        with pytest.raises(DraftInvalid, match="between 0 and 1"):
            read_record(self.broken(**{name: value}), step=6, seconds=0.0)

    def test_b60_a_validation_of_nothing_stops(self) -> None:
        with pytest.raises(DraftInvalid, match="a loss"):
            read_record({"val": {}, "epoch": 0}, step=4, seconds=0.0)

    def test_a_sample_left_out_stops(self) -> None:
        with pytest.raises(ShardInvalid, match="left out by the loader"):
            read_record(self.broken(error_records=1.0), step=6, seconds=0.0)


class TestCheckpoints:
    @pytest.fixture
    def work(self, tmp_path: Path) -> Store:
        return open_store(f"file://{tmp_path}/work")

    def saved(self, folder: Path, step: int, *, value: float = 1.0) -> Path:
        """What upstream leaves in a checkpoint's folder."""
        folder.mkdir(parents=True)
        save_file({"fc.weight": torch.full((2, 2), value)}, folder / "model.safetensors")
        verifier = {"name_or_path": str(folder), "architectures": []}
        config = {"speculators_config": {"verifier": verifier}}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "optimizer_state_dict.pt").write_bytes(b"moments")
        (folder / "scheduler_state_dict.pt").write_bytes(b"rates")
        state = {"epoch": int(folder.name), "local_step": 0, "global_step": step}
        (folder / "training_state.json").write_text(json.dumps(state))
        return folder

    def object_of(self, marker: Marker, name: str) -> str:
        return next(marker.path_of(entry) for entry in marker.files if entry.path == name)

    def test_b58_the_newest_whole_one_wins(self, work: Store, tmp_path: Path) -> None:
        checkpoints = Checkpoints(work)
        checkpoints.save(self.saved(tmp_path / "0", 9), curve=b"")
        newest = checkpoints.save(self.saved(tmp_path / "1", 10), curve=b"")
        # A process that was killed while it uploaded: objects, but no marker.
        work.write_bytes("checkpoints/00000011/0123456789abcdef-model.safetensors", b"half")
        assert checkpoints.newest() == newest
        work.delete(f"{newest.prefix}/{MARKER_NAME}")
        older = checkpoints.newest()
        assert older is not None
        assert older.prefix == "checkpoints/00000009"

    @pytest.mark.parametrize("name", ["optimizer_state_dict.pt", "scheduler_state_dict.pt"])
    def test_b58_one_that_cannot_be_continued_is_not_whole(
        self, work: Store, tmp_path: Path, name: str
    ) -> None:
        checkpoints = Checkpoints(work)
        older = checkpoints.save(self.saved(tmp_path / "0", 9), curve=b"")
        lame = self.saved(tmp_path / "1", 10)
        (lame / name).unlink()
        with pytest.raises(DraftInvalid, match=name):
            checkpoints.save(lame, curve=b"")
        assert checkpoints.newest() == older
        whole = checkpoints.save(self.saved(tmp_path / "2", 11), curve=b"")
        work.delete(self.object_of(whole, name))
        assert checkpoints.newest() == older

    def test_without_a_schedule_there_is_no_state_of_one(self, work: Store, tmp_path: Path) -> None:
        folder = self.saved(tmp_path / "0", 9)
        (folder / "scheduler_state_dict.pt").unlink()
        saved = Checkpoints(work, scheduled=False).save(folder, curve=b"")
        assert Checkpoints(work, scheduled=False).newest() == saved

    def test_killed_while_one_is_saved_again_the_first_still_stands(
        self, work: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checkpoints = Checkpoints(work)
        first = checkpoints.save(self.saved(tmp_path / "a" / "0", 9), curve=b"first")
        again = self.saved(tmp_path / "b" / "0", 9, value=2.0)
        with monkeypatch.context() as patch:
            # Everything is uploaded anew, the marker is not.
            patch.setattr(work, "write_bytes", None)
            with pytest.raises(TypeError):
                checkpoints.save(again, curve=b"second")
        assert checkpoints.newest() == first
        assert checkpoints.fetch(first, tmp_path / "fetched")
        second = checkpoints.save(again, curve=b"second")
        assert checkpoints.newest() == second
        paths = {f"{second.prefix}/{MARKER_NAME}", *map(second.path_of, second.files)}
        assert {info.path for info in work.list()} == paths, "and nothing of the first is left"

    def test_the_last_two_are_kept(self, work: Store, tmp_path: Path) -> None:
        checkpoints = Checkpoints(work)
        checkpoints.save_untrained(self.saved(tmp_path / "0" / "0", 0))
        for step in (3, 6, 9, 12):
            checkpoints.save(self.saved(tmp_path / str(step) / "0", step), curve=b"")
        left = {info.path.rpartition("/")[0] for info in work.list()}
        assert left == {"untrained", "checkpoints/00000009", "checkpoints/00000012"}

    def test_a_later_validation_joins_the_curve(self, work: Store, tmp_path: Path) -> None:
        checkpoints = Checkpoints(work)
        saved = checkpoints.save(self.saved(tmp_path / "0", 9), curve=b"steps")
        checkpoints.with_curve(saved, b"steps and validation")
        newest = checkpoints.newest()
        assert newest is not None
        folder = checkpoints.fetch(newest, tmp_path / "fetched")
        assert (folder / "metrics.jsonl").read_bytes() == b"steps and validation"
        assert len(work.list(newest.prefix)) == len(newest.files) + 1

    def test_where_the_verifier_lay_is_forgotten(self, work: Store, tmp_path: Path) -> None:
        checkpoints = Checkpoints(work)
        found = [
            checkpoints.save(self.saved(tmp_path / part / "0", 9), curve=b"")
            for part in ("one", "two")
        ]
        assert found[0].files == found[1].files
        config = json.loads(work.read_bytes(self.object_of(found[1], "config.json")))
        assert config["speculators_config"]["verifier"]["name_or_path"] is None

    def test_an_altered_object_is_refused(self, work: Store, tmp_path: Path) -> None:
        checkpoints = Checkpoints(work)
        marker = checkpoints.save(self.saved(tmp_path / "0", 5), curve=b"")
        work.write_bytes(self.object_of(marker, "optimizer_state_dict.pt"), b"mOments")
        with pytest.raises(DraftInvalid, match="sha256"):
            checkpoints.fetch(marker, tmp_path / "fetched")

    def test_weights_that_are_not_finite_are_never_stored(
        self, work: Store, tmp_path: Path
    ) -> None:
        folder = self.saved(tmp_path / "0", 5, value=float("nan"))
        with pytest.raises(DraftInvalid, match=r"fc\.weight: wanted finite"):
            Checkpoints(work).save(folder, curve=b"")
        assert work.list() == []

    def test_the_untrained_draft_is_stored_once(self, work: Store, tmp_path: Path) -> None:
        checkpoints = Checkpoints(work)
        first = checkpoints.save_untrained(self.saved(tmp_path / "0", 0))
        assert checkpoints.save_untrained(self.saved(tmp_path / "1", 0, value=2.0)) == first
