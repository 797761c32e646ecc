"""One render for all turns: the texts of one render each, and refused where that may differ."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from eagle3.config import PrepareConfig
from eagle3.conversations import Converter, FormOfFile, Kept, RawRow, Renderer
from eagle3.conversations.growing import growing, turn_parts
from eagle3.errors import VerifierInvalid
from tests import chat_tokenizers as chats

STATEFUL = """\
{%- set ns = namespace(tool=false, count=0) -%}
{{- 'begin ' + messages[0].role -}}
{%- for message in messages -%}
{%- set ns.tool = message.role == 'tool' -%}
{%- set ns.count = ns.count + 1 -%}
{%- if loop.first -%}first {% endif -%}
{{- '<|im_start|>' + message.role + ' ' + message.content + '<|im_end|>' -}}
{%- for call in message.tool_calls or [] -%}{{ call.name }}{{ ',' if not loop.last }}{%- endfor -%}
{%- endfor -%}
{%- if ns.tool -%}after a tool{%- endif -%}
{%- if add_generation_prompt -%}<|im_start|>assistant {{ ns.count }} {%- endif -%}
"""
FIRST_IN_ELSE = """\
{%- for message in messages -%}
{%- for call in message.tool_calls or [] -%}{{ call.name }}
{%- else -%}{{ 'first ' if loop.first }}{{ message.role + ' ' + message.content + '<|im_end|>' }}
{%- endfor -%}
{%- endfor -%}
"""
LOCAL = {
    "chatml": chats.CHATML,
    "no generation prompt": chats.MISTRAL_LIKE.replace("raise_exception", "str"),
    "users only": chats.USERS_ONLY,
    "state of its own": STATEFUL,
    "deepseek": chats.DEEPSEEK_LIKE,
    "the first in the else of another loop": FIRST_IN_ELSE,
}
AHEAD = {
    "reasoning dropped": chats.QWEN3_LIKE,
    "the last message": chats.CHATML.replace("loop.first", "loop.last") + "{{ messages[-1].role }}",
    "loop.last": "{% for message in messages %}{{ loop.last }}{% endfor %}",
    "loop.length": "{% for message in messages %}{{ loop['length'] }}{% endfor %}",
    "loop handed on": "{% for message in messages %}{% set l = loop %}{{ l.last }}{% endfor %}",
    "a count": "{% for message in messages %}x{% endfor %}{{ messages | length }}",
    "another name": "{% set all = messages %}{% for message in messages %}{{ all }}{% endfor %}",
    "prompt in the loop": (
        "{% for message in messages %}{% if add_generation_prompt %}x{% endif %}{% endfor %}"
    ),
    "a name of the loop after it": (
        "{% set x = 1 %}{% for message in messages %}{% set x = 2 %}{% endfor %}{{ x }}"
    ),
    "a loop that ends early": "{% for message in messages %}{% break %}{% endfor %}",
    "the loop asked in the else of another": (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c }}"
        "{% else %}{{ m.content }}{% if not loop.last %}<|im_end|>{% endif %}{% endfor %}"
        "{% endfor %}"
    ),
    "the loop asked in the condition of another": (
        "{% for m in messages %}{% for c in m.tool_calls if loop.last %}{{ c }}{% endfor %}"
        "{% endfor %}"
    ),
    "the loop asked by what another goes over": (
        "{% for m in messages %}{% for c in range(loop.revindex) %}{{ c }}{% endfor %}{% endfor %}"
    ),
    "two loops": "{% for m in messages %}{% endfor %}{% for m in messages %}{{ m }}{% endfor %}",
    "messages turned round": "{% for message in messages[::-1] %}{{ message }}{% endfor %}",
    "some messages": "{% for m in messages if m.role == 'user' %}{{ m }}{% endfor %}",
    "state after the loop": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{{ ns.n }}{% endfor %}"
        "{% set ns.n = 1 %}"
    ),
}


@pytest.mark.parametrize("name", AHEAD)
def test_a_template_that_may_look_ahead_is_rendered_turn_by_turn(name: str) -> None:
    assert growing(AHEAD[name]) is None


words = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
conversations = st.lists(st.tuples(words, words), min_size=2, max_size=5)


@settings(max_examples=25, deadline=None)
@given(said=conversations)
@pytest.mark.parametrize("name", LOCAL)
def test_all_turns_at_once_are_the_turns_one_by_one(name: str, said: list[tuple[str, str]]) -> None:
    template = growing(LOCAL[name])
    assert template is not None
    tokenizer = chats.slow_tokenizer()

    def render(messages: Any, template: Any, prompt: bool = False) -> str:
        return str(
            tokenizer.apply_chat_template(
                messages, chat_template=template, add_generation_prompt=prompt, tokenize=False
            )
        )

    messages = [
        {"role": role, "content": content}
        for pair in said
        for role, content in zip(("user", "assistant"), pair, strict=True)
    ]
    parts = turn_parts(lambda one: render(messages, one), template, len(messages))
    assert parts is not None
    for at in range(1, len(messages) + 1):
        so_far = "".join(said for said, _, _ in parts[:at])
        assert so_far + parts[at - 1][1] == render(messages[:at], LOCAL[name])
        assert so_far + parts[at - 1][2] == render(messages[:at], LOCAL[name], True)


def test_a_text_that_looks_like_our_marks_is_rendered_turn_by_turn() -> None:
    template = growing(chats.CHATML)
    assert template is not None
    assert turn_parts(lambda _: "a\x00turn\x00b", template, 3) is None


def renderer_of(tokenizer: PreTrainedTokenizerBase) -> Renderer:
    assert isinstance(tokenizer.eos_token_id, int)
    return Renderer(tokenizer, [tokenizer.eos_token_id])


WRONG = {
    "the whole": chats.USERS_ONLY + "x",
    "a prompt alone": chats.CHATML.replace("<|im_start|>assistant", "<|im_start|> assistant"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_all_turns_at_once_give_otherwise_than_each_of_them_ends_the_stage(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    renderer = renderer_of(chats.slow_tokenizer())
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    wrong = growing(WRONG[name])
    assert wrong is not None
    monkeypatch.setattr(renderer, "_growing", wrong)
    with pytest.raises(VerifierInvalid, match="the text of all turns at once"):
        renderer.script(said, None)


def test_a_class_that_looks_at_all_messages_itself_is_asked_turn_by_turn() -> None:
    class Dropping(chats.ByteTokenizer):
        def apply_chat_template(self, conversation: Any, *args: Any, **options: Any) -> Any:
            kept = [{**one, "content": "-"} for one in conversation[:-2]]
            return super().apply_chat_template([*kept, *conversation[-2:]], *args, **options)

    plain = chats.slow_tokenizer()
    tokenizer = Dropping(eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"])
    tokenizer.chat_template = plain.chat_template
    for found, turn_by_turn in ((plain, False), (tokenizer, True)):
        assert (renderer_of(found)._growing is None) == turn_by_turn


def test_rows_are_the_same_however_they_were_rendered(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = chats.slow_tokenizer()
    config = PrepareConfig(data=("a",), heldout_share=0.0)
    messages = [
        {"role": role, "content": f"{role} {turn}\x00turn\x00" if turn == 3 else f"{role} {turn}"}
        for turn in range(4)
        for role in ("user", "assistant")
    ]
    rows = [
        RawRow(place=at, value={"messages": messages[:end]}) for at, end in enumerate((2, 6, 8), 1)
    ]
    form = FormOfFile("a.jsonl")
    form.learn(rows)
    by = Converter(renderer_of(tokenizer), config)
    at_once = by.convert_all(rows, form)
    monkeypatch.setattr(by._renderer, "_growing", None)
    one_by_one = [by.convert(row, form) for row in rows]
    for one, other in zip(at_once, one_by_one, strict=True):
        assert isinstance(one, Kept)
        assert isinstance(other, Kept)
        assert one.rows == other.rows
