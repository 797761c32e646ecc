"""Whatever a row holds: an outcome and never a crash, and every row is accounted for."""

import functools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from eagle3.config import PrepareConfig
from eagle3.conversations import (
    Converter,
    FormOfFile,
    HeldOut,
    Kept,
    Preparation,
    RawRow,
    Rejected,
    Renderer,
)
from eagle3.errors import ConversationsInvalid
from eagle3.store import open_store
from tests import chat_tokenizers as chats

TEMPLATES = {"chatml": chats.CHATML, "qwen3": chats.QWEN3_LIKE, "deepseek": chats.DEEPSEEK_LIKE}


@functools.cache
def tokenizer(template: str) -> PreTrainedTokenizerBase:
    found = chats.ByteTokenizer(
        eos_token=chats.AddedToken("<|im_end|>", special=True),
        extra_special_tokens=[chats.AddedToken("<|im_start|>", special=True)],
    )
    found.chat_template = TEMPLATES[template]
    return found


@functools.cache
def converter(template: str, share: float = 0.0) -> Converter:
    found = tokenizer(template)
    assert isinstance(found.eos_token_id, int)
    config = PrepareConfig(data=("a",), heldout_share=share)
    return Converter(Renderer(found, [found.eos_token_id]), config)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
controls = st.sampled_from(["<|im_end|>", "<|im_start|>assistant\n", "<think>", "</think>", "\x00"])
texts = st.lists(st.text(max_size=8) | controls, max_size=4).map("".join)
call = st.fixed_dictionaries(
    {"name": texts | anything}, optional={"arguments": anything, "function": anything}
)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"])},
    optional={
        "content": texts | anything,
        "from": anything,
        "reasoning_content": texts | anything,
        "thinking": texts,
        "tool_calls": st.lists(call, max_size=2) | anything,
    },
)
rows = anything | st.fixed_dictionaries(
    {"messages": st.lists(message, max_size=5) | anything},
    optional={
        "tools": st.lists(call, max_size=2) | anything,
        "system": texts | anything,
        "prompt": texts | anything,
    },
)


@settings(max_examples=150, deadline=None)
@given(lines=st.lists(rows.map(json.dumps).map(str.encode) | st.binary(max_size=40), max_size=4))
@pytest.mark.parametrize("template", TEMPLATES)
def test_any_row_has_an_outcome_and_all_rows_are_accounted_for(
    template: str, lines: list[bytes]
) -> None:
    raw = [RawRow(place=place, value=line) for place, line in enumerate(lines, 1)]
    form = FormOfFile("a.jsonl")
    form.learn(raw)
    config = PrepareConfig(data=("a",), max_rejected_share=1.0)
    made = Preparation(open_store("memory://fuzz"), config, rows=len(raw), vocab_size=512)
    kinds = []
    try:
        outcomes = converter(template).convert_all(raw, form)
    except ConversationsInvalid:
        # A file of two forms, which is refused as a whole.
        return
    for row, outcome in zip(raw, outcomes, strict=True):
        kinds.append(type(outcome))
        if isinstance(outcome, Kept):
            assert all(len(ids) == len(mask) and sum(mask) for ids, mask in outcome.rows)
        made.take(outcome, where=f"a.jsonl:{row.place}", source=0)
    tally = made._tally
    assert tally.rows_in == len(lines)
    assert tally.rows_kept + tally.rejected.total() == len(lines)
    assert len(tally.rows) == tally.rejected.total() >= kinds.count(Rejected)


def supervised(found: PreTrainedTokenizerBase, row: tuple[list[int], list[int]]) -> list[str]:
    """The text of each supervised stretch of a row."""
    stretches, before = [], 0
    for token, mask in zip(*row, strict=True):
        if mask and not before:
            stretches.append([])
        if mask:
            stretches[-1].append(token)
        before = mask
    return [str(found.decode(ids)) for ids in stretches]


spoken = texts.map(str.strip).filter(lambda one: one and "think>" not in one)


@settings(max_examples=150, deadline=None)
@given(turns=st.lists(st.tuples(spoken, spoken), min_size=1, max_size=4))
@pytest.mark.parametrize("template", TEMPLATES)
def test_whatever_the_user_writes_only_answers_and_their_stop_tokens_are_supervised(
    template: str, turns: list[tuple[str, str]]
) -> None:
    messages = [
        {"role": role, "content": content}
        for turn in turns
        for role, content in zip(("user", "assistant"), turn, strict=True)
    ]
    form, row = FormOfFile("a"), RawRow(place=1, value={"messages": messages})
    form.learn([row])
    outcome = converter(template).convert(row, form)
    forged = any(
        mark in text for turn in turns for text in turn for mark in ("<|im_end|>", "<|im_start|>")
    )
    if forged:
        assert isinstance(outcome, Rejected)
        assert outcome.reason == "control_token"
        return
    assert isinstance(outcome, Kept), outcome
    found = [part for one in outcome.rows for part in supervised(tokenizer(template), one)]
    assert found == [f"{answer}<|im_end|>" for _, answer in turns]


@settings(max_examples=50, deadline=None)
@given(line=rows.map(json.dumps).map(str.encode))
def test_any_row_may_fall_among_the_held_out_ones(line: bytes) -> None:
    form, row = FormOfFile("a"), RawRow(place=1, value=line)
    form.learn([row])
    try:
        outcome: Any = converter("chatml", 1.0).convert(row, form)
    except ConversationsInvalid:
        return
    assert isinstance(outcome, HeldOut | Rejected)
