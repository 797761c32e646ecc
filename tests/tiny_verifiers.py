"""Tiny random verifiers on disk, in the shapes that users bring.

Each maker writes a complete Hugging Face folder (config.json, safetensors, tokenizer, chat
template, generation_config.json) into the directory it is given and returns that directory.
The weights are random but wide: layers differ from one another by much, so that a layer id off
by one or a forgotten norm changes every number that a test looks at. The tokenizer is a real
byte-level BPE trained here on a few sentences; it can encode any text. Everything is a pure
function of the arguments: two calls give the same bytes.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2: padding, start of a turn, end of a turn (and of an answer)."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML, as most open models have it: without generation tags."""

CORPUS = (
    "system user assistant",
    "You are a helpful assistant. Answer the question in one or two sentences.",
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "What is the capital of France? The capital of France is Paris.",
    "How do I write a function that adds two numbers? Return the sum of the two arguments.",
    "def add(first, second): return first + second",
    "It was the best of times, it was the worst of times, it was the age of wisdom.",
    "Hello! How are you today? I am fine, thank you. And what about you?",
    "Please tell me something about the weather in the mountains during the winter.",
    "One, two, three, four, five, six, seven, eight, nine and ten are the first ten numbers.",
)
"""What the tokenizers learn their merges from."""

INITIALIZER_RANGE = 0.2
"""Standard deviation of the weights. At transformers' 0.02 a narrow model's layers add almost
nothing to the residual stream, and a wrong layer could not be told from the right one."""


def write_tokenizer(directory: Path, *, vocab_size: int) -> None:
    """Write a byte-level BPE of at most `vocab_size - 8` tokens with a ChatML template.

    The tokenizer is smaller than the model's vocabulary, as real ones are (the last rows of
    lm_head belong to no token). Needs `vocab_size >= 272`: 256 bytes, 3 special tokens, padding.
    """
    assert vocab_size >= 272, f"vocab_size {vocab_size} leaves no room for the 256 bytes"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 8,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    end_of_text, _, end_of_turn = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end_of_turn,
        pad_token=end_of_text,
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    # Inside tokenizer_config.json, where most published folders keep it.
    fast.save_pretrained(directory, save_jinja_files=False)


def make_llama(
    directory: Path,
    *,
    num_layers: int = 8,
    hidden_size: int = 64,
    vocab_size: int = 512,
    tie: bool = False,
    dtype: str = "float32",
    seed: int = 0,
) -> Path:
    """Write a llama-shaped verifier: `LlamaForCausalLM`, one safetensors file.

    `hidden_size` must be a multiple of 32, the smallest attention head that vLLM has on CPUs.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    _save_random(LlamaForCausalLM, config, directory, dtype=dtype, seed=seed)
    write_tokenizer(directory, vocab_size=vocab_size)
    return directory


def make_qwen3(
    directory: Path,
    *,
    num_layers: int = 8,
    hidden_size: int = 64,
    vocab_size: int = 512,
    tie: bool = True,
    dtype: str = "float32",
    seed: int = 0,
) -> Path:
    """Write a qwen3-shaped verifier: `Qwen3ForCausalLM` (norms on queries and keys), tied."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    _save_random(Qwen3ForCausalLM, config, directory, dtype=dtype, seed=seed)
    write_tokenizer(directory, vocab_size=vocab_size)
    return directory


def make_kimi(
    directory: Path,
    *,
    num_layers: int = 8,
    hidden_size: int = 64,
    vocab_size: int = 512,
    tie: bool = False,
    dtype: str = "float32",
    seed: int = 0,
) -> Path:
    """Write a verifier of Kimi-K2.5's shape, as published but tiny.

    `KimiK25ForConditionalGeneration` around a DeepSeek-V3 text model (MLA, experts, YaRN) in
    `text_config`; keys under `language_model.`; several safetensors files and an index. Of the
    vision tower only one norm is there: the one whose name a match by suffix takes for the text
    model's. vLLM runs it with `limit_mm_per_prompt={"vision_chunk": 0}`. The attention widths
    (latent 512, rotary 64) are real, for vLLM's CPU kernels know no others.
    """
    text_config = _kimi_text_config(
        num_layers=num_layers, hidden_size=hidden_size, vocab_size=vocab_size, tie=tie, dtype=dtype
    )
    with tempfile.TemporaryDirectory() as plain:
        _save_random(
            DeepseekV3ForCausalLM,
            DeepseekV3Config(**text_config),
            Path(plain),
            dtype=dtype,
            seed=seed,
        )
        weights = load_file(Path(plain) / "model.safetensors")
    weights = {f"language_model.{key}": tensor for key, tensor in weights.items()}
    weights["vision_tower.encoder.final_layernorm.weight"] = torch.full(
        (hidden_size,), 3.0, dtype=getattr(torch, dtype)
    )
    directory.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(weights, directory, max_shard_size="1MB")
    _write_json(
        directory / "config.json",
        _kimi_config(text_config, vocab_size=vocab_size, tie=tie, dtype=dtype),
    )
    _write_json(directory / "generation_config.json", {"eos_token_id": [0, 2], "pad_token_id": 0})
    _write_json(directory / "preprocessor_config.json", {"media_proc_cfg": _MEDIA_PROC_CFG})
    write_tokenizer(directory, vocab_size=vocab_size)
    return directory


