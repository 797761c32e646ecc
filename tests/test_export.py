"""The exported draft: what vLLM reads of it, for every shape of verifier, and what is refused.

Protects the silent faults of serving: a server loads nearly any folder, runs, and accepts nothing.
Each entry of FAULTS is one way to such a folder, and must be refused by the name of its field.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3.config import RunConfig
from eagle3.draft.export import Wanted, check_export, served_tensors
from eagle3.errors import DraftInvalid, ManifestInvalid
from eagle3.store import Store
from eagle3.verifier import load_verifier_artifact
from eagle3.vocab import load_mapping
from jobs import export, train
from tests.tiny_verifiers import make_kimi, make_llama, make_qwen3
from tests.trainable import artifact_at, config_of, copy_of, make_run, recommit, stage_run

EXPLICIT = {
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope": {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
    },
}
SHAPES: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "llama": (make_llama, {}),
    "llama-two-layers": (make_llama, {"geometry": {"num_layers": 2}, "norm_before_fc": False}),
    "qwen3-tied": (make_qwen3, {"geometry": {"style": "qwen3"}, "norm_output": False}),
    "kimi": (make_kimi, {"geometry": EXPLICIT}),
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Runs:
    """Runs with a draft for each shape of verifier, trained for two steps and exported."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Store] = {}

    def of(self, shape: str) -> Store:
        """The run of a shape, made when it is first asked for."""
        if shape not in self._made:
            make, _ = SHAPES[shape]
            folder = self._folder / shape
            verifier = make(folder / "verifier", dtype="bfloat16")
            store = make_run(f"file://{folder}/run", verifier, num_rows=8)
            train.story(stage_run("train", store, config(shape)))
            export.story(stage_run("export", store, config(shape)))
            self._made[shape] = store
        return self._made[shape]


def config(shape: str) -> RunConfig:
    return config_of(epochs=1, max_steps=2, **SHAPES[shape][1])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("exported"))


@pytest.fixture(scope="module", params=SHAPES)
def shape(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def exported(runs: Runs, shape: str) -> Store:
    """The run of every shape in turn."""
    return runs.of(shape)


@pytest.fixture(scope="module")
def llama(runs: Runs) -> Store:
    """One run, for the faults."""
    return runs.of("llama")


@pytest.fixture(scope="module")
def wanted(llama: Store, tmp_path_factory: pytest.TempPathFactory) -> Wanted:
    """What its draft must be."""
    return wanted_of(llama, tmp_path_factory.mktemp("wanted"))


def folder_of(store: Store) -> Path:
    path = store.child("export").local_path()
    assert path is not None
    return path


def wanted_of(store: Store, scratch: Path) -> Wanted:
    """What the exported draft must be, from the run's artefacts."""
    facts = artifact_at(store, "train").manifest.facts
    verifier = load_verifier_artifact(artifact_at(store, "verifier"), scratch)
    return Wanted(
        layer=facts["layer_config"],
        aux_layer_ids=tuple(facts["aux_layer_ids"]),
        mapping=load_mapping(
            artifact_at(store, "vocab"), vocab_size=512, required_ids=verifier.required_ids
        ),
        tensors=verifier.three_tensors(),
        norm_before_fc=facts["norm_before_fc"],
        norm_output=facts["norm_output"],
        serving_name="org/verifier",
        num_speculative_tokens=3,
    )


class TestEveryShape:
    def test_what_serving_reads(self, exported: Store, tmp_path: Path) -> None:
        config = json.loads((folder_of(exported) / "config.json").read_text())
        layer = config["transformer_layer_config"]
        assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
        assert config["speculators_config"]["verifier"]["name_or_path"] == "org/verifier"
        # B50: two vocabularies, each in its own field.
        assert (layer["vocab_size"], config["draft_vocab_size"]) == (512, 128)
        assert not layer.get("sliding_window")
        assert "auto_map" not in config
        assert layer["head_dim"] == 32

    def test_the_artefact_is_what_its_manifest_says(self, exported: Store) -> None:
        manifest = artifact_at(exported, "export").manifest
        assert [entry.path for entry in manifest.files] == [
            "config.json",
            "model.safetensors",
            "untrained/config.json",
            "untrained/model.safetensors",
        ]
        for entry in manifest.files:
            assert exported.child("export").sha256(entry.path) == entry.sha256

    def test_both_drafts_pass_and_differ(self, exported: Store, tmp_path: Path) -> None:
        wanted = wanted_of(exported, tmp_path)
        folder = folder_of(exported)
        for draft in (folder, folder / "untrained"):
            check_export(draft, wanted)
        trained = load_file(folder / "model.safetensors")
        untrained = load_file(folder / "untrained" / "model.safetensors")
        assert trained.keys() == untrained.keys() == served_tensors(wanted).keys()
        assert not torch.equal(trained["fc.weight"], untrained["fc.weight"])

    def test_again_does_nothing(self, exported: Store, shape: str) -> None:
        again = stage_run("export", exported, config(shape))
        assert "already committed" in export.story(again)


def _config_fault(*path: str, value: Any = None) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        part = config
        for name in path[:-1]:
            part = part[name]
        if value is None:
            del part[path[-1]]
        else:
            part[path[-1]] = value
        (folder / "config.json").write_text(json.dumps(config))

    return spoil


def _tensor_fault(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            folder / "model.safetensors",
        )

    return spoil


LAYER = "transformer_layer_config"
IDS = "eagle_aux_hidden_state_layer_ids"
FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "b73-no-auxiliary-ids": (_config_fault(IDS), IDS),
    "b74-last-layer-among-them": (_config_fault(IDS, value=[2, 4, 5, 8]), IDS),
    "b21-other-ids": (_config_fault(IDS, value=[1, 3, 4]), IDS),
    "b50-draft-size-as-vocabulary": (_config_fault(LAYER, "vocab_size", value=128), "vocab_size"),
    "other-draft-size": (_config_fault("draft_vocab_size", value=512), "draft_vocab_size"),
    "training-path": (
        _config_fault("speculators_config", "verifier", "name_or_path", value="/tmp/verifier"),
        "name_or_path",
    ),
    "b54-lost-rope": (
        _config_fault(LAYER, "rope_parameters", value={"rope_type": "default", "rope_theta": 1e6}),
        "rope_parameters",
    ),
    "derived-head-dim": (_config_fault(LAYER, "head_dim"), "head_dim"),
    "a-kind-of-window": (
        _config_fault(LAYER, "layer_types", value=["sliding_attention"]),
        "layer_types",
    ),
    "a-window": (_config_fault(LAYER, "sliding_window", value=2048), "sliding_window"),
    "code-to-run": (_config_fault("auto_map", value={"": "config.X"}), "auto_map"),
    "norm-flag": (_config_fault("norm_output", value=False), "norm_output"),
    "b72-no-d2t": (_tensor_fault(lambda t: t.pop("d2t")), "d2t"),
    "b72-no-embedding": (_tensor_fault(lambda t: t.pop("embed_tokens.weight")), "embed_tokens"),
    "b72-midlayer": (
        _tensor_fault(
            lambda t: t.update(
                {"midlayer.hidden_norm.weight": t.pop("layers.0.hidden_norm.weight")}
            )
        ),
        "hidden_norm",
    ),
    "b72-another-embedding": (
        _tensor_fault(lambda t: t["embed_tokens.weight"].mul_(1.01)),
        "embed_tokens",
    ),
    "b46-absolute-ids": (_tensor_fault(lambda t: t["d2t"].add_(torch.arange(128))), "d2t"),
    "head-of-other-tokens": (
        _tensor_fault(lambda t: t.update({"lm_head.weight": t["lm_head.weight"].flip(0)})),
        "lm_head",
    ),
    "float16": (
        _tensor_fault(lambda t: t.update({"fc.weight": t["fc.weight"].half()})),
        "fc.weight",
    ),
    "not-finite": (_tensor_fault(lambda t: t["norm.weight"].fill_(torch.inf)), "norm.weight"),
}


