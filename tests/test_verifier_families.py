"""The key table against what is published, and configs whose logits are not the three tensors'.

The shapes and keys are those of the published checkpoints. Their files here are sparse: headers
of the real shapes, and holes where gigabytes would be, of which nothing may be read.
"""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from eagle3.config import VerifierConfig
from eagle3.errors import VerifierInvalid
from eagle3.store import Store
from eagle3.verifier import Verifier, open_verifier
from eagle3.verifier.families import FAMILIES, resolve_text_config
from tests.tiny_verifiers import make_kimi, make_llama

_WIDTHS = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "I32": 4}
PLAIN = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


@dataclass(frozen=True, kw_only=True)
class Published:
    """A published checkpoint: what config.json says, and what lies where.

    Attributes:
        sizes: rows of lm_head, hidden size, layers.
        keys: embed, norm, lm_head; lm_head is None where it is tied.
        beside: other tensors, which a match by suffix would take for one of the three.
        shards: how many files; of one there is no index.
    """

    model_type: str
    architecture: str
    sizes: tuple[int, int, int]
    keys: tuple[str, str, str | None] = PLAIN
    beside: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    shards: int = 1
    norm_dtype: str = "BF16"
    text_model_type: str | None = None

    @property
    def tied(self) -> bool:
        return self.keys[2] is None

    def config(self) -> dict[str, Any]:
        vocab, hidden, layers = self.sizes
        text = {
            "vocab_size": vocab,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": self.tied,
        }
        whole = {"model_type": self.model_type, "architectures": [self.architecture]}
        if self.text_model_type is None:
            return {**text, **whole}
        inner = {"model_type": self.text_model_type, "architectures": ["DeepseekV3ForCausalLM"]}
        return {**whole, "text_config": {**text, **inner}, "tie_word_embeddings": self.tied}

    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        vocab, hidden, _ = self.sizes
        embed, norm, lm_head = self.keys
        three = {embed: ("BF16", (vocab, hidden)), norm: (self.norm_dtype, (hidden,))}
        if lm_head is not None:
            three[lm_head] = ("BF16", (vocab, hidden))
        return {**self.beside, **three}