def _kimi_config(
    text_config: dict[str, Any], *, vocab_size: int, tie: bool, dtype: str
) -> dict[str, Any]:
    """The outer config.json, as published: kimi_k2 is deepseek_v3 by another name."""
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": dtype,
        "image_token_id": vocab_size - 1,
        "media_placeholder_token_id": vocab_size - 1,
        "pad_token_id": 0,
        "projection_hidden_size": 64,
        "text_config": {**text_config, "model_type": "kimi_k2"},
        "tie_word_embeddings": tie,
        "vision_config": {
            "model_type": "kimi_k25_vision",
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "patch_size": 14,
            "pos_emb_height": 4,
            "pos_emb_width": 4,
        },
    }


_MEDIA_PROC_CFG = {
    "in_patch_limit": 64,
    "in_patch_limit_each_frame": 16,
    "in_patch_limit_video": 64,
    "patch_size": 14,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_kernel_size": 2,
    "fixed_output_tokens": None,
    "patch_limit_on_one_side": 8,
    "temporal_merge_kernel_size": 4,
}
"""Image settings without which vLLM does not start, though no image is ever sent."""


def _kimi_text_config(
    *, num_layers: int, hidden_size: int, vocab_size: int, tie: bool, dtype: str
) -> dict[str, Any]:
    """The `text_config` of a tiny Kimi-K2.5, with its real rope."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "dtype": dtype,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "moe_intermediate_size": hidden_size // 2,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.0,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "kv_lora_rank": 512,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "max_position_embeddings": 262144,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "rms_norm_eps": 1e-5,
        "initializer_range": INITIALIZER_RANGE,
        "tie_word_embeddings": tie,
        "num_nextn_predict_layers": 0,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _save_random(
    cls: type[PreTrainedModel],
    config: PreTrainedConfig,
    directory: Path,
    *,
    dtype: str,
    seed: int,
) -> None:
    """Build `cls(config)` with weights drawn from `seed` and save it in `dtype`.

    Norm weights are drawn around 1 instead of being exactly 1, so that leaving one out shows.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls(config)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.data.uniform_(0.5, 1.5)
    model.generation_config.eos_token_id = [0, 2]
    model.to(getattr(torch, dtype)).save_pretrained(directory)


def make_draft(
    directory: Path, verifier: Path, *, aux_layer_ids: tuple[int, int, int] = (2, 4, 5)
) -> Path:
    """Write a random draft of a `make_llama` verifier, as speculators exports one.

    Its vocabulary is the verifier's first 128 tokens. It knows nothing, so that nearly every
    proposal is refused: for what must hold whatever a draft proposes.
    """
    layer = json.loads((verifier / "config.json").read_text())
    hidden, inner, vocab = layer["hidden_size"], layer["intermediate_size"], layer["vocab_size"]
    queries = layer["num_attention_heads"] * layer["head_dim"]
    keys = layer["num_key_value_heads"] * layer["head_dim"]
    shapes = {
        "embed_tokens": (vocab, hidden),
        "fc": (hidden, 3 * hidden),
        "lm_head": (128, hidden),
        "norm": (hidden,),
        "layers.0.hidden_norm": (hidden,),
        "layers.0.input_layernorm": (hidden,),
        "layers.0.post_attention_layernorm": (hidden,),
        "layers.0.self_attn.q_proj": (queries, 2 * hidden),
        "layers.0.self_attn.k_proj": (keys, 2 * hidden),
        "layers.0.self_attn.v_proj": (keys, 2 * hidden),
        "layers.0.self_attn.o_proj": (hidden, queries),
        "layers.0.mlp.gate_proj": (inner, hidden),
        "layers.0.mlp.up_proj": (inner, hidden),
        "layers.0.mlp.down_proj": (hidden, inner),
    }
    source = torch.Generator().manual_seed(1)
    tensors = {
        f"{name}.weight": INITIALIZER_RANGE * torch.randn(*shape, generator=source)
        for name, shape in shapes.items()
    }
    tensors["d2t"] = torch.zeros(128, dtype=torch.int64)
    tensors["t2d"] = torch.arange(vocab) < 128
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    config = {
        "architectures": ["Eagle3DraftModel"],
        "dtype": "float32",
        "draft_vocab_size": 128,
        "eagle_aux_hidden_state_layer_ids": list(aux_layer_ids),
        "norm_before_residual": False,
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": layer["architectures"], "name_or_path": str(verifier)},
        },
        "transformer_layer_config": {**layer, "num_hidden_layers": 1},
    }
    _write_json(directory / "config.json", config)
    return directory
