"""regenerate on the shipped fake: whose answers are supervised, what is counted, how it goes on."""

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import yaml

from eagle3.artifact import Artifact
from eagle3.capture import Completion, FakeGenerator, Generator, Sampling, Told, nobody
from eagle3.conversations import RowRecord, read_row_records
from eagle3.errors import (
    ConfigError,
    ConversationsInvalid,
    IdentityConflict,
    Stopped,
    VerifierInvalid,
)
from eagle3.onpolicy import Answerer, Chat, Plan, answers_in, plan_answers, prompts_of
from eagle3.progress import Progress
from eagle3.shards import TokenRow, encode_rows, read_rows
from eagle3.store import Store, open_store
from eagle3.units import Span, Unit
from eagle3.verifier import load_verifier_artifact
from eagle3.vocab import load_counts
from eagle3.work import Work
from jobs import prepare, process, regenerate
from tests import chat_tokenizers as chats
from tests.tiny_run import (
    artifact_at,
    content_of,
    done_in,
    rows_of,
    stage_run,
    start_fake_generator,
    write_config,
    write_conversations,
)
from tests.tiny_verifiers import make_llama

END = 2


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a verifier, a configuration and a run that has been prepared."""
    folder = tmp_path_factory.mktemp("prepared")
    verifier = make_llama(folder / "verifier", num_layers=4)
    data = write_conversations(folder / "chats.jsonl", 40, turns=3)
    config = write_config(folder / "run.yaml", verifier, data)
    assert prepare.main(["--config", str(config), "--store", str(folder / "run")]) == 0
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil."""
    return Path(shutil.copytree(prepared, tmp_path / "copy"))


def store_of(folder: Path) -> Store:
    return open_store(str(folder / "run"))


def run_regenerate(
    folder: Path, start: regenerate.StartGenerator = start_fake_generator, *, index: int = 0
) -> str:
    run = stage_run("regenerate", folder / "run.yaml", store_of(folder), index=index)
    return regenerate.story(run, start)


def set_regenerate(folder: Path, **settings: object) -> None:
    config = yaml.safe_load((folder / "run.yaml").read_text())
    config["regenerate"] = {**config["regenerate"], **settings}
    (folder / "run.yaml").write_text(yaml.safe_dump(config))


def never(model: Path, plan: Plan) -> Generator:
    raise AssertionError("the engine was started")


def ending(share: float) -> regenerate.StartGenerator:
    """A fake of which so many tokens end an answer."""
    return lambda model, plan: FakeGenerator(vocab_size=400, end_id=END, end_share=share)


class Scripted:
    """Answers every prompt with the same ids, and keeps what it was asked."""

    def __init__(self, answer: Sequence[int], reason: str = "stop") -> None:
        self.answer = Completion(tuple(answer), reason)
        self.asked: list[tuple[list[list[int]], Sampling]] = []

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, told: Told = nobody
    ) -> list[Completion]:
        self.asked.append(([list(ids) for ids in prompts], sampling))
        for count in range(1, len(prompts) + 1):
            told(count)
        return [self.answer] * len(prompts)

    def close(self) -> None:
        pass


def said(role: str, content: str = "word") -> dict[str, Any]:
    return {"role": role, "content": content}


def supervised(row: TokenRow) -> list[int]:
    return [int(token) for token in row.input_ids[row.loss_mask == 1]]


def test_all_prompts_of_prepare_are_answered_and_only_answers_are_supervised(folder: Path) -> None:
    engine = Scripted([300, 301, END])
    run_regenerate(folder, lambda model, plan: engine)
    found = artifact_at(store_of(folder), "regenerate")
    before = artifact_at(store_of(folder), "prepare")
    assert found.manifest.rows_in == before.manifest.facts["conversations"]
    assert found.manifest.rejected == {}
    assert [row.row for row in rows_of(found)] == [row.row for row in rows_of(before)]
    for row in rows_of(found):
        answers, clipped = answers_in(row, [END])
        assert supervised(row) == [300, 301, END] * answers
        assert clipped == 0
    assert found.manifest.facts["turns"] == before.manifest.facts["turns"]
    assert found.manifest.max_seq_len == before.manifest.max_seq_len