class TestLint:
    @pytest.mark.parametrize("fault", FAULTS)
    @pytest.mark.fault("B72", "B73", "B74")
    def test_refuses(self, llama: Store, wanted: Wanted, tmp_path: Path, fault: str) -> None:
        spoil, field = FAULTS[fault]
        folder = tmp_path / "draft"
        shutil.copytree(folder_of(llama), folder)
        spoil(folder)
        with pytest.raises(DraftInvalid, match=field):
            check_export(folder, wanted)

    def test_a_draft_of_another_verifier(self, llama: Store, wanted: Wanted) -> None:
        other = load_file(folder_of(llama) / "model.safetensors")["embed_tokens.weight"].flip(0)
        tensors = type(wanted.tensors)(
            embed=other, norm=wanted.tensors.norm, lm_head=wanted.tensors.lm_head
        )
        with pytest.raises(DraftInvalid, match="values of the verifier"):
            check_export(folder_of(llama), dataclasses.replace(wanted, tensors=tensors))


class TestStory:
    def test_a_mapping_that_the_draft_was_not_trained_with(
        self, llama: Store, tmp_path: Path
    ) -> None:
        store = copy_of(llama, tmp_path)
        facts = artifact_at(store, "train").manifest.facts
        recommit(store, "train", facts={**facts, "mapping_sha256": "0" * 64})
        store.delete("export/data_config.json")
        store.delete("work/export/claim.json")
        with pytest.raises(ManifestInvalid, match="trained with"):
            export.story(stage_run("export", store, config("llama")))

    @pytest.mark.parametrize("name", ["mapping_sha256", "aux_layer_ids", "norm_output"])
    def test_a_training_that_does_not_say_what_it_was(
        self, llama: Store, tmp_path: Path, name: str
    ) -> None:
        store = copy_of(llama, tmp_path)
        facts = dict(artifact_at(store, "train").manifest.facts)
        del facts[name]
        recommit(store, "train", facts=facts)
        for info in [*store.list("export"), *store.list("work/export")]:
            store.delete(info.path)
        with pytest.raises(ManifestInvalid, match=f"facts.{name}"):
            export.story(stage_run("export", store, config("llama")))

    def test_an_altered_draft_is_never_exported(self, llama: Store, tmp_path: Path) -> None:
        store = copy_of(llama, tmp_path)
        path = "train/draft/model.safetensors"
        data = bytearray(store.read_bytes(path))
        data[-1] ^= 1
        store.write_bytes(path, bytes(data))
        store.delete("export/data_config.json")
        with pytest.raises(ManifestInvalid, match="sha256"):
            export.story(stage_run("export", store, config("llama")))
        assert not store.exists("export/data_config.json")
