"""Tiny random verifiers on disk, in the shapes that users bring.

Each maker writes a complete Hugging Face folder (config.json, safetensors, tokenizer, chat
template, generation_config.json) into the directory it is given and returns that directory.
The weights are random but wide: layers differ from one another by much, so that a layer id off
by one or a forgotten norm changes every number that a test looks at. The tokenizer is a real
byte-level BPE trained here on a few sentences; it can encode any text. Everything is a pure
function of the arguments: two calls give the same bytes.
"""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

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
    num_layers: int = 6,
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


def _save_random(cls: type, config: object, directory: Path, *, dtype: str, seed: int) -> None:
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
