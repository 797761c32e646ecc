"""The error tree: its drawing, its exit codes, and that each error reads as one sentence."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator

import pytest

from eagle3 import errors
from eagle3.errors import Eagle3Error, Stopped

DOCUMENTED_CODES = {64, 65, 66, 69, 75, 77, 78, 143}


def subclasses(kind: type[Eagle3Error]) -> Iterator[type[Eagle3Error]]:
    for below in kind.__subclasses__():
        yield below
        yield from subclasses(below)


KINDS = sorted(subclasses(Eagle3Error), key=lambda kind: kind.__name__)


def made(kind: type[Eagle3Error]) -> Eagle3Error:
    return kind("train.epochs", wanted="at least 1", found=0, remedy="raise it")


def test_the_drawing_in_the_docstring_shows_every_error_and_its_exit_code():
    drawn = re.findall(r"[├└]── (\w+)(?: +(\d+))?", errors.__doc__ or "")
    assert sorted(name for name, _ in drawn) == [kind.__name__ for kind in KINDS]
    for name, code in drawn:
        if code:
            assert getattr(errors, name).exit_code == int(code), name


def test_exit_codes_are_the_documented_ones():
    assert {kind.exit_code for kind in KINDS} == DOCUMENTED_CODES


def test_a_retry_can_help_exactly_where_the_data_and_the_settings_are_not_to_blame():
    codes = {kind.exit_code for kind in KINDS if kind.retry_can_help}
    assert codes == {69, 75, 143}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_is_one_sentence_with_all_four_facts(kind):
    text = str(made(kind))
    assert text == "train.epochs: wanted at least 1, found 0; raise it."
    assert "\n" not in text


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_survives_the_way_out_of_another_process(kind):
    error = made(kind)
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert (str(back), back.as_record()) == (str(error), error.as_record())


def test_a_record_is_flat_json_with_the_exit_code():
    record = json.loads(json.dumps(made(errors.ConfigError).as_record()))
    assert record["error"] == "ConfigError"
    assert record["exit_code"] == 64
    assert record["retry_can_help"] is False
    assert record["field"] == "train.epochs"
    assert all(isinstance(value, str | int | bool) for value in record.values())


def test_stopped_says_what_is_kept_and_how_to_go_on():
    assert str(Stopped("train")) == (
        "train: wanted to finish, found SIGTERM; run it again to continue from what is finished."
    )


def test_every_error_says_in_its_docstring_when_it_is_raised():
    assert [kind.__name__ for kind in KINDS if not kind.__doc__] == []
