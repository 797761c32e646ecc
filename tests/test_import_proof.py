"""`eagle3 import`: the states must be the verifier's, and the last before its final norm."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from eagle3 import artifact as artifacts
from eagle3.capture import Head
from eagle3.config import RunConfig, parse_config
from eagle3.errors import CaptureInvalid
from eagle3.legacy import OldFolder, prove_states
from eagle3.legacy.proof import LEAST_IDS, TRAINED_DIRECTION, direction, tells
from eagle3.store import Store, open_store
from jobs.importing import take_in
from tests.old_folder import OLD_LAYER_IDS, read_rows, write_folder
from tests.tiny_verifiers import make_llama

VOCAB = 512


def trained(folder: Path) -> Path:
    """The verifier with one direction added to every row of its lm_head, as training leaves it.

    It adds the same to all logits, so that no answer is another.
    """
    tensors = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(7)
    head = tensors["lm_head.weight"]
    head += 0.2 * torch.randn(1, head.shape[1], generator=draw).to(head.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def states_of(model: LlamaForCausalLM, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs of the old folder's layers [B, T, L, H], logits [B, T, V])."""
    kept: dict[int, torch.Tensor] = {}

    def keep(at: int) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            kept[at] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [model.model.layers[at].register_forward_hook(keep(at)) for at in OLD_LAYER_IDS]
    with torch.no_grad():
        logits = model(ids).logits
    for handle in handles:
        handle.remove()
    return torch.stack([kept[at] for at in OLD_LAYER_IDS], dim=2), logits


def extracted(verifier: Path, folder: Path, *, answered: bool = True) -> Path:
    """Samples as an older tool left them: in turns a random id, and the verifier's own answer.

    Without answers, random ids stand in their place, of which nobody can tell anything.
    """
    model = LlamaForCausalLM.from_pretrained(verifier, dtype=torch.float32).eval()
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCAB, (16, 60), generator=draw)
    mask = torch.zeros(60, dtype=torch.int64)
    mask[1::2] = 1
    for at in range(1, 60, 2) if answered else ():
        ids[:, at] = states_of(model, ids[:, :at])[1][:, -1].argmax(dim=-1)
    states = states_of(model, ids)[0].to(torch.bfloat16)
    rows = [
        {
            "input_ids": ids[row].clone(),
            "hidden_states": [layer.contiguous() for layer in states[row].unbind(dim=1)],
            "loss_mask": mask.clone(),
        }
        for row in range(len(ids))
    ]
    write_folder(folder, rows, vocab_size=VOCAB)
    return folder


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(make_llama(tmp_path_factory.mktemp("verifier")))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of equal sizes, and other weights."""
    return trained(make_llama(tmp_path_factory.mktemp("other"), seed=1))


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("untrained"))


@pytest.fixture(scope="module")
def right(verifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extracted(verifier, tmp_path_factory.mktemp("right"))


def config_of(verifier: Path) -> RunConfig:
    return parse_config(
        {
            "verifier": {"source": str(verifier), "serving_name": "tests/tiny"},
            "prepare": {"data": ["imported"], "max_seq_len": 64},
            "regenerate": {"enabled": False},
            "vocab": {"draft_vocab_size": 128},
        }
    )


def imported(folder: Path, verifier: Path, store: Store) -> dict[str, float]:
    """What the states' manifest says was measured, after an import."""
    take_in(str(folder), config_of(verifier), store)
    found = artifacts.find(store.child("extract"))
    assert found is not None
    return found.manifest.measured


def changed(folder: Path, into: Path, change: Callable[[list[torch.Tensor]], Any]) -> Path:
    """The same samples with other states."""
    rows = read_rows(folder)
    for row in rows:
        row["hidden_states"] = change(row["hidden_states"])
    write_folder(into, rows, vocab_size=VOCAB)
    return into


def normed(verifier: Path) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """The last state as it leaves the verifier's final norm."""
    norm = LlamaForCausalLM.from_pretrained(verifier, dtype=torch.bfloat16).model.norm

    def change(layers: list[torch.Tensor]) -> list[torch.Tensor]:
        with torch.no_grad():
            return [*layers[:-1], norm(layers[-1])]

    return change


def test_the_verifier_s_own_states_are_proven_and_the_manifest_says_by_what(
    right, verifier, tmp_path
):
    measured = imported(right, verifier, open_store(f"file://{tmp_path}/run"))
    assert measured["proof"] == 1.0
    assert measured["proof_tells"] > 0.95
    assert measured["proof_other_layer"] < measured["proof_tells"]
    assert measured["proof_ids"] >= LEAST_IDS
    assert measured["proof_positions"] == 16 * 30
    assert measured["proof_direction"] > TRAINED_DIRECTION


