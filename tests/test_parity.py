"""B55: vLLM drafts, token for token, what upstream's training forward predicts for the same states.

A position that is not advanced, a mask that is shifted, a norm at another place: none of them
shows in a loss, and each makes a draft that was trained for one computation run another. The
verifier's states come from transformers, the draft is an exported one, fitted for a moment to the
verifier's own answer so that some of what it proposes is accepted and some is not.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from transformers import AutoModelForCausalLM, PreTrainedModel

from eagle3.capture import Sampling
from eagle3.vllm_capture import EngineOptions, VllmGenerator
from jobs import export, train
from tests.tiny_verifiers import make_llama
from tests.trainable import artifact_at, config_of, make_run, stage_run, tiny_mapping

pytestmark = pytest.mark.engine

K = 3
PROMPT = [5, 77, 301, 12, 450, 9, 260]
NUM_TOKENS = 40
FITTING_STEPS = 40
STYLES = {"llama": {}, "qwen3": {"geometry": {"style": "qwen3"}, "norm_output": False}}


@dataclass(frozen=True)
class Fitted:
    """A served draft, the same in upstream's class, and what it drafts for."""

    folder: Path
    model: Eagle3DraftModel
    verifier: Path
    reference: PreTrainedModel
    aux_layer_ids: tuple[int, ...]

    @torch.no_grad()
    def states(self, ids: Sequence[int]) -> torch.Tensor:
        """What enters the auxiliary layers, side by side: [1, T, 3 H]."""
        found = self.reference(torch.tensor([ids]), output_hidden_states=True).hidden_states
        return torch.cat([found[layer] for layer in self.aux_layer_ids], dim=-1)

    @torch.no_grad()
    def draft(self, ids: Sequence[int], count: int) -> list[int]:
        """What the training forward drafts behind `ids`, whose last token has no state yet.

        At training-time-test step k it is given the tokens that were drafted so far, as the
        teacher's, and predicts the next one from the state of the last token but one.
        """
        states, at, whole = self.states(ids)[:, :-1], len(ids) - 2, list(ids)
        d2t = self.model.d2t
        assert d2t is not None
        for step in range(count):
            # Beyond the known states nothing is looked at: attention is causal.
            padded = torch.nn.functional.pad(states, (0, 0, 0, len(whole) - len(ids)))
            shifted = torch.tensor([whole[1:]])
            documents = torch.zeros_like(shifted)
            drafted = self.model(padded, shifted, documents, ttt_steps=step + 1)
            token = int(drafted[step][0, at])
            whole.append(token + int(d2t[token]))
        return whole[len(ids) :]


def verifier_within(folder: Path) -> Path:
    """A verifier whose greedy answers stay inside the draft vocabulary."""
    make_llama(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][~tiny_mapping(512).t2d] = 0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def fit(model: Eagle3DraftModel, states: torch.Tensor, last: torch.Tensor, ids: Any) -> None:
    """A few steps of upstream's own loss on one sequence."""
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(weights, lr=2e-3)
    shifted = torch.tensor([ids[1:]])
    for _ in range(FITTING_STEPS):
        _, loss, _ = model(
            states[:, :-1],
            shifted,
            torch.zeros_like(shifted),
            loss_mask=torch.ones_like(shifted, dtype=torch.bool),
            verifier_last_hidden_states=last[:, 1:],
            ttt_steps=K,
            loss_config=resolve_loss_config("kl_div", "eager"),
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.fixture(scope="module", params=STYLES)
def fitted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    """An exported draft in each style, fitted and written back."""
    folder = tmp_path_factory.mktemp(request.param)
    verifier = verifier_within(folder / "verifier")
    store = make_run(f"file://{folder}/run", verifier, num_rows=4)
    config = config_of(epochs=1, max_steps=1, **STYLES[request.param])
    train.story(stage_run("train", store, config))
    export.story(stage_run("export", store, config))
    exported = store.child("export").local_path()
    assert exported is not None
    served = folder / "served"
    shutil.copytree(exported, served)
    reference = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32).eval()
    draft = Fitted(
        folder=served,
        model=loaded(served, verifier),
        verifier=verifier,
        reference=reference,
        aux_layer_ids=tuple(artifact_at(store, "train").manifest.facts["aux_layer_ids"]),
    )
    with torch.no_grad():
        ids = reference.generate(
            torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None
        )[0].tolist()
        # Before the last norm, as vLLM hands it over.
        inner = reference.model
        inner.norm, norm = torch.nn.Identity(), inner.norm
        last = inner(torch.tensor([ids])).last_hidden_state
        inner.norm = norm
    fit(draft.model, draft.states(ids), last, ids)
    kept = load_file(served / "model.safetensors")
    tensors = draft.model.state_dict()
    save_file({name: tensors[name].contiguous() for name in kept}, served / "model.safetensors")
    config_path = served / "config.json"
    record = json.loads(config_path.read_text())
    record["dtype"] = "float32"
    config_path.write_text(json.dumps(record))
    return draft


def loaded(folder: Path, verifier: Path) -> Eagle3DraftModel:
    """An exported draft in upstream's class, in float32, with what its loss needs."""
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = Eagle3DraftModel(config).float().eval()
    tensors = load_file(folder / "model.safetensors")
    own = load_file(verifier / "model.safetensors")
    tensors["verifier_norm.weight"] = own["model.norm.weight"]
    tensors["verifier_lm_head.weight"] = own["lm_head.weight"][tensors["t2d"]]
    model.load_state_dict(tensors)
    return model


@pytest.fixture(scope="module", params=[1, K])
def generator(request: pytest.FixtureRequest, fitted: Fitted) -> Iterator[VllmGenerator]:
    """vLLM with the draft, which proposes one token a step, or several."""
    options = EngineOptions(
        model=fitted.verifier,
        max_model_len=128,
        dtype="float32",
        max_num_seqs=1,
        num_threads=1,
        separate_process=False,
    )
    running = VllmGenerator(options, draft=fitted.folder, num_speculative_tokens=request.param)
    yield running
    running.close()


def test_b55_serving_drafts_what_training_predicts(
    fitted: Fitted, generator: VllmGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = generator._engine.llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    proposals: list[list[int]] = []
    propose = runner.propose_draft_token_ids

    def noted(*arguments: Any, **named: Any) -> Any:
        found = propose(*arguments, **named)
        proposals.append([int(token) for token in found[0]])
        return found

    monkeypatch.setattr(runner, "propose_draft_token_ids", noted)
    sampling = Sampling(max_tokens=NUM_TOKENS, ignore_end=True)
    (answer,) = generator.generate([PROMPT], sampling)
    whole, known, accepted = [*PROMPT, *answer.token_ids], len(PROMPT) + 1, []
    for proposal in proposals:
        assert proposal == fitted.draft(whole[:known], len(proposal)), f"behind token {known}"
        pairs = zip(proposal, whole[known:], strict=False)
        accepted.append(next((at for at, (x, y) in enumerate(pairs) if x != y), len(proposal)))
        known += accepted[-1] + 1
        if known >= len(whole):
            break
    # Neither all nor nothing: positions behind accepted and behind refused tokens were compared.
    assert 0 < sum(accepted) < len(accepted) * len(proposals[0])