def test_the_engine_s_start_is_told_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(regenerate, "VllmGenerator", lambda options: Scripted([300, END]))
    arguments = ["--config", str(folder / "run.yaml"), "--store", str(folder / "run")]
    assert regenerate.main(arguments) == 0
    assert regenerate.main(arguments) == 0
    assert capsys.readouterr().err.count("regenerate: starting vLLM\n") == 1


def test_the_bar_moves_within_a_unit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []
    monkeypatch.setattr(Progress, "under_way", lambda self, count: shown.append(count))
    run_regenerate(folder, lambda model, plan: Scripted([300, END]))
    unit_rows = max(shown)
    assert shown[:1] < [unit_rows]
    assert len(set(shown)) > unit_rows // 2


def test_the_next_prompt_is_rendered_with_the_verifiers_own_answer(folder: Path) -> None:
    engine = Scripted([300, 301, END])
    run_regenerate(folder, lambda model, plan: engine)
    first, second = engine.asked[0][0], engine.asked[1][0]
    assert any(later[: len(earlier)] == earlier for earlier in first for later in second)
    assert all([i for i in later if i in (300, 301)] == [300, 301] for later in second)


def test_the_same_unit_has_the_same_answers_whoever_asks(folder: Path, tmp_path: Path) -> None:
    set_regenerate(folder, temperature=0.7)
    again = Path(shutil.copytree(folder, tmp_path / "again"))
    run_regenerate(folder)
    run_regenerate(again, index=3)
    assert content_of(store_of(folder), "regenerate") == content_of(store_of(again), "regenerate")


def test_units_and_turns_are_sampled_with_seeds_of_their_own(folder: Path) -> None:
    set_regenerate(folder, temperature=0.7, top_k=20)
    engine = Scripted([300, END])
    run_regenerate(folder, lambda model, plan: engine)
    settings = [sampling for _, sampling in engine.asked]
    assert len({sampling.seed for sampling in settings}) == len(settings) > 3
    assert {(s.max_tokens, s.temperature, s.top_k) for s in settings} == {(24, 0.7, 20)}


def test_token_counts_are_those_of_the_supervised_tokens_written(folder: Path) -> None:
    run_regenerate(folder)
    found = artifact_at(store_of(folder), "regenerate")
    counts = load_counts(found, vocab_size=512)
    wanted = torch.zeros(512, dtype=torch.int64)
    for row in rows_of(found):
        for token in supervised(row):
            wanted[token] += 1
    assert torch.equal(counts, wanted)
    assert int(counts.sum()) == found.manifest.facts["supervised_tokens"]


def test_clipped_answers_are_counted_as_clipped_and_teach_no_end(folder: Path) -> None:
    run_regenerate(folder, lambda model, plan: Scripted([300, 301], "length"))
    facts = artifact_at(store_of(folder), "regenerate").manifest.facts
    assert facts["clipped"] == facts["turns"] > 0
    rows = rows_of(artifact_at(store_of(folder), "regenerate"))
    assert END not in {token for row in rows for token in supervised(row)}


def test_some_answers_end_and_some_are_clipped(folder: Path) -> None:
    run_regenerate(folder, ending(0.05))
    facts = artifact_at(store_of(folder), "regenerate").manifest.facts
    assert 0 < facts["clipped"] < facts["turns"]


def test_a_verifier_that_says_nothing_leaves_nothing_to_train_on(folder: Path) -> None:
    with pytest.raises(ConversationsInvalid, match="empty_answer"):
        run_regenerate(folder, lambda model, plan: Scripted([END]))


def test_an_answer_too_long_for_any_row_is_refused_before_the_engine(folder: Path) -> None:
    set_regenerate(folder, max_new_tokens=256)
    with pytest.raises(ConfigError, match=r"regenerate\.max_new_tokens"):
        run_regenerate(folder, never)