def _norms(hidden: int, *keys: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {f"{key}.weight": ("BF16", (hidden,)) for key in keys}


# DeepSeek-V3 has its draft block as one more layer, with an embedding, a norm and a head.
_MTP = {
    "model.layers.61.embed_tokens.weight": ("BF16", (129280, 7168)),
    "model.layers.61.shared_head.head.weight": ("BF16", (129280, 7168)),
    "model.layers.61.self_attn.o_proj.weight": ("F8_E4M3", (7168, 16384)),
    "model.layers.61.self_attn.o_proj.weight_scale_inv": ("F32", (56, 128)),
    **_norms(7168, "model.layers.61.enorm", "model.layers.61.shared_head.norm"),
}
_VISION = {
    "vision_tower.encoder.final_layernorm.weight": ("BF16", (1152,)),
    "mm_projector.pre_norm.weight": ("BF16", (1152,)),
    "language_model.model.layers.1.mlp.experts.0.up_proj.weight_packed": ("I32", (2048, 896)),
    **_norms(7168, "language_model.model.layers.60.input_layernorm"),
}
_LANGUAGE_MODEL = tuple(f"language_model.{key}" for key in PLAIN)
_TIED = (*PLAIN[:2], None)

PUBLISHED = {
    "Llama-3.1-8B-Instruct": Published(
        model_type="llama", architecture="LlamaForCausalLM", sizes=(128256, 4096, 32), shards=4
    ),
    "Llama-3.2-1B-Instruct": Published(
        model_type="llama", architecture="LlamaForCausalLM", sizes=(128256, 2048, 16), keys=_TIED
    ),
    "Qwen2.5-Coder-7B-Instruct": Published(
        model_type="qwen2", architecture="Qwen2ForCausalLM", sizes=(152064, 3584, 28), shards=4
    ),
    "Qwen3-0.6B": Published(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        sizes=(151936, 1024, 28),
        keys=_TIED,
        beside=_norms(128, "model.layers.0.self_attn.q_norm"),
    ),
    "Qwen3-8B": Published(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        sizes=(151936, 4096, 36),
        beside=_norms(128, "model.layers.0.self_attn.q_norm"),
        shards=5,
    ),
    "Qwen3-Coder-30B-A3B-Instruct": Published(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        sizes=(151936, 2048, 48),
        beside=_norms(2048, "model.layers.47.post_attention_layernorm"),
        shards=16,
    ),
    "DeepSeek-V3": Published(
        model_type="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        sizes=(129280, 7168, 61),
        beside=_MTP,
        shards=163,
        norm_dtype="F32",
    ),
    "Kimi-K2-Instruct": Published(
        model_type="kimi_k2",
        architecture="DeepseekV3ForCausalLM",
        sizes=(163840, 7168, 61),
        shards=61,
    ),
    "Kimi-K2.5": Published(
        model_type="kimi_k25",
        architecture="KimiK25ForConditionalGeneration",
        sizes=(163840, 7168, 61),
        keys=_LANGUAGE_MODEL,
        beside=_VISION,
        shards=64,
        text_model_type="kimi_k2",
    ),
}


def write_published(model: Published, folder: Path) -> Path:
    """The checkpoint's config, index and files, with holes for bytes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(model.config()))
    tensors = list(model.tensors().items())
    names = [f"model-{i:05d}-of-{model.shards:06d}.safetensors" for i in range(1, model.shards + 1)]
    if model.shards == 1:
        names = ["model.safetensors"]
    weight_map = {}
    for at, name in enumerate(names):
        held = dict(tensors[at :: len(names)]) or {f"model.layers.{at}.filler": ("F32", (1,))}
        weight_map |= dict.fromkeys(held, name)
        write_sparse(folder / name, held)
    if model.shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_sparse(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """A safetensors file of these types and shapes whose tensors take no room on the disk."""
    header, end = {}, 0
    for key, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * _WIDTHS[dtype]
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + end)


def opened(folder: Path) -> Verifier:
    return open_verifier(VerifierConfig(source=str(folder)))


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


class TestPublished:
    @pytest.mark.parametrize("name", PUBLISHED)
    def test_the_three_are_found_by_their_headers_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        model, read = PUBLISHED[name], []
        whole = Store.read_range

        def counted(self: Store, path: str, start: int, end: int) -> bytes:
            read.append(end - start)
            return whole(self, path, start, end)

        monkeypatch.setattr(Store, "read_range", counted)
        verifier = opened(write_published(model, tmp_path / "model"))
        vocab, hidden, layers = model.sizes
        found = {part: (tensor.key, tensor.shape) for part, tensor in verifier.stored.items()}
        embed, norm, lm_head = model.keys
        wanted = {"embed": (embed, (vocab, hidden)), "norm": (norm, (hidden,))}
        if lm_head is not None:
            wanted["lm_head"] = (lm_head, (vocab, hidden))
        assert found == wanted
        assert verifier.tied == model.tied
        assert verifier.num_hidden_layers == layers
        assert verifier.layer_ids()[-1] == layers
        assert sum(read) < 4096

    def test_every_family_of_the_table_has_a_published_anchor(self) -> None:
        told = {(model.model_type, model.architecture) for model in PUBLISHED.values()}
        assert told == {(one.model_type, name) for one in FAMILIES for name in one.architectures}

    @pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"])
    def test_transformers_spells_and_computes_them_so(self, model_type: str) -> None:
        """A renamed key would be noticed here, and so would a bias or a scaled head."""
        config = AutoConfig.for_model(
            model_type,
            vocab_size=300,
            hidden_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=64,
            moe_intermediate_size=32,
        )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
        outside = {key: shape for key, shape in shapes.items() if ".layers." not in key}
        assert outside == dict(zip(PLAIN, [(300, 64), (64,), (300, 64)], strict=True))
        assert type(model.model.norm).__name__.endswith("RMSNorm")
        assert (model.lm_head.in_features, model.lm_head.bias) == (64, None)

    def test_keys_without_their_prefix_are_refused(self, tmp_path: Path) -> None:
        """As embedding models of known families are published: Qwen3-Embedding-0.6B."""
        keys = ("embed_tokens.weight", "norm.weight", None)
        model = Published(
            model_type="qwen3", architecture="Qwen3ForCausalLM", sizes=(151669, 1024, 28), keys=keys
        )
        with pytest.raises(VerifierInvalid, match=r"found no such key"):
            _ = opened(write_published(model, tmp_path / "model")).stored


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of a plain family and one of a nested one, never written to."""
    folder = tmp_path_factory.mktemp("models")
    return {"llama": make_llama(folder / "llama"), "kimi": make_kimi(folder / "kimi")}


@pytest.fixture
def llama(models: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(models["llama"], tmp_path / "llama"))


@pytest.fixture
def kimi(models: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(models["kimi"], tmp_path / "kimi"))


def refusal(folder: Path) -> str:
    with pytest.raises(VerifierInvalid) as caught:
        _ = opened(folder).stored
    return str(caught.value)


def add_tensor(folder: Path, key: str, value: torch.Tensor) -> None:
    """One more tensor: in a file of its own where there is an index, else in the only file."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        path = folder / "model.safetensors"
        save_file({**load_file(path), key: value}, path)
        return
    held = json.loads(index.read_text())
    held["weight_map"][key] = "model-vision.safetensors"
    index.write_text(json.dumps(held))
    save_file({key: value}, folder / "model-vision.safetensors")


class TestBeside:
    def test_b51_a_vision_tower_s_norm_is_never_the_text_model_s(self, kimi: Path) -> None:
        wanted = opened(kimi).three_tensors().norm
        add_tensor(kimi, "vision_model.norm.weight", torch.full((64,), 3.0))
        assert torch.equal(opened(kimi).three_tensors().norm, wanted)
        index = kimi / "model.safetensors.index.json"
        held = json.loads(index.read_text())
        del held["weight_map"]["language_model.model.norm.weight"]
        index.write_text(json.dumps(held))
        assert "language_model.model.norm.weight: wanted this tensor" in refusal(kimi)

    @pytest.mark.parametrize(
        ("key", "found"),
        [
            ("lm_head.bias", "lm_head.weight: wanted this tensor alone, found lm_head.bias too"),
            ("model.norm.bias", "model.norm.weight: wanted this tensor alone"),
            ("lm_head.weight_scale", "found lm_head.weight_scale too"),
            ("lm_head.weight_scale_inv", "found lm_head.weight_scale_inv too"),
            ("model.embed_tokens.weight_scale", "found model.embed_tokens.weight_scale too"),
            ("lm_head.lora_A.weight", "found lm_head.lora_A.weight too"),
        ],
    )
    def test_what_changes_one_of_the_three_is_refused_by_name(
        self, llama: Path, key: str, found: str
    ) -> None:
        add_tensor(llama, key, torch.ones(4))
        assert found in refusal(llama)


class TestArithmetic:
    """vLLM multiplies a llama's logits by `logit_scale`; transformers ignores it."""

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("logit_scale", 0.0625),  # Cohere; vLLM's llama obeys it
            ("logits_scaling", 8.0),  # Granite
            ("final_logit_softcapping", 30.0),  # Gemma 2
            ("output_logit_soft_cap", 30.0),
            ("logits_soft_cap", 30.0),  # Grok
            ("output_multiplier_scale", 0.5),
            ("lm_head_multiplier", 0.04),  # Falcon-H1
            ("embedding_multiplier", 12.0),
            ("scale_emb", 12),  # MiniCPM
            ("scale_embedding", True),
            ("embed_scale", 8.0),
            ("dim_model_base", 256),
            ("mup_enabled", True),
            ("use_mup", True),
            ("logits_mup_width_multiplier", 2.0),
            ("lm_head_bias", True),
            ("apply_layernorm_1p", True),  # Nemotron
            ("norm_zero_centered_gamma", True),
            ("rms_norm_add_unit_offset", True),
            ("norm_head", True),
        ],
    )
    def test_a_field_that_changes_the_logits_is_refused_by_name(
        self, name: str, value: object
    ) -> None:
        config = {**PUBLISHED["Llama-3.1-8B-Instruct"].config(), name: value}
        with pytest.raises(VerifierInvalid) as caught:
            resolve_text_config(config, "config.json")
        told = str(caught.value)
        assert told.startswith(f"config.json: {name}: wanted embeddings and logits as the three")
        assert f"found {value}; train no draft for it" in told

    @pytest.mark.parametrize("value", [None, False, 0, 0.0, 1, 1.0])
    def test_a_field_that_changes_nothing_is_none(self, value: object) -> None:
        config = PUBLISHED["Llama-3.1-8B-Instruct"].config()
        for name in ("logit_scale", "final_logit_softcapping", "scale_embedding"):
            assert resolve_text_config({**config, name: value}, "config.json")[name] == value

    @pytest.mark.parametrize(
        "fields",
        [
            {"output_router_logits": True, "router_aux_loss_coef": 0.001},  # Qwen3-MoE
            {"routed_scaling_factor": 2.5, "scoring_func": "sigmoid"},  # DeepSeek-V3
            {"rope_scaling": {"factor": 8.0, "rope_type": "llama3"}, "pretraining_tp": 1},
            {"ffn_dim_multiplier": 1.3, "multiple_of": 1024},  # Llama as Meta wrote it
            {"num_logits_to_keep": 1},
        ],
    )
    def test_what_published_configs_of_these_families_say_is_taken(
        self, fields: dict[str, object]
    ) -> None:
        config = {**PUBLISHED["Llama-3.1-8B-Instruct"].config(), **fields}
        assert fields.items() <= resolve_text_config(config, "config.json").items()

    @pytest.mark.parametrize("place", ["outside", "inside"])
    def test_of_a_nested_config_both_are_looked_at(self, place: str) -> None:
        config = PUBLISHED["Kimi-K2.5"].config()
        (config if place == "outside" else config["text_config"])["logit_scale"] = 0.5
        where = "config.json: " if place == "outside" else "config.json: text_config."
        with pytest.raises(VerifierInvalid, match=f"^{where}logit_scale: "):
            resolve_text_config(config, "config.json")

    def test_another_text_model_inside_a_known_wrapper_is_refused(self, kimi: Path) -> None:
        text = json.loads((kimi / "config.json").read_text())["text_config"]
        edit_config(kimi, text_config={**text, "model_type": "gemma3_text"})
        told = refusal(kimi)
        assert "text_config.model_type: wanted kimi_k2 or deepseek_v3, found gemma3_text" in told

    @pytest.mark.parametrize("eps", [None, "1e-6", 0.0, 1, True, -1e-6])
    def test_a_norm_without_its_epsilon_is_refused(self, eps: object) -> None:
        config = {**PUBLISHED["Qwen3-8B"].config(), "rms_norm_eps": eps}
        with pytest.raises(VerifierInvalid, match="rms_norm_eps: wanted the final norm's epsilon"):
            resolve_text_config(config, "config.json")

    @pytest.mark.parametrize(
        ("model_type", "architecture"),
        [
            ("gemma2", "Gemma2ForCausalLM"),
            ("gemma3", "Gemma3ForConditionalGeneration"),
            ("granite", "GraniteForCausalLM"),
            ("cohere", "CohereForCausalLM"),
            ("minicpm", "MiniCPMForCausalLM"),
            ("mistral", "MistralForCausalLM"),
            ("phi", "PhiForCausalLM"),
            ("gpt_oss", "GptOssForCausalLM"),
            ("glm4_moe", "Glm4MoeForCausalLM"),
            ("llama4", "Llama4ForConditionalGeneration"),
            ("deepseek_v2", "DeepseekV2ForCausalLM"),
            ("deepseek_v32", "DeepseekV32ForCausalLM"),
            ("qwen3_vl", "Qwen3VLForConditionalGeneration"),
            ("qwen3_next", "Qwen3NextForCausalLM"),
            ("kimi_vl", "KimiVLForConditionalGeneration"),
            ("kimi_linear", "KimiLinearForCausalLM"),
            ("llava", "LlavaForConditionalGeneration"),
        ],
    )
    def test_any_other_family_hears_what_to_add_and_where(
        self, model_type: str, architecture: str
    ) -> None:
        config = {
            **PUBLISHED["Llama-3.1-8B-Instruct"].config(),
            "model_type": model_type,
            "architectures": [architecture],
        }
        with pytest.raises(VerifierInvalid) as caught:
            resolve_text_config(config, "config.json")
        told = str(caught.value)
        assert told.endswith(
            f"found {model_type} ({architecture}); add its three keys to FAMILIES in "
            "eagle3/verifier/families.py, if its logits are lm_head of an RMSNorm and nothing more."
        )


