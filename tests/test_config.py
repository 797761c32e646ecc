"""The configuration: strict, explained, and able to tell what changes a result."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from eagle3 import config as configs
from eagle3 import strict_yaml
from eagle3.config import (
    RunConfig,
    load_config,
    name_when_served,
    parse_config,
)
from eagle3.config_fields import field_meta, settings_that_affect
from eagle3.config_text import render, template
from eagle3.errors import ConfigError
from eagle3.stages import STAGE_NAMES

SMALLEST: dict[str, Any] = {"verifier": {"source": "org/model"}, "prepare": {"data": ["a.jsonl"]}}

SECTIONS = [
    kind
    for kind in vars(configs).values()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind is not msgspec.Struct
]


def with_fields(**changes: Any) -> dict[str, Any]:
    """The smallest configuration with `section__field=value` set."""
    raw = {name: dict(section) for name, section in SMALLEST.items()}
    for name, value in changes.items():
        *sections, field = name.split("__")
        place = raw
        for section in sections:
            place = place.setdefault(section, {})
        place[field] = value
    return raw


def refusal(raw: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    assert "\n" not in str(caught.value)
    return caught.value


def test_two_fields_are_enough_and_the_rest_has_defaults():
    config = parse_config(SMALLEST)
    assert config.prepare.data == ("a.jsonl",)
    assert config.regenerate.enabled


@pytest.mark.parametrize(
    ("raw", "field", "hint"),
    [
        (with_fields(trian__epochs=1), "trian", "write train"),
        (with_fields(train__epoch=1), "train.epoch", "write train.epochs"),
        (with_fields(train__lr=1), "train.lr", "known:"),
        (with_fields(extract__engine__dtyp="x"), "extract.engine.dtyp", "extract.engine.dtype"),
        (with_fields(**{"train__geometry__num-layers": 1}), "num-layers", "num_layers"),
    ],
)
@pytest.mark.fault("B90")
def test_an_unknown_key_is_refused_with_the_nearest_name(raw, field, hint):
    error = refusal(raw)
    assert field in error.field
    assert hint in error.remedy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train__epochs", 0),
        ("train__epochs", "3"),
        ("train__epochs", 2.5),
        ("train__optimizer", "sgd"),
        ("train__learning_rate", 0),
        ("prepare__heldout_share", 1.5),
        ("prepare__max_seq_len", 1),
        ("regenerate__enabled", "false"),
        ("regenerate__temperature", -1),
        ("regenerate__engine__dtype", "float16"),
        ("verifier__source", None),
        ("prepare__data", "a.jsonl"),
        ("prepare__data", []),
        ("evaluate", None),
        ("inputs", ["train.states"]),
        ("train__learning_rate", float("inf")),
        ("train__learning_rate", float("nan")),
        ("regenerate__temperature", float("inf")),
    ],
)
@pytest.mark.fault("B90")
def test_a_value_of_the_wrong_type_or_range_is_refused_by_its_field(name, value):
    error = refusal(with_fields(**{name: value}))
    assert error.field == name.replace("__", ".")


def test_what_is_wrong_is_said_in_the_words_of_yaml():
    error = refusal(with_fields(prepare__data="chats.jsonl"))
    assert error.found == "expected a list, got text"


def test_a_local_folder_is_not_taken_for_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    assert refusal(with_fields(verifier__source="model")).field == "verifier.serving_name"


@pytest.mark.parametrize("raw", [None, [], "text", 3])
def test_a_configuration_that_is_no_mapping_is_refused(raw):
    assert refusal(raw).exit_code == 64


@pytest.mark.parametrize("missing", ["verifier", "prepare"])
def test_a_missing_required_section_is_named(missing):
    raw = {name: section for name, section in SMALLEST.items() if name != missing}
    assert missing in str(refusal(raw))


def test_rows_longer_than_a_training_step_are_refused_and_not_cut():
    error = refusal(with_fields(prepare__max_seq_len=4096, train__total_seq_len=2048))
    assert error.field == "prepare.max_seq_len"
    assert "2048" in error.wanted
    assert error.found == "4096"


@pytest.mark.parametrize("source", ["/models/mine", "s3://models/mine", "./mine", "a/b/c"])
def test_a_verifier_whose_name_when_served_is_unknown_is_refused(source):
    """The exported draft carries it; a training pod's own path would serve nowhere."""
    assert refusal(with_fields(verifier__source=source)).field == "verifier.serving_name"
    named = with_fields(verifier__source=source, verifier__serving_name="org/mine")
    assert name_when_served(parse_config(named).verifier) == "org/mine"
    assert name_when_served(parse_config(SMALLEST).verifier) == "org/model"