def test_a_turn_is_asked_only_where_its_longest_answer_fits(folder: Path) -> None:
    set_regenerate(folder, max_new_tokens=220)
    engine = Scripted([300] * 219 + [END])
    run_regenerate(folder, lambda model, plan: engine)
    found = artifact_at(store_of(folder), "regenerate")
    asked = [len(ids) for prompts, _ in engine.asked for ids in prompts]
    assert 0 < max(asked) <= 256 - 220
    assert found.manifest.rejected["too_long"] == found.manifest.rows_in - len(asked) > 0
    assert {len(supervised(row)) for row in rows_of(found)} == {220}


def test_other_weights_at_the_verifiers_path_are_refused_before_the_engine(folder: Path) -> None:
    config = yaml.safe_load((folder / "run.yaml").read_text())
    config["verifier"]["source"] = str(make_llama(folder / "other", num_layers=4, seed=1))
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(VerifierInvalid, match="fingerprint"):
        run_regenerate(folder, never)


def test_when_only_the_manifest_is_missing_no_engine_is_started(folder: Path) -> None:
    run_regenerate(folder)
    before = content_of(store_of(folder), "regenerate")
    store_of(folder).delete("regenerate/data_config.json")
    run_regenerate(folder, never)
    assert content_of(store_of(folder), "regenerate") == before
    assert run_regenerate(folder, never).startswith("already committed")


def test_another_workers_answers_are_adopted_and_counted(folder: Path) -> None:
    """A unit's object stands without a record, with other answers: its record tells of those."""
    run_regenerate(folder, ending(0.0))
    store = store_of(folder)
    path = "regenerate/rows-000000.safetensors"
    standing = read_rows(store, path)
    rows = [
        TokenRow(row=row.row, input_ids=row.input_ids[:-1], loss_mask=row.loss_mask[:-1])
        for row in standing
        if row.row[:9] != standing[0].row[:9]
    ]
    tokens = sum(len(supervised(row)) for row in rows)
    for name in ("rows-000000.safetensors", "data_config.json", "token_counts.safetensors"):
        store.delete(f"regenerate/{name}")
    done_in(store, "regenerate").delete("units/000000.json")
    identity = Work(store, "regenerate").identity
    store.create_bytes(path, encode_rows(rows, identity=identity))
    run_regenerate(folder, ending(0.0))
    manifest = artifact_at(store, "regenerate").manifest
    assert manifest.rejected == {"rejected_by_another_worker": 1}
    others = [read_rows(store.child("regenerate"), e.path) for e in manifest.files[1:] if e.samples]
    tokens += sum(len(supervised(row)) for rows in others for row in rows)
    assert manifest.facts["supervised_tokens"] == tokens


@pytest.mark.parametrize("identity", ["", "0" * 64])
def test_answers_of_other_settings_are_never_adopted(folder: Path, identity: str) -> None:
    """A seed and a temperature leave no trace in answers."""
    run_regenerate(folder)
    store, path = store_of(folder), "regenerate/rows-000000.safetensors"
    rows = read_rows(store, path)
    for name in (path, "regenerate/data_config.json"):
        store.delete(name)
    done_in(store, "regenerate").delete("units/000000.json")
    store.create_bytes(path, encode_rows(rows, identity=identity))
    with pytest.raises(IdentityConflict, match="stop the process that wrote it"):
        run_regenerate(folder)
    assert not store.exists("regenerate/data_config.json")


def test_another_workers_answers_are_adopted_where_every_answer_is_empty_here(folder: Path) -> None:
    run_regenerate(folder, ending(0.0))
    before = content_of(store_of(folder), "regenerate")
    store_of(folder).delete("regenerate/data_config.json")
    done_in(store_of(folder), "regenerate").delete("units/000000.json")
    run_regenerate(folder, lambda model, plan: Scripted([END]))
    assert content_of(store_of(folder), "regenerate") == before


