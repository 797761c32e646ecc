"""A chat template's text comes of the messages and the settings alone, on every day."""

import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from eagle3.config import PrepareConfig, RegenerateConfig
from eagle3.conversations import Converter, FormOfFile, Kept, RawRow, Renderer
from eagle3.errors import ConfigError, VerifierInvalid
from eagle3.onpolicy import plan_answers
from tests import chat_tokenizers as chats
from tests.test_prepare import chat, committed, digests, run_prepare, write_config, write_jsonl
from tests.tiny_verifiers import make_llama

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


@pytest.fixture(scope="module")
def dated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A verifier whose template asks for the date."""
    folder = make_llama(tmp_path_factory.mktemp("dated") / "verifier", num_layers=4)
    (folder / "chat_template.jinja").write_text(DATED)
    return folder


def test_a_run_has_one_date_in_whichever_process_and_another_is_another_run(
    tmp_path: Path, dated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", [chat(at) for at in range(20)])
    assert run_prepare(write_config(tmp_path, dated, data), tmp_path / "none") == 64
    assert "prepare.template_date: wanted a date" in capsys.readouterr().err
    assert not (tmp_path / "none/work").exists(), "nothing was claimed"
    for workers in (0, 2):
        config = write_config(
            tmp_path, dated, data, template_date="2026-01-31", num_workers=workers
        )
        assert run_prepare(config, tmp_path / f"{workers}") == 0
    assert digests(tmp_path / "0") == digests(tmp_path / "2")
    other = write_config(tmp_path, dated, data, template_date="2026-02-01")
    assert run_prepare(other, tmp_path / "0") == 65
    assert "template_date" in capsys.readouterr().err
    # What regenerate is told is what these rows were rendered with.
    rows = committed(tmp_path / "0")
    plan = plan_answers(rows, RegenerateConfig(max_new_tokens=9))
    assert plan.template_date == datetime.date(2026, 1, 31)
