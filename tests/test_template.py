"""A chat template's text comes of the messages and the settings alone, on every day."""

import datetime
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from eagle3.config import PrepareConfig
from eagle3.conversations import Converter, FormOfFile, Kept, RawRow, Renderer
from eagle3.errors import ConfigError, VerifierInvalid
from tests import chat_tokenizers as chats

DATED = (
    """\
{%- if strftime_now is defined -%}{%- set today = strftime_now('%d %b %Y') -%}
{%- else -%}{%- set today = '26 Jul 2024' -%}{%- endif -%}
{{- '<|im_start|>system\\nToday: ' + today + '<|im_end|>\\n' -}}
"""
    + chats.CHATML
)
ANSWERED = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def renderer(template: str, today: datetime.date | None) -> Renderer:
    tokenizer = chats.slow_tokenizer(template)
    assert isinstance(tokenizer.eos_token_id, int)
    return Renderer(tokenizer, [tokenizer.eos_token_id], today=today)


def rows_on(day: datetime.date, monkeypatch: pytest.MonkeyPatch) -> Any:
    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "Clock":
            return cls(day.year, day.month, day.day)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    config = PrepareConfig(data=("a",), heldout_share=0.0, template_date=datetime.date(2026, 1, 31))
    row, form = RawRow(place=1, value=ANSWERED), FormOfFile("a.jsonl")
    form.learn([row])
    found = Converter(renderer(DATED, config.template_date), config).convert(row, form)
    assert isinstance(found, Kept)
    return found.rows


def test_rows_are_the_same_on_every_day(monkeypatch: pytest.MonkeyPatch) -> None:
    days = (datetime.date(2026, 3, 1), datetime.date(2026, 3, 2))
    one, other = (rows_on(day, monkeypatch) for day in days)
    assert one == other
    text = bytes(i for i in one[0][0] if i < 256).decode()
    assert "Today: 31 Jan 2026" in text


def test_turns_at_once_and_prompts_have_the_same_date() -> None:
    found = renderer(DATED, datetime.date(2026, 1, 31))
    script = found.script(ANSWERED["messages"], None)
    assert script.parts is not None
    ((prompt, _),) = found.turns(script)
    assert prompt == found.prompt_ids(ANSWERED["messages"][:1])


@pytest.mark.parametrize("inside", ["", "{% generation %}{% endgeneration %}"])
def test_a_template_that_asks_for_the_date_is_told_one_or_refused(inside: str) -> None:
    with pytest.raises(ConfigError, match=r"prepare\.template_date: wanted a date"):
        renderer(DATED + inside, None)


def test_the_word_alone_asks_for_no_date() -> None:
    said = "{{ 'strftime_now' }}{{ messages[0].strftime_now }}strftime_now | random"
    assert renderer(said + chats.CHATML, None).prompt_ids(ANSWERED["messages"][:1])


@pytest.mark.parametrize(
    "drawn",
    ["{{ ['a', 'b'] | random }}", "{% filter random %}ab{% endfilter %}", "{{ lipsum(1) }}"],
)
def test_a_template_that_draws_lots_is_refused(drawn: str) -> None:
    with pytest.raises(VerifierInvalid, match="the same text each time"):
        renderer(drawn + chats.CHATML, None)