def test_an_input_that_no_stage_reads_is_refused_with_the_nearest():
    error = refusal(with_fields(inputs={"train.state": "s3://bucket/other/extract"}))
    assert error.remedy == "write train.states"


@pytest.mark.parametrize("ids", [[2, 30, 61], [2, 30, 61, 58], [2, 2, 58, 61], [1, 2, 3, 4, 5]])
def test_layer_ids_must_be_three_auxiliary_ones_and_the_last(ids):
    assert refusal(with_fields(extract__layer_ids=ids)).field == "extract.layer_ids"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("train: {epochs: 1, epochs: 2}", "'epochs' a second time in line 1"),
        ("train:\n\tepochs: 1", "line 2"),
        ("train: [1", "line 1"),
        ("a: !!python/object:os.system x", "line 1"),
        (
            "prepare:\n  template_date: 2026-13-45",
            "what cannot be read as timestamp (month must be in 1..12) in",
        ),
        ("a: 2026-01-31 25:61:61", "read as timestamp"),
        (f"a: {'9' * 5000}", "read as int"),
        ("a: !!int b", "line 1"),
        ("a: !!bool b", "line 1"),
        ("a: !!float b", "line 1"),
        ("a: !!set [b]", "line 1"),
        ("a: !!binary é", "line 1"),
        ("a: !!omap b", "line 1"),
        ('a: "\\ud800"', "half of a surrogate pair, which is no character in line 1"),
        ("a: &b {c: *b}", "recursive node in line 1"),
        ("a: &b [[*b]]", "recursive node in line 1"),
        ("on: {}", "the key 'on', which is no text without quotes in line 1"),
        ("? [a]\n: b", "the key a list or mapping"),
        (f"a: {'[' * 5000}", "nested too deep"),
        ("a: 1\n---\nb: 2", "another document in line 2"),
    ],
)
def test_bad_yaml_is_one_sentence_with_the_line(tmp_path, text, found):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert found in caught.value.found
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00bad"])
def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path, content):
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="readable YAML"):
        load_config(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("verifier__source", ""),
        ("extract__engine__gpu_memory_utilization", 0),
        ("prepare__max_heldout", 10**30),
        ("prepare__max_seq_len", 10**30),
    ],
)
def test_a_value_that_no_run_can_use_is_refused(field, value):
    assert refusal(with_fields(**{field: value})).field == field.replace("__", ".")


@pytest.mark.parametrize(
    ("text", "found"), [("", "nothing"), ("a", "a single value"), ("[]", "a list")]
)
def test_a_file_without_sections_is_said_in_words(tmp_path, text, found):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="mapping of sections") as caught:
        load_config(path)
    assert caught.value.found == found