def test_sigterm_stops_between_two_turns_and_the_next_run_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_stop", threading.Event())
    calm = Path(shutil.copytree(folder, tmp_path / "calm"))
    run_regenerate(calm, lambda model, plan: Scripted([300, END]))

    class StopsInTheSecondUnit(Scripted):
        def generate(
            self, prompts: Sequence[Sequence[int]], sampling: Sampling, told: Told = nobody
        ) -> list[Completion]:
            answers = super().generate(prompts, sampling, told)
            if done_in(store_of(folder), "regenerate").exists("units/000000.json"):
                process._stop.set()
            return answers

    with pytest.raises(Stopped):
        run_regenerate(folder, lambda model, plan: StopsInTheSecondUnit([300, END]))
    assert len(done_in(store_of(folder), "regenerate").list("units")) == 1
    process._stop.clear()
    run_regenerate(folder, lambda model, plan: Scripted([300, END]))
    assert content_of(store_of(folder), "regenerate") == content_of(store_of(calm), "regenerate")


@pytest.mark.parametrize(("temperature", "refused"), [(0.0, False), (0.7, True)])
def test_how_many_prompts_share_a_step_is_a_setting_of_sampled_answers(
    folder: Path, temperature: float, refused: bool
) -> None:
    """Greedy answers do not depend on their company; sampled ones share its random numbers."""
    set_regenerate(folder, temperature=temperature)
    run_regenerate(folder)
    set_regenerate(folder, engine={"dtype": "float32", "max_num_seqs": 4})
    if refused:
        with pytest.raises(IdentityConflict, match=r"engine\.max_num_seqs: wanted 8.*found 4"):
            run_regenerate(folder, never)
    else:
        assert run_regenerate(folder, never).startswith("already committed")


def test_the_memory_of_the_engine_is_no_setting_of_its_answers(folder: Path) -> None:
    engine = {"dtype": "float32", "max_num_seqs": 8}
    run_regenerate(folder)
    set_regenerate(folder, engine={**engine, "extra": {"kv_cache_memory_bytes": 1 << 28}})
    assert run_regenerate(folder, never).startswith("already committed")
    set_regenerate(folder, engine={**engine, "extra": {"enforce_eager": True}})
    with pytest.raises(IdentityConflict, match=r"engine\.extra"):
        run_regenerate(folder, never)


def test_a_conversation_of_several_prepared_rows_is_answered_once(folder: Path) -> None:
    run = stage_run("regenerate", folder / "run.yaml", store_of(folder))
    verifier = load_verifier_artifact(run.inputs["verifier"], folder / "scratch")
    messages = [said("user", "one"), said("assistant"), said("user", "two"), said("assistant")]
    records = [
        RowRecord(row="000000007.0", conversation="c", source=0, messages=messages),
        RowRecord(row="000000007.1", conversation="c", source=0, messages=[]),
    ]
    unit = Unit(number=0, spans=(Span(path="x", start=0, stop=2),))
    engine = Scripted([300, END])
    plan = plan_answers(run.inputs["rows"], run.config.regenerate)
    told: list[int] = []
    chats = Answerer(engine, verifier, plan, run.check_stop).answer(unit, records, told.append)
    assert [chat.name for chat in chats] == ["000000007"]
    assert [len(prompts) for prompts, _ in engine.asked] == [1, 1]
    # Each of its two turns moves the bar by half of the unit's two rows.
    assert told == [1, 2]
    (row,) = chats[0].rows()
    assert row.row == "000000007.0"
    assert supervised(row) == [300, END, 300, END]