_values = st.sampled_from(
    [
        None,
        True,
        False,
        0,
        1,
        -1,
        2**70,
        1.5,
        float("nan"),
        "",
        "8",
        [],
        [1],
        ["a", 3],
        {},
        {"a": 1},
    ]
)
_fields = st.sampled_from(
    [*PUBLISHED["Kimi-K2.5"].config(), *PUBLISHED["Qwen3-8B"].config(), "logit_scale"]
)


def outcome(call: Callable[[], Any]) -> Any:
    """What it gives, or the refusal; anything else that it raises is a fault."""
    try:
        return call()
    except VerifierInvalid as error:
        return error


class TestFuzzed:
    @settings(deadline=None, max_examples=60)
    @given(st.sampled_from(sorted(PUBLISHED)), st.dictionaries(_fields, _values, max_size=3))
    def test_any_config_is_taken_or_refused_in_one_sentence(
        self, name: str, changes: dict[str, Any]
    ) -> None:
        config = {**PUBLISHED[name].config(), **changes}
        found = outcome(lambda: resolve_text_config(config, "config.json"))
        if isinstance(found, VerifierInvalid):
            assert str(found).startswith("config.json: ")
        else:
            assert all(found[key] > 0 for key in ("vocab_size", "hidden_size", "num_hidden_layers"))

    @settings(deadline=None, max_examples=40)
    @given(
        field_name=st.sampled_from(["dtype", "shape", "data_offsets", None]),
        value=_values | st.lists(st.integers(-8, 300), min_size=2, max_size=2),
    )
    @example(field_name="data_offsets", value=[300, 5])
    @example(field_name="data_offsets", value=[-8, 131064])
    def test_any_header_is_taken_or_refused_in_one_sentence(
        self, models: dict[str, Path], field_name: str | None, value: object
    ) -> None:
        path = models["llama"] / "model.safetensors"
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        # Neither the first nor the last of the file, whose ends are checked by its size.
        if field_name is None:
            header["model.embed_tokens.weight"] = value
        else:
            header["model.embed_tokens.weight"][field_name] = value
        text = json.dumps(header).encode()
        folder = path.parent.parent / "fuzzed"
        folder.mkdir(exist_ok=True)
        shutil.copy(path.parent / "config.json", folder)
        (folder / "model.safetensors").write_bytes(
            len(text).to_bytes(8, "little") + text + data[8 + length :]
        )
        found = outcome(lambda: opened(folder).three_tensors())
        if isinstance(found, VerifierInvalid):
            assert "model.safetensors" in str(found) or "model.embed_tokens.weight" in str(found)

    @pytest.mark.parametrize("value", [3, None, ["a"], {"a": 1}])
    def test_an_index_that_names_no_file(self, kimi: Path, value: object) -> None:
        path = kimi / "model.safetensors.index.json"
        held = json.loads(path.read_text())
        held["weight_map"]["language_model.lm_head.weight"] = value
        path.write_text(json.dumps(held))
        assert "weight_map: wanted tensor name -> file" in refusal(kimi)
