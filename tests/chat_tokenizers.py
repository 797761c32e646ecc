"""Tokenizers and chat templates with the habits of published ones, small and made in code."""

import functools
from pathlib import Path
from typing import Any, ClassVar

from transformers import (
    AddedToken,
    PreTrainedTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from tests.tiny_verifiers import CHAT_TEMPLATE, write_tokenizer

CHATML = CHAT_TEMPLATE

QWEN3_LIKE = """\
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
{{- '<|im_start|>system\\n# Tools' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- set content = message.content -%}
{%- if message.role == 'assistant' -%}
{%- set reasoning = '' -%}
{%- if message.reasoning_content is string -%}
{%- set reasoning = message.reasoning_content -%}
{%- elif '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > ns.last and (loop.last or reasoning) -%}
{{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- content.lstrip('\\n') -}}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{%- if call.function.arguments is string -%}{{- call.function.arguments -}}
{%- else -%}{{- call.function.arguments | tojson -}}{%- endif -%}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}
{%- endif -%}
"""
"""Drops the reasoning of earlier turns, puts an empty one into an answer that has none."""

MISTRAL_LIKE = """\
{{- '<|im_start|>' -}}
{%- for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('roles must alternate user/assistant') -}}
{%- endif -%}
{%- if message.role == 'user' -%}{{- '[INST] ' + message.content + ' [/INST]' -}}
{%- else -%}{{- ' ' + message.content + '<|im_end|>' -}}{%- endif -%}
{%- endfor -%}
"""
"""Raises on any other order of roles, and has no generation prompt."""

DEEPSEEK_LIKE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is none -%}
{%- for call in message.tool_calls -%}
{{- '\\n```json\\n' + call['function']['name'] + call['function']['arguments'] + '\\n```' -}}
{%- endfor -%}
{%- else -%}{{- message.content -}}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""Joins tool arguments to a text, so that an object makes it raise; calls only without content."""

HEADER_WITHOUT_PROMPT = CHATML.replace("if add_generation_prompt", "if false")
"""Ignores add_generation_prompt: the answer's header would be taken for the answer."""

USERS_ONLY = """\
{%- for message in messages -%}
{%- if message.role in ('user', 'assistant') -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""Says nothing about system messages, and leaves them out."""


def fast_tokenizer(folder: Path, template: str = CHATML) -> PreTrainedTokenizerBase:
    """The byte-level BPE of the tiny verifiers, in a folder, with a template of choice."""
    write_tokenizer(folder, vocab_size=512)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = template
    return tokenizer


class ByteTokenizer(PreTrainedTokenizer):
    """A tokenizer in Python, as models with code of their own have it: no offsets at all."""

    vocab_files_names: ClassVar[dict[str, str]] = {}

    def __init__(self, **kwargs: Any) -> None:
        tokens = [f"<{i:02x}>" for i in range(256)]
        self._ids = {token: i for i, token in enumerate(tokens)}
        super().__init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        return 256

    def get_vocab(self) -> dict[str, int]:
        return {**self._ids, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [f"<{byte:02x}>" for byte in text.encode()]

    def _convert_token_to_id(self, token: str) -> int:
        return self._ids[token]

    def _convert_id_to_token(self, index: int) -> str:
        return f"<{index:02x}>"

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        parts = (bytes([self._ids[t]]) if t in self._ids else t.encode() for t in tokens)
        return b"".join(parts).decode(errors="replace")


@functools.cache
def slow_tokenizer(template: str = CHATML) -> PreTrainedTokenizerBase:
    """A ByteTokenizer with the special tokens of ChatML."""
    special = [AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")]
    tokenizer = ByteTokenizer(eos_token=special[1], extra_special_tokens=[special[0]])
    tokenizer.chat_template = template
    return tokenizer