def test_prompts_are_rendered_with_the_date_of_the_rows(folder: Path) -> None:
    run = stage_run("regenerate", folder / "run.yaml", store_of(folder))
    verifier = load_verifier_artifact(run.inputs["verifier"], folder / "scratch")
    asking = "{{ strftime_now('%Y-%m-%d') }}"
    verifier.load_tokenizer().chat_template = asking + chats.CHATML
    rows = run.inputs["rows"]
    told = {**rows.manifest.config, "template_date": "2026-01-31"}
    manifest = msgspec.structs.replace(rows.manifest, config=told)
    dated = Artifact(store=rows.store, manifest=manifest)
    record = RowRecord(row="000000007.0", conversation="c", source=0, messages=[said("user")])
    unit, engine = Unit(number=0, spans=(Span(path="x", start=0, stop=1),)), Scripted([300, END])
    plan = plan_answers(dated, run.config.regenerate)
    Answerer(engine, verifier, plan, run.check_stop).answer(unit, [record], nobody)
    (((prompt,), _),) = engine.asked
    assert verifier.load_tokenizer().decode(prompt).startswith("2026-01-31")
    undated = plan_answers(rows, run.config.regenerate)
    with pytest.raises(ConfigError, match=r"prepare\.template_date"):
        Answerer(engine, verifier, undated, run.check_stop)


def test_an_empty_answer_ends_a_conversation_before_its_turn() -> None:
    chat = chat_of(said("user"), said("assistant"), said("user"))
    renderer = Plain()
    assert chat.next_prompt(renderer) is not None
    chat.take_answer([300, END], "fine")
    assert chat.next_prompt(renderer) is not None
    chat.take_answer([END], " ")
    assert chat.next_prompt(renderer) is None
    assert chat.reason == "empty_answer"
    assert [supervised(row) for row in chat.rows()] == [[300, END]]


def test_a_history_that_is_rendered_anew_starts_another_row() -> None:
    chat = chat_of(said("user"), said("assistant"), said("user"))
    renderer = Plain(forgets=True)
    for _ in range(2):
        assert chat.next_prompt(renderer) is not None
        chat.take_answer([300, END], "fine")
    assert [row.row for row in chat.rows()] == ["000000001.0", "000000001.1"]


def test_what_was_said_before_each_answer_is_a_turn() -> None:
    messages = [said("system"), said("user", "a"), said("assistant"), said("user", "b")]
    assert prompts_of(messages) == [messages[:2], messages[3:]]
    assert prompts_of([*messages, said("user", "c")]) == [
        messages[:2],
        [messages[3], said("user", "c")],
    ]


def test_a_tools_result_ends_the_turns() -> None:
    messages = [said("user", "a"), said("assistant"), said("tool"), said("assistant")]
    assert prompts_of([*messages, said("user", "b")]) == [[said("user", "a")]]


def test_answers_are_told_from_clipped_ones_by_their_last_token() -> None:
    row = TokenRow(
        row="r",
        input_ids=torch.tensor([9, 5, END, 9, 9, 5, 5, 9, 5, END]),
        loss_mask=torch.tensor([0, 1, 1, 0, 0, 1, 1, 0, 1, 1]),
    )
    assert answers_in(row, [END]) == (3, 1)


class Plain:
    """Renders a message as 9 and its length; one that forgets drops all but the last message."""

    def __init__(self, *, forgets: bool = False) -> None:
        self._forgets = forgets

    def prompt_ids(self, messages: Sequence[dict[str, Any]], tools: object = None) -> list[int]:
        """See `Renderer.prompt_ids`."""
        if self._forgets:
            return [8, len(messages)]
        ids: list[int] = []
        for message in messages:
            ids += [300, END] if message["role"] == "assistant" else [9, len(message["content"])]
        return [*ids, 9]


def chat_of(*messages: dict[str, Any]) -> Chat:
    return Chat("000000001", messages, None, max_seq_len=64, max_new_tokens=8)


def test_the_messages_of_a_held_out_conversation_are_never_asked(folder: Path) -> None:
    engine = Scripted([300, END])
    run_regenerate(folder, lambda model, plan: engine)
    prepared = artifact_at(store_of(folder), "prepare")
    heldout = prepared.read("heldout.jsonl").splitlines()
    assert len(heldout) > 2
    conversations = {
        record.conversation for record in read_row_records(prepared, "rows-000000.jsonl")
    }
    assert all(yaml.safe_load(line)["conversation"] not in conversations for line in heldout)
    prompts = {tuple(ids) for prompts, _ in engine.asked for ids in prompts}
    assert all(tuple(yaml.safe_load(line)["input_ids"]) not in prompts for line in heldout)