PIECES = [
    *(
        "a",
        "verifier",
        ": ",
        "- ",
        "\n",
        "  ",
        "[",
        "]",
        "{",
        "}",
        "? ",
        "&b ",
        "*b",
        "<<",
        "---\n",
    ),
    *(
        "!!int ",
        "!!float ",
        "!!bool ",
        "!!set ",
        "!!omap ",
        "!!pairs ",
        "!!binary ",
        "!!timestamp ",
    ),
    *(
        "2026-13-01",
        "1e999",
        ".nan",
        "on",
        "~",
        "0x",
        "1:60",
        '"\\ud800"',
        '"\\0"',
        "\t",
        "#",
        "|",
        "é",
    ),
]


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join) | st.text())
def test_any_text_is_a_configuration_or_one_sentence(text):
    with contextlib.suppress(yaml.YAMLError, ConfigError):
        parse_config(strict_yaml.loads(text))


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "+1E-4", "0.0001"])
def test_a_learning_rate_is_a_number_however_it_is_written(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(
        f"verifier: {{source: m}}\nprepare: {{data: [a]}}\ntrain: {{learning_rate: {text}}}"
    )
    assert load_config(path).train.learning_rate == 1e-4


def test_merged_keys_of_an_anchor_are_no_repetition():
    assert strict_yaml.loads("a: &a {x: 1}\nb: {<<: *a, x: 2}") == {"a": {"x": 1}, "b": {"x": 2}}


def test_what_affects_the_result_is_told_from_what_does_not():
    config = parse_config(SMALLEST)
    extract = settings_that_affect(config.extract)
    assert "unit_rows" in extract
    assert "dtype" in extract["engine"]
    assert "max_num_seqs" not in extract["engine"]
    assert "num_workers" not in settings_that_affect(config.train)


def test_every_stage_has_a_section_of_its_name():
    assert set(STAGE_NAMES) <= {field.name for field in msgspec.structs.fields(RunConfig)}


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_a_section_is_strict_frozen_and_says_what_each_field_means(section):
    settings = section.__struct_config__
    assert settings.frozen
    assert settings.forbid_unknown_fields
    for field in msgspec.structs.fields(section):
        assert field_meta(field)["text"], f"{section.__name__}.{field.name} has no _doc(...)"


def test_the_printed_configuration_reads_back_as_itself():
    config = parse_config(
        with_fields(
            prepare__data=["s3://b/a: b.jsonl", "c#d.jsonl"],
            prepare__roles={"yes": "user", "model": "assistant"},
            train__learning_rate=3e-5,
            extract__layer_ids=[2, 4, 5, 8],
            regenerate__engine__extra={"compilation_config": {"custom_ops": ["all"]}},
            train__geometry__rope={"rope_type": "yarn", "factor": 64.0},
        )
    )
    text = render(config)
    assert parse_config(strict_yaml.loads(text)) == config


def test_the_template_is_a_configuration_with_every_field_explained():
    text = template()
    assert parse_config(strict_yaml.loads(text)).train == configs.TrainConfig()
    for name in field_names(RunConfig):
        assert f"{name}:" in text
    assert all(len(line) <= 100 for line in text.splitlines())


def field_names(section: type[msgspec.Struct]) -> Iterator[str]:
    for field in msgspec.structs.fields(section):
        yield field.name
        info = msgspec.inspect.type_info(field.type)
        below = info.type if isinstance(info, msgspec.inspect.Metadata) else info
        if isinstance(below, msgspec.inspect.StructType):
            yield from field_names(below.cls)


@pytest.mark.parametrize("path", sorted(Path("docs/examples").glob("*.yaml")), ids=lambda p: p.name)
def test_an_example_of_the_docs_is_valid(path):
    assert isinstance(load_config(path), RunConfig)


@pytest.mark.parametrize("text", ["2026-01-31", "'2026-01-31'"])
def test_a_date_is_one_however_it_is_written(text):
    raw = strict_yaml.loads(
        f"verifier: {{source: m/m}}\nprepare: {{data: [a], template_date: {text}}}"
    )
    config = parse_config(raw)
    assert config.prepare.template_date == datetime.date(2026, 1, 31)
    assert settings_that_affect(config.prepare)["template_date"] == "2026-01-31"
    assert parse_config(strict_yaml.loads(render(config))) == config


@pytest.mark.parametrize("value", ["today", "2026-02-30", 2026])
def test_what_is_no_date_is_refused(value):
    assert "prepare.template_date" in str(refusal(with_fields(prepare__template_date=value)))
