"""prepare, whole: real files in, two committed artefacts out, the same bytes however it went."""

import functools
import gzip
import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml
from safetensors.torch import load

from eagle3 import artifact as artifacts
from eagle3.artifact import Artifact
from eagle3.conversations import (
    RawRow,
    Source,
    open_sources,
    read_heldout,
    read_rejected,
    read_row_records,
    rejected_in_words,
)
from eagle3.conversations.seen import Seen
from eagle3.conversations.split import conversation_id
from eagle3.errors import ConfigError, ConversationsInvalid, ShardInvalid
from eagle3.manifest import MANIFEST_NAME
from eagle3.shards import TokenRow, read_rows
from eagle3.store import open_store
from jobs import prepare
from tests.tiny_verifiers import CHAT_TEMPLATE, make_llama

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("verifier"), num_layers=4)


def chat(index: int, turns: int = 2) -> dict[str, Any]:
    messages = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"Question {turn} of chat {index}?"})
        messages.append({"role": "assistant", "content": f"Answer {turn} of chat {index}."})
    return {"messages": messages}


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


def write_config(tmp_path: Path, verifier: Path, *data: Path | str, **settings: Any) -> Path:
    config = {
        "verifier": {"source": str(verifier), "serving_name": "tests/tiny"},
        "prepare": {
            "data": [str(d) for d in data],
            "shard_rows": 8,
            "max_seq_len": 256,
            **settings,
        },
        "vocab": {"draft_vocab_size": 128},
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def run_prepare(config: Path, store: Path | str) -> int:
    return prepare.main(["--config", str(config), "--store", str(store)])


def committed(store: Path | str, kind: str = "prepare") -> Artifact:
    found = artifacts.find(open_store(f"{store}/{kind}"))
    assert found is not None
    return found


def rows_of(artifact: Artifact) -> list[TokenRow]:
    names = [f.path for f in artifact.manifest.files if f.samples]
    return [row for name in names for row in read_rows(artifact.store, name)]


def digests(run: Path) -> dict[str, str]:
    """Path -> sha256 of every object of both artefacts, the manifests left out."""
    return {
        f"{kind}/{info.path}": store.sha256(info.path)
        for kind in ("prepare", "verifier")
        for store in [open_store(f"{run}/{kind}")]
        for info in store.list()
        if info.path != MANIFEST_NAME
    }


# ---- the artefacts ---------------------------------------------------------------------------


def test_everything_that_is_written_agrees_with_everything_else(
    tmp_path: Path, verifier: Path
) -> None:
    rows = [chat(i, turns=1 + i % 3) for i in range(60)]
    data = write_jsonl(tmp_path / "chats.jsonl", [*rows, rows[3], "broken", {"text": "x"}])
    config = write_config(tmp_path, verifier, data, heldout_share=0.3, max_heldout=5)
    assert run_prepare(config, tmp_path / "run") == 0

    made = committed(tmp_path / "run")
    manifest = made.manifest
    assert manifest.rows_in == 63
    assert manifest.rows_in == manifest.rows_kept + sum(manifest.rejected.values())
    assert manifest.rejected["duplicate"] == 1
    assert manifest.rejected["not_json"] == 1
    assert manifest.rejected["unknown_form"] == 1
    assert manifest.sources[0].sha256 == hashlib.sha256(data.read_bytes()).hexdigest()
    lines_of = {"duplicate": ["0:61"], "not_json": ["0:62"], "unknown_form": ["0:63"]}
    assert manifest.facts["rejected_lines"] == lines_of
    assert [(one.line, one.reason, one.text) for one in read_rejected(made)] == [
        (61, "duplicate", ""),
        (62, "not_json", "broken"),
        (63, "unknown_form", '{"text": "x"}'),
    ]

    tokens = rows_of(made)
    assert manifest.total_samples == len(tokens) == manifest.facts["conversations"]
    assert manifest.total_tokens == sum(len(row.input_ids) for row in tokens)
    lines = [
        record
        for entry in manifest.files
        if entry.path.startswith("rows-") and entry.path.endswith(".jsonl")
        for record in read_row_records(made, entry.path)
    ]
    assert [line.row for line in lines] == [row.row for row in tokens]
    assert all(line.messages == rows[int(line.row[:9])]["messages"] for line in lines)

    counts = load(made.store.read_bytes("token_counts.safetensors"))["counts"]
    supervised = torch.cat([row.input_ids[row.loss_mask == 1] for row in tokens])
    assert torch.equal(counts, torch.bincount(supervised, minlength=512))
    assert manifest.facts["supervised_tokens"] == len(supervised)

    prompts = read_heldout(made)
    assert len(prompts) == 5 == manifest.facts["heldout_prompts"]
    assert manifest.rejected["heldout_surplus"] == manifest.rows_in - 3 - len(tokens) - 5
    for prompt in prompts:
        assert prompt.messages == rows[int(prompt.row[:9])]["messages"][:1]
        assert prompt.conversation == conversation_id(prompt.messages)
    assert not {p.conversation for p in prompts} & {line.conversation for line in lines}

    beside = committed(tmp_path / "run", "verifier").manifest
    assert (beside.verifier, beside.tokenizer) == (manifest.verifier, manifest.tokenizer)


def test_the_same_prompt_is_never_on_both_sides(tmp_path: Path, verifier: Path) -> None:
    rows = []
    for i in range(40):
        for spelling in (f"Tell me about {i}", f"  tell ME about\n{i} "):
            user = {"role": "user", "content": spelling}
            answer = {"role": "assistant", "content": f"{spelling!r} is a number."}
            rows.append({"messages": [user, answer]})
    data = write_jsonl(tmp_path / "chats.jsonl", rows)
    config = write_config(tmp_path, verifier, data, heldout_share=0.5, max_heldout=1000)
    assert run_prepare(config, tmp_path / "run") == 0
    made = committed(tmp_path / "run")
    held = {" ".join(p.messages[0]["content"].lower().split()) for p in read_heldout(made)}
    trained = {
        " ".join(record.messages[0]["content"].lower().split())
        for entry in made.manifest.files
        if entry.path.startswith("rows-") and entry.path.endswith("jsonl")
        for record in read_row_records(made, entry.path)
    }
    assert len(held) + len(trained) == 40
    assert min(len(held), len(trained)) > 8
    assert not held & trained


def test_a_conversation_of_several_rows_is_told_once(tmp_path: Path, verifier: Path) -> None:
    folder = tmp_path / "forgetful"
    make_llama(folder, num_layers=4)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    # Begins with the number of prompts, so that no history begins as the one before it.
    settings["chat_template"] = (
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}" + CHAT_TEMPLATE
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    data = write_jsonl(tmp_path / "chats.jsonl", [chat(0, turns=3)])
    config = write_config(tmp_path, folder, data, heldout_share=0.0)
    assert run_prepare(config, tmp_path / "run") == 0
    made = committed(tmp_path / "run")
    records = read_row_records(made, "rows-000000.jsonl")
    assert [record.row for record in records] == ["000000000.0", "000000000.1", "000000000.2"]
    facts = made.manifest.facts
    # Three rows in place of the one that the last is.
    assert facts["tokens_once"] == len(rows_of(made)[-1].input_ids)
    assert facts["growth"] == round(made.manifest.total_tokens / facts["tokens_once"], 4) > 1.5
    assert f"({facts['growth']:.2f} times one render of each)" in prepare.told(made.manifest)
    assert [len(record.messages) for record in records] == [6, 0, 0]


# ---- files -----------------------------------------------------------------------------------


def test_lines_packed_or_not_and_parquet_give_the_same_rows(tmp_path: Path, verifier: Path) -> None:
    rows = [chat(i) for i in range(30)]
    plain = write_jsonl(tmp_path / "a.jsonl", rows)
    packed = tmp_path / "b.jsonl.gz"
    half = plain.read_bytes().find(b'{"messages"', len(plain.read_bytes()) // 2)
    # Two gzip members in one file, as `cat a.gz b.gz` makes them.
    text = plain.read_bytes()
    packed.write_bytes(gzip.compress(text[:half]) + gzip.compress(text[half:]))
    table = tmp_path / "c.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table, row_group_size=7)
    zst = tmp_path / "d.jsonl.zst"
    pack = functools.partial(pyarrow.compress, codec="zstd", asbytes=True)
    # Two frames in one file, as `cat a.zst b.zst` makes them.
    zst.write_bytes(pack(text[:half]) + pack(text[half:]))
    found = []
    for path in (plain, packed, table, zst):
        config = write_config(tmp_path, verifier, path)
        assert run_prepare(config, tmp_path / path.name.replace(".", "-")) == 0
        found.append(committed(tmp_path / path.name.replace(".", "-")).manifest)
    assert all(manifest.files == found[0].files for manifest in found)
    for manifest, path in zip(found, (plain, packed, table, zst), strict=True):
        assert manifest.sources[0].sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_source_is_counted_and_hashed_from_any_store(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"a": 1}\n\n{"a": 2}\r\n{"a": 3}'
    store = open_store("memory://sources")
    store.write_bytes("x.jsonl", data)
    facts, num_rows = Source("memory://sources/x.jsonl").measure()
    assert (facts.bytes, facts.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    rows = list(Source("memory://sources/x.jsonl").rows())
    assert num_rows == len(rows) == 3
    assert [(row.place, row.record()) for row in rows] == [
        (1, {"a": 1}),
        (3, {"a": 2}),
        (4, {"a": 3}),
    ]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("limit", [2, 3, 9])
def test_a_file_that_changes_between_its_two_readings_is_noticed(
    tmp_path: Path, form: str, limit: int
) -> None:
    def write(index: int) -> None:
        rows = [chat(0), chat(index), chat(2)]
        if form == "jsonl":
            write_jsonl(path, rows)
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)

    path = tmp_path / f"a.{form}"
    write(1)
    source = Source(str(path))
    source.measure()
    assert len(list(source.rows(limit))) == min(limit, 3)
    write(7)
    with pytest.raises(ConversationsInvalid, match="as when the stage began"):
        list(source.rows(limit))


def test_a_parquet_column_of_bytes_that_are_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    broken = pyarrow.array([b"\xff\xfe"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": broken, "messages": broken}), path)
    with pytest.raises(ConversationsInvalid, match="a whole file"):
        list(Source(str(path)).rows())


@pytest.mark.parametrize(
    ("section", "value", "words"),
    [
        ("vocab", {"draft_vocab_size": 513}, "vocab.draft_vocab_size: wanted at most 512"),
        ("vocab", {"draft_vocab_size": 1}, "vocab.draft_vocab_size: wanted at least"),
        ("prepare", {"max_seq_len": 2048}, "prepare.max_seq_len: wanted at most 2047"),
    ],
)
def test_what_later_stages_would_refuse_is_refused_at_once(
    tmp_path: Path, verifier: Path, section: str, value: dict[str, Any], words: str, capsys: Any
) -> None:
    config = write_config(tmp_path, verifier, write_jsonl(tmp_path / "a.jsonl", [chat(0)]))
    raw = yaml.safe_load(config.read_text())
    raw[section] = {**raw.get(section, {}), **value}
    config.write_text(yaml.safe_dump(raw))
    assert run_prepare(config, tmp_path / "run") == 64
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run/work").exists(), "nothing was claimed"


def test_a_file_that_is_not_there_is_a_fault_of_the_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a file of conversations"):
        Source(str(tmp_path / "absent.jsonl"))


def cut_gzip(path: Path) -> None:
    path.write_bytes(gzip.compress(b'{"a": 1}\n' * 1000)[:-9])


def cut_parquet(path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"messages": ["x"] * 1000}), path)
    path.write_bytes(path.read_bytes()[:-9])


def zstd(path: Path) -> None:
    path.write_bytes(b"\x28\xb5\x2f\xfd rest")


def cut_zstd(path: Path) -> None:
    lines = b"".join(b'{"a": %d}\n' % number for number in range(10_000))
    path.write_bytes(pyarrow.compress(lines, codec="zstd", asbytes=True)[:-9])


def bzip2(path: Path) -> None:
    path.write_bytes(b"BZh91AY&SY")


@pytest.mark.parametrize("spoil", [cut_gzip, cut_parquet, zstd, cut_zstd, bzip2])
def test_a_file_that_breaks_off_is_refused_as_a_whole(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    path = tmp_path / "data"
    spoil(path)
    with pytest.raises(ConversationsInvalid, match="data"):
        _read_all(path)


def _read_all(path: Path) -> list[RawRow]:
    return list(Source(str(path)).rows())


def test_keys_that_only_parquet_s_schema_gives_a_row_are_not_there(tmp_path: Path) -> None:
    tools = [[{"name": "a", "x": {"p": 1}}], [{"name": "b", "y": "other"}]]
    rows = [{**chat(at), "tools": of} for at, of in enumerate(tools)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = [row.record()["tools"] for row in _read_all(tmp_path / "a.parquet")]
    assert found == tools


def test_patterns_of_names_take_each_file_once_in_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        write_jsonl(tmp_path / name, [chat(0)])
    found = open_sources([f"{tmp_path}/*.jsonl", str(tmp_path / "c.txt")])
    assert [source.url.rpartition("/")[2] for source in found] == ["a.jsonl", "b.jsonl", "c.txt"]
    with pytest.raises(ConfigError, match="twice"):
        open_sources([f"{tmp_path}/*.jsonl", str(tmp_path / "a.jsonl")])
    with pytest.raises(ConfigError, match="none for"):
        open_sources([f"{tmp_path}/*.parquet"])


# ---- refusals --------------------------------------------------------------------------------


def test_too_many_rejected_rows_fail_with_reasons_and_lines(
    tmp_path: Path, verifier: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = {"messages": [{"role": "laguna_s", "content": "x"}]}
    data = write_jsonl(tmp_path / "chats.jsonl", [*[chat(i) for i in range(10)], bad, bad, "{"])
    config = write_config(tmp_path, verifier, data, max_rejected_share=0.2)
    assert run_prepare(config, tmp_path / "run") == 65
    said = capfd.readouterr().err
    assert "unknown_role:laguna_s 2" in said
    assert "chats.jsonl:11" in said
    assert "not_json 1" in said
    assert artifacts.find(open_store(f"{tmp_path}/run/prepare")) is None


@pytest.mark.parametrize("name", ["chats.json", "chats.json.gz"])
def test_a_json_array_is_refused_with_the_form_that_is_wanted(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "\n" + json.dumps([chat(i) for i in range(3)], indent=1)
    pack = gzip.compress if name.endswith("gz") else bytes
    (tmp_path / name).write_bytes(pack(text.encode()))
    config = write_config(tmp_path, tmp_path, tmp_path / name)
    assert run_prepare(config, tmp_path / "run") == 65
    said = capfd.readouterr().err
    assert f"{name}: wanted one JSON object a line, or Parquet, found a JSON array" in said
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").rglob("claim.json"))


def test_a_file_of_no_records_at_all_is_told_the_form_that_is_wanted(
    tmp_path: Path, verifier: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "chats.csv"
    data.write_text("prompt,completion\nhello,hi\n")
    assert run_prepare(write_config(tmp_path, verifier, data), tmp_path / "run") == 65
    said = capfd.readouterr().err
    assert "write the data as one JSON object a line, or as Parquet." in said
    assert "max_rejected_share" not in said


def test_files_without_a_row_are_refused_by_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text("\n")
    assert run_prepare(write_config(tmp_path, tmp_path, data), tmp_path / "run") == 65
    said = capfd.readouterr().err
    assert "prepare.data: wanted at least one conversation, found no row in" in said
    assert "chats.jsonl; name files" in said


def test_where_every_row_is_rejected_the_reasons_are_told(
    tmp_path: Path, verifier: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "chats.jsonl"
    data.write_text('{"messages": [{"role": "wizard", "content": "a"}]}\n' * 3)
    config = write_config(tmp_path, verifier, data, max_rejected_share=1.0)
    assert run_prepare(config, tmp_path / "run") == 65
    said = capfd.readouterr().err
    assert "found none in 3 rows, rejected: unknown_role:wizard 3 (as " in said
    assert "smaller share" not in said


def test_b94_the_closing_line_counts_what_was_left_out_each_by_itself(
    tmp_path: Path, verifier: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", [chat(0), chat(1, turns=12), chat(2)])
    config = write_config(tmp_path, verifier, data, heldout_share=0.0)
    assert run_prepare(config, tmp_path / "run") == 0
    said = capsys.readouterr().out
    assert "1 clipped at 256 tokens, 0 prompts held out, 0 rejected" in said
    assert "1.00 times one render of each" in said
    assert committed(tmp_path / "run").manifest.facts["clipped"] == 1


def test_what_the_data_holds_reaches_no_terminal_raw(
    tmp_path: Path, verifier: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad = {"messages": [{"role": "bot\x1b[2J", "content": "x"}], "\x1b[31m": 1}
    data = write_jsonl(tmp_path / "a.jsonl", [chat(0), bad])
    for share in (0.6, 0.1):
        config = write_config(tmp_path, verifier, data, heldout_share=0.0, max_rejected_share=share)
        run_prepare(config, tmp_path / str(share))
        told = capfd.readouterr()
        assert "unknown_role:bot\\x1b[2J" in told.out + told.err
        assert "\x1b" not in told.out + told.err


def test_memory_does_not_hold_the_conversations_that_came_before() -> None:
    seen = Seen()
    assert [seen.add(one) for one in (b"a" * 16, b"b" * 16, b"a" * 16)] == [True, True, False]
    seen.close()


def test_the_closing_line_says_why_rows_were_rejected() -> None:
    assert rejected_in_words({}) == "0 rejected"
    assert rejected_in_words({"not_json": 1, "duplicate": 2}) == (
        "3 rejected (2 duplicate, 1 not_json)"
    )
    many = {f"unknown_role:{at}": 10 - at for at in range(7)}
    assert rejected_in_words(many).endswith("6 unknown_role:4, 9 of other reasons)")


def test_a_mixture_of_forms_fails_with_both_lines(
    tmp_path: Path, verifier: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    data = write_jsonl(tmp_path / "chats.jsonl", [chat(0), chat(1), other])
    assert run_prepare(write_config(tmp_path, verifier, data), tmp_path / "run") == 65
    said = capfd.readouterr().err
    assert "chats.jsonl:3" in said
    assert "as line 1" in said


def test_prompts_alone_are_prepared_where_regenerate_answers_them_and_nowhere_else(
    tmp_path: Path, verifier: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = [{"messages": chat(i)["messages"][:1]} for i in range(10)]
    data = write_jsonl(tmp_path / "chats.jsonl", asked)
    config = write_config(tmp_path, verifier, data, heldout_share=0.0)
    assert run_prepare(config, tmp_path / "run") == 0
    made = committed(tmp_path / "run")
    assert (made.manifest.facts["unanswered"], made.manifest.facts["supervised_tokens"]) == (10, 0)
    records = read_row_records(made, "rows-000000.jsonl")
    assert [record.messages for record in records] == [row["messages"] for row in asked[:8]]
    with pytest.raises(ShardInvalid):
        rows_of(made)
    settings = {**yaml.safe_load(config.read_text()), "regenerate": {"enabled": False}}
    config.write_text(yaml.safe_dump(settings))
    assert run_prepare(config, tmp_path / "run") == 65
    assert "prepare: regenerate.enabled: wanted True" in capfd.readouterr().err
    assert run_prepare(config, tmp_path / "other") == 65
    assert "no_answer" in capfd.readouterr().err


@pytest.mark.parametrize("change", ["template", "data", "length", "verifier"])
def test_b20_other_inputs_in_the_same_prefix_are_refused_by_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], change: str
) -> None:
    folder = make_llama(tmp_path / "verifier", num_layers=4)
    data = write_jsonl(tmp_path / "chats.jsonl", [chat(i) for i in range(10)])
    config = write_config(tmp_path, folder, data)
    assert run_prepare(config, tmp_path / "run") == 0
    assert run_prepare(config, tmp_path / "run") == 0
    assert "already committed" in capfd.readouterr().out
    before = digests(tmp_path / "run")
    if change == "template":
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text())
        settings["chat_template"] = CHAT_TEMPLATE + "{# another #}"
        path.write_text(json.dumps(settings))
    elif change == "data":
        write_jsonl(data, [chat(i) for i in range(11)])
    elif change == "length":
        write_config(tmp_path, folder, data, max_seq_len=255)
    else:
        make_llama(folder, num_layers=4, seed=1)
    assert run_prepare(config, tmp_path / "run") == 65
    named = {
        "template": "tokenizer",
        "data": "data.0",
        "length": "max_seq_len",
        "verifier": "verifier",
    }
    assert named[change] in capfd.readouterr().err
    assert digests(tmp_path / "run") == before


# ---- kills -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.fault("B19")
def test_workers_change_nothing_but_the_time(tmp_path: Path, verifier: Path) -> None:
    rows = [chat(i, turns=1 + i % 3) for i in range(300)]
    odd = ["broken", {"messages": [{"role": "bot", "content": "x"}]}, rows[5]]
    data = write_jsonl(tmp_path / "chats.jsonl", [{"text": "x"}] * 70 + rows + odd)
    found = {}
    for workers in (0, 2):
        config = write_config(tmp_path, verifier, data, num_workers=workers, max_rejected_share=0.5)
        assert run_prepare(config, tmp_path / str(workers)) == 0
        found[workers] = digests(tmp_path / str(workers))
        assert committed(tmp_path / str(workers)).manifest.rejected["unknown_form"] == 70
    assert found[0] == found[2]
    assert committed(tmp_path / "0").digest == committed(tmp_path / "2").digest


_KILLER = """
import os, signal, sys, time
from jobs import prepare
config, store, *moments = sys.argv[1:]
for moment in moments:
    child = os.fork()
    if not child:
        os._exit(prepare.main(["--config", config, "--store", store]))
    while not os.path.exists(os.path.join(store, moment)):
        assert not os.waitpid(child, os.WNOHANG)[0], f"it ended before {moment}"
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not os.path.exists(os.path.join(store, "prepare/data_config.json")), moment
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_any_moment_and_run_again_it_gives_the_same_objects(
    tmp_path: Path, verifier: Path
) -> None:
    data = write_jsonl(tmp_path / "chats.jsonl", [chat(i, turns=3) for i in range(400)])
    config = write_config(tmp_path, verifier, data)
    calm, disturbed = tmp_path / "calm", tmp_path / "disturbed"
    assert run_prepare(config, calm) == 0
    shards = sorted(name for name in digests(calm) if "rows-" in name)
    # The last moment lies between the last object and its manifest.
    moments = [*sorted(random.Random(7).sample(shards, 2)), "prepare/token_counts.safetensors"]
    command = [sys.executable, "-c", _KILLER, str(config), str(disturbed), *moments]
    subprocess.run(command, cwd=ROOT, check=True, stderr=subprocess.DEVNULL)
    assert run_prepare(config, disturbed) == 0
    assert digests(disturbed) == digests(calm)
    for kind in ("prepare", "verifier"):
        assert committed(disturbed, kind).digest == committed(calm, kind).digest