def test_states_of_another_verifier_of_equal_sizes_are_refused_before_anything_is_claimed(
    right, verifier, other, tmp_path
):
    store = open_store(f"file://{tmp_path}/run")
    with pytest.raises(
        CaptureInvalid, match="name the verifier that these states are of"
    ) as caught:
        imported(right, other, store)
    assert caught.value.exit_code == 65
    assert "where chance is 0.5" in str(caught.value)
    assert imported(right, verifier, store)["proof"] == 1.0, "the right one is not held up by it"


@pytest.mark.parametrize("answered", [True, False])
def test_a_last_state_after_the_final_norm_is_refused_by_random_weights_too(
    answered, untrained, tmp_path
):
    before = extracted(untrained, tmp_path / "before", answered=answered)
    after = changed(before, tmp_path / "after", normed(untrained))
    imported(before, untrained, open_store(f"file://{tmp_path}/sound"))
    with pytest.raises(CaptureInvalid, match=r"root mean square of (0\.99|1\.00)"):
        imported(after, untrained, open_store(f"file://{tmp_path}/run"))


def test_a_last_state_that_is_not_the_last_layer_s_is_refused(right, verifier, tmp_path):
    order = changed(right, tmp_path / "order", lambda layers: [layers[3], *layers[1:3], layers[0]])
    with pytest.raises(CaptureInvalid, match="which tell best what follows"):
        imported(order, verifier, open_store(f"file://{tmp_path}/run"))


def test_states_of_noise_are_refused(right, verifier, tmp_path):
    noise = changed(
        right, tmp_path / "noise", lambda layers: [torch.randn_like(layer) for layer in layers]
    )
    with pytest.raises(CaptureInvalid, match="what follows"):
        imported(noise, verifier, open_store(f"file://{tmp_path}/run"))


def test_where_nothing_can_be_told_right_states_are_let_through_and_called_unproven(
    untrained, verifier, tmp_path
):
    """Random weights on ids that they did not answer; and a trained verifier on too few ids."""
    random = extracted(untrained, tmp_path / "random", answered=False)
    measured = imported(random, untrained, open_store(f"file://{tmp_path}/run"))
    assert measured["proof"] == 0.0
    assert measured["proof_tells"] == pytest.approx(0.5, abs=0.1)
    assert measured["proof_direction"] < TRAINED_DIRECTION
    rows = read_rows(extracted(verifier, tmp_path / "all", answered=False))[:1]
    write_folder(tmp_path / "few", rows, vocab_size=VOCAB)
    measured = imported(tmp_path / "few", verifier, open_store(f"file://{tmp_path}/run-2"))
    assert measured["proof"] == 0.0
    assert measured["proof_ids"] < LEAST_IDS


def test_what_a_logit_gains_by_the_id_alone_tells_nothing():
    draw = torch.Generator().manual_seed(0)
    ids = torch.arange(0, 80, 2)
    following = ids[torch.randint(0, 40, (400,), generator=draw)]
    states = torch.ones(400, 4) + 0.01 * torch.randn(400, 4, generator=draw)
    favoured = torch.arange(80.0)[:, None].expand(80, 4).contiguous()
    head = Head(norm=torch.ones(4), lm_head=favoured, eps=1e-5)
    assert tells(states, following, ids, head) == pytest.approx(0.5, abs=1e-3)
    known = Head(norm=torch.ones(4), lm_head=torch.randn(80, 4, generator=draw), eps=1e-5)
    assert tells(known.lm_head[following] * 9, following, ids, known) > 0.95


def test_rows_of_random_weights_share_no_direction(untrained, verifier):
    random = load_file(untrained / "model.safetensors")["lm_head.weight"]
    assert direction(random) == pytest.approx(1.0, abs=0.8)
    assert direction(load_file(verifier / "model.safetensors")["lm_head.weight"]) > 100


def test_a_folder_is_looked_at_from_its_beginning_to_its_end(right, verifier, tmp_path):
    rows = read_rows(right)
    write_folder(tmp_path / "long", [rows[at % 16] for at in range(40)], vocab_size=VOCAB)
    old = OldFolder(str(tmp_path / "long"))
    tensors = load_file(verifier / "model.safetensors")
    head = Head(norm=tensors["model.norm.weight"], lm_head=tensors["lm_head.weight"], eps=1e-5)
    assert prove_states(old, head).proven
    read = [source.url.rpartition("_")[2] for source in old.sources if "data_" in source.url]
    numbers = [int(name.removesuffix(".pt")) for name in read if name[0].isdigit()]
    assert (len(numbers), numbers[0]) == (16, 0)
    assert numbers[-1] >= 37
    assert max(b - a for a, b in itertools.pairwise(numbers)) <= 3
