"""What newer data brings along: developers, reasoning beside the answer, functions as they are."""

import json
from typing import Any

import pytest

from tests import chat_tokenizers as chats
from tests.test_conversations import ANSWER, USER, converter, kept, reason, supervised


def test_a_developer_s_message_is_a_system_prompt() -> None:
    tokenizer = chats.slow_tokenizer(chats.CHATML)
    said = {"role": "developer", "content": "Be short."}
    outcome = kept(converter(tokenizer), {"messages": [said, USER, ANSWER]})
    assert tokenizer.decode(outcome.rows[0][0]).startswith("<|im_start|>system\nBe short.")
    assert supervised(tokenizer, outcome.rows[0]) == ["The capital of France is Paris.<|im_end|>"]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_supervised_under_each_of_its_names(key: str) -> None:
    tokenizer = chats.slow_tokenizer(chats.QWEN3_LIKE)
    rows = kept(converter(tokenizer), {"messages": [USER, {**ANSWER, key: "I know it."}]}).rows
    assert supervised(tokenizer, rows[0]) == [
        "<think>\nI know it.\n</think>\n\nThe capital of France is Paris.<|im_end|>"
    ]


def test_reasoning_that_the_template_leaves_out_is_noticed() -> None:
    by = converter(chats.slow_tokenizer(chats.CHATML))
    thought = {**ANSWER, "reasoning_content": "I know it."}
    assert reason(by, {"messages": [USER, thought]}) == "template_drops_reasoning"
    both = {**thought, "thinking": "I do not."}
    assert reason(by, {"messages": [USER, both]}) == "bad_message"
    # Written into the text it is the answer's own.
    inline = {"role": "assistant", "content": "<think>\nI know it.\n</think>\n\nParis."}
    assert kept(by, {"messages": [USER, inline]})


def test_an_answer_that_the_template_alters_is_noticed() -> None:
    shouting = chats.CHATML.replace("+ message['content'] +", "+ (message['content'] | upper) +")
    assert shouting != chats.CHATML
    lower = {"role": "user", "content": "WHY?"}
    by = converter(chats.slow_tokenizer(shouting))
    assert reason(by, {"messages": [lower, ANSWER]}) == "template_drops_answer"


def test_bare_functions_are_offered_as_servers_offer_them() -> None:
    bare: dict[str, Any] = {"name": "weather", "description": "d", "parameters": {"type": "dict"}}
    wrapped = [{"type": "function", "function": bare}]
    by = converter(chats.slow_tokenizer(chats.QWEN3_LIKE))
    for tools in ([bare], json.dumps([bare]), [json.dumps(bare)], wrapped):
        assert kept(by, {"messages": [USER, ANSWER], "tools": tools}).tools == wrapped
    for tools in ("{", 3, [3], {"name": "weather"}):
        assert reason(by, {"messages": [USER, ANSWER], "tools": tools}) == "bad_tools"


@pytest.mark.parametrize("field", ["system", "system_prompt"])
@pytest.mark.parametrize("empty", ["", " \n", None])
def test_b16_an_empty_system_prompt_is_none(field: str, empty: str | None) -> None:
    by = converter(chats.slow_tokenizer(chats.CHATML))
    plain = {"messages": [USER, ANSWER]}
    assert kept(by, {**plain, field: empty}).rows == kept(by, plain).rows
    own = {"messages": [{"role": "system", "content": "Be short."}, USER, ANSWER]}
    assert kept(by, {**own, field: empty}).rows == kept(by, own).rows


def test_b16_of_two_system_prompts_none_is_dropped() -> None:
    by = converter(chats.slow_tokenizer(chats.CHATML))
    row = {"messages": [USER, ANSWER], "system": "Be short.", "system_prompt": "Be long."}
    assert reason(by, row) == "two_system_prompts"
    assert kept(by, {**row, "system_prompt": "Be short."})
