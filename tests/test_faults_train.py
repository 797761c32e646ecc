"""Faults of training that no other file's tests answer for, each by its row of the table."""

from __future__ import annotations

import dataclasses
from importlib import metadata
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.eagle3.metrics import compute_metrics

from eagle3.draft.rows import index_rows
from eagle3.errors import DraftInvalid, ManifestInvalid, ShardInvalid
from eagle3.shards import TokenRow, encode_rows, read_sample
from eagle3.store import Store
from jobs import train
from tests.fault_table import ROOT
from tests.tiny_verifiers import make_llama
from tests.trainable import (
    artifact_at,
    config_of,
    copy_of,
    make_run,
    rewrite_shard,
    stage_run,
)

IDS = [4, 9, 2, 7, 7, 1, 3, 8]


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("ready")
    verifier = make_llama(folder / "verifier", dtype="bfloat16")
    return make_run(f"file://{folder}/run", verifier, num_rows=6)


def test_b55_b56_b62_b70_upstream_is_the_release_whose_arithmetic_was_proven() -> None:
    installed = f"speculators=={metadata.version('speculators')}"
    assert f'"{installed}"' in (ROOT / "pyproject.toml").read_text()
    assert f"\n{installed} " in (ROOT / "requirements.txt").read_text()


def test_b62_a_loss_is_the_mean_of_what_is_supervised() -> None:
    config = resolve_loss_config("kl_div", "eager")
    logits, targets = torch.randn(2, 1, 8, 5, generator=torch.Generator().manual_seed(0))

    def loss(until: int, mask: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor
        found, _ = compute_metrics(
            logits[:, :until], targets[:, :until], mask, mask.bool(), 0, 1.0, config
        )
        return found

    half = torch.tensor([[1.0, 1, 1, 1, 0, 0, 0, 0]])
    torch.testing.assert_close(loss(8, half), loss(4, torch.ones(1, 4)))
    assert loss(8, torch.zeros(1, 8)) == 0


def test_b62_a_row_of_which_nothing_is_supervised_is_never_written_to_train_on() -> None:
    ids = torch.tensor(IDS)
    with pytest.raises(ShardInvalid, match="at least one 1"):
        encode_rows([TokenRow(row="a", input_ids=ids, loss_mask=torch.zeros_like(ids))])


def test_b116_a_row_that_stands_in_two_shards_is_refused(ready: Store, tmp_path: Path) -> None:
    store = copy_of(ready, tmp_path)
    index = index_rows(artifact_at(store, "extract"))
    first, last = index.refs[0], index.refs[-1]
    others = [read_sample(index.open(), ref) for ref in index.refs if ref.path == last.path]
    doubled = [*others[:-1], dataclasses.replace(others[-1], row=first.row)]
    rewrite_shard(store, last.path, doubled)
    with pytest.raises(ManifestInvalid, match="each row once"):
        index_rows(artifact_at(store, "extract"))


@pytest.mark.engine
def test_b68_a_model_that_a_validation_left_in_evaluation_is_not_trained(
    ready: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stays(model: Eagle3DraftModel, mode: bool = True) -> Eagle3DraftModel:
        return model if mode else torch.nn.Module.train(model, mode)

    monkeypatch.setattr(Eagle3DraftModel, "train", stays)
    store = copy_of(ready, tmp_path)
    with pytest.raises(DraftInvalid, match="set to evaluation"):
        train.story(stage_run("train", store, config_of()))
    assert not store.exists("train/data_config.json")


@pytest.mark.engine
def test_b70_later_steps_are_fed_the_tokens_that_they_are_judged_by(
    ready: Store, tmp_path: Path
) -> None:
    store = copy_of(ready, tmp_path)
    train.story(stage_run("train", store, config_of(epochs=1, max_steps=1)))
    folder = tmp_path / "run" / "train" / "untrained"
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = Eagle3DraftModel(config).to(torch.bfloat16).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    fed: list[list[int]] = []
    model.embed_tokens.register_forward_pre_hook(lambda _, given: fed.append(given[0][0].tolist()))
    width = 3 * int(config.transformer_layer_config.hidden_size)
    with torch.no_grad():
        model(
            hidden_states=torch.randn(1, len(IDS), width).to(torch.bfloat16),
            input_ids=torch.tensor([IDS]),
            document_ids=torch.zeros(1, len(IDS), dtype=torch.int64),
            ttt_steps=3,
        )
    assert fed == [IDS, [*IDS[1:], 0], [*IDS[2:], 0, 0]]
