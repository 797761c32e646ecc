"""The evaluate story over scripted engines: the split, the figures, the refusals, the resume."""

from collections import Counter
from pathlib import Path

import msgspec
import pytest

from eagle3 import artifact as artifacts
from eagle3.config import EngineConfig
from eagle3.conversations import RowRecord
from eagle3.conversations.records import encode_lines
from eagle3.errors import AcceptanceInvalid, ConfigError, ManifestInvalid, UpstreamMissing
from eagle3.evaluation import PLAIN, TRAINED, UNTRAINED
from eagle3.store import open_store
from eagle3.upstream import gate
from jobs.evaluate import draft_folder, story
from tests.evaluable import TOKENIZER, VERIFIER, Killed, Scripted, World, asked


@pytest.fixture
def engines():
    """A script of its own for each test."""
    return type("Script", (Scripted,), {"log": []})


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(f"{tmp_path}/run")


def test_an_evaluation_says_what_was_accepted_and_commits_it(world, engines, capsys):
    line = story(world.run(), engines)
    assert "acceptance length 3.00 on 10 held-out prompts" in line
    manifest = gate(world.store.child("evaluate").url, ("evaluate",)).manifest
    assert manifest.facts["acceptance_length_trained"] == 3.0
    assert manifest.facts["acceptance_length_untrained"] == 1.0
    assert manifest.facts["acceptance_per_position"] == [1.0, 1.0, 0.0]
    assert manifest.facts["lossless"] is True
    assert manifest.facts["near_tie_divergences"] == 0
    assert manifest.verifier == VERIFIER
    assert manifest.tokenizer == TOKENIZER
    assert set(manifest.measured) >= {
        "tokens_per_second_with_draft",
        "tokens_per_second_without",
        "speedup",
        "speedup_batch_4",
    }
    assert "3.00 tokens per verifier step" in capsys.readouterr().out
    assert "some/verifier" in world.store.read_bytes("evaluate/report.html").decode()


def test_every_engine_runs_once_and_is_stopped_before_the_next(world, engines):
    story(world.run(), engines)
    starts = [line for line in engines.log if line.split()[0] in ("start", "stop")]
    assert starts == [
        f"{word} {name}" for name in (TRAINED, UNTRAINED, PLAIN) for word in ("start", "stop")
    ]
    assert Counter(asked(engines.log)) == {
        "trained 4": 2,
        "trained 2": 1,
        "trained 1": 3,
        "untrained 4": 2,
        "untrained 2": 1,
        "plain 4": 2,
        "plain 1": 3,
    }


def test_the_figures_of_each_prompt_are_written_beside_the_whole(world, engines):
    story(world.run(), engines)
    written = world.written()
    assert [prompt["drafts"] for prompt in written["prompts"]] == [4, 5] * 5
    assert [prompt["conversation"] for prompt in written["prompts"]] == [
        f"{place:032x}" for place in range(10)
    ]
    assert sum(prompt["drafts"] for prompt in written["prompts"]) == written["trained"]["drafts"]


def test_a_committed_evaluation_starts_nothing(world, engines):
    story(world.run(), engines)
    engines.log.clear()
    assert "already committed, acceptance length 3.00" in story(world.run(), engines)
    assert engines.log == []


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict:
    """What an evaluation writes that nobody disturbs."""
    world = World(f"{tmp_path_factory.mktemp('undisturbed')}/run")
    story(world.run(), type("Other", (Scripted,), {"log": []}))
    return world.written()


@pytest.mark.parametrize("moment", [2, 7, 13])
def test_a_killed_evaluation_goes_on_where_it_was(world, engines, moment, undisturbed):
    engines.kill_after = moment
    with pytest.raises(Killed):
        story(world.run(), engines)
    before = asked(engines.log)
    engines.kill_after = None
    engines.log.clear()
    story(world.run(), engines)
    assert len(before) == moment
    assert len(before) + len(asked(engines.log)) == 14, "no block is answered twice"
    timed = {"speed": None}
    assert {**world.written(), **timed} == {**undisturbed, **timed}


def test_a_resumed_evaluation_starts_only_the_engines_that_it_needs(world, engines):
    engines.kill_after = 7
    with pytest.raises(Killed):
        story(world.run(), engines)
    engines.kill_after = None
    engines.log.clear()
    story(world.run(), engines)
    assert [line for line in engines.log if "start" in line] == ["start untrained", "start plain"]


def test_a_speed_is_never_made_of_two_machines(world, engines, monkeypatch):
    engines.kill_after = 7
    with pytest.raises(Killed):
        story(world.run(), engines)
    engines.kill_after = None
    engines.log.clear()
    monkeypatch.setenv("NODE_NAME", "another")
    story(world.run(), engines)
    again = Counter(line for line in asked(engines.log) if line.startswith(TRAINED))
    assert again == {"trained 4": 2, "trained 1": 3}, "what is timed, and no more"
    speeds = world.written()["speed"]
    assert [(speed["host"], speed["attempts"]) for speed in speeds] == [("another", 1)] * 2


def test_a_speed_says_how_many_attempts_it_took(world, engines):
    engines.kill_after = 7
    with pytest.raises(Killed):
        story(world.run(), engines)
    engines.kill_after = None
    story(world.run(), engines)
    assert [speed["attempts"] for speed in world.written()["speed"]] == [2, 2]


def test_other_settings_do_not_continue_an_evaluation(world, engines):
    engines.kill_after = 3
    with pytest.raises(Killed):
        story(world.run(), engines)
    with pytest.raises(artifacts.IdentityConflict, match="num_speculative_tokens"):
        story(world.run(num_speculative_tokens=2), engines)


def test_answers_of_other_settings_count_for_nothing(world, engines):
    """As where an evaluation wakes that was taken for dead, after its prefix was begun anew."""
    engines.kill_after = 3
    with pytest.raises(Killed):
        story(world.run(), engines)
    world.store.delete("work/evaluate/claim.json")
    engines.kill_after = None
    engines.log.clear()
    story(world.run(num_speculative_tokens=2), engines)
    assert len(asked(engines.log)) == 14, "every block is answered anew"


def test_another_concurrency_may_continue_an_evaluation(world, engines):
    engines.kill_after = 3
    with pytest.raises(Killed):
        story(world.run(), engines)
    engines.kill_after = None
    assert "acceptance length 3.00" in story(world.run(concurrency=5), engines)


def test_an_export_without_the_untrained_draft_is_evaluated_alone(tmp_path, engines):
    world = World(f"{tmp_path}/run", untrained=False)
    story(world.run(), engines)
    assert "start untrained" not in engines.log
    assert world.written()["untrained"] is None


def test_prompts_one_at_a_time_are_not_answered_twice(world, engines):
    story(world.run(concurrency=1), engines)
    assert engines.log.count("trained 1") == 10
    assert [speed["batch"] for speed in world.written()["speed"]] == [1]


def test_fewer_prompts_than_asked_for_are_refused(tmp_path, engines):
    world = World(f"{tmp_path}/run", heldout=9)
    with pytest.raises(AcceptanceInvalid, match="wanted 10 held-out prompts, found 9"):
        story(world.run(), engines)
    assert engines.log == []


@pytest.mark.parametrize("field", ["lossless_prompts", "speed_prompts"])
def test_more_prompts_to_compare_or_time_than_to_answer_are_refused(world, engines, field):
    with pytest.raises(ConfigError, match=f"evaluate.{field}"):
        story(world.run(**{field: 11}), engines)


@pytest.mark.fault("B122")
def test_a_draft_that_never_drafted_is_refused(world, engines):
    engines.silent = True
    with pytest.raises(AcceptanceInvalid, match="at least one verify step"):
        story(world.run(), engines)
    assert artifacts.find(world.store.child("evaluate")) is None


def test_answers_that_do_not_add_up_to_the_engines_own_count_are_refused(world, engines):
    engines.miscounted = 1
    with pytest.raises(AcceptanceInvalid, match="counts of the trained engine"):
        story(world.run(), engines)
    assert artifacts.find(world.store.child("evaluate")) is None


def test_a_changed_output_in_float32_is_refused_at_any_gap(world, engines):
    engines.changed, engines.gap = {2: 9}, 1e-6
    with pytest.raises(AcceptanceInvalid, match="in prompt 2 at token 9 500 instead of 95"):
        story(world.run(), engines)
    assert artifacts.find(world.store.child("evaluate")) is None


def test_a_near_tie_in_bfloat16_is_allowed_and_counted(world, engines):
    engines.changed = {2: 9, 5: 0}
    story(world.run(engine=EngineConfig(dtype="bfloat16")), engines)
    written = world.written()
    assert [(d["prompt"], d["position"], d["gap"]) for d in written["divergences"]] == [
        (2, 9, 0.01),
        (5, 0, 0.01),
    ]
    facts = artifacts.find(world.store.child("evaluate")).manifest.facts
    assert (facts["near_tie_divergences"], facts["lossless"]) == (2, True)


def test_figures_with_another_bound_of_near_ties_are_another_evaluation(world, engines):
    story(world.run(), engines)
    with pytest.raises(artifacts.IdentityConflict, match=r"near_tie: wanted 0\.1.*found 0\.2"):
        story(world.run(near_tie=0.2), engines)


def test_a_changed_output_in_bfloat16_is_refused_beyond_a_near_tie(world, engines):
    engines.changed, engines.gap = {2: 9}, 0.11
    with pytest.raises(AcceptanceInvalid, match=r"0\.11 nats apart"):
        story(world.run(engine=EngineConfig(dtype="bfloat16")), engines)


def test_a_change_outside_the_compared_prompts_is_not_looked_for(world, engines):
    engines.changed = {8: 3}
    story(world.run(), engines)
    assert world.written()["lossless_prompts"] == 6


def test_a_conversation_on_both_sides_is_refused_before_any_engine_starts(tmp_path, engines):
    trained_on = World(f"{tmp_path}/one")
    leaked = World(f"{tmp_path}/two", heldout=0)
    rows = [World.row(f"{i:032x}") for i in (100, 3)]
    leaked.store.write_bytes("prepare/rows-000000.jsonl", encode_lines(rows))
    other = open_store(f"{tmp_path}/three")
    mixed = World.__new__(World)
    mixed.store, mixed.made = other, {}
    _chain(mixed, rows)
    run = mixed.run({"evaluate.prompts": trained_on.store.child("prepare").url})
    with pytest.raises(AcceptanceInvalid, match=f"found {3:016x}"[:20]):
        story(run, engines)
    assert engines.log == []


def _chain(world: World, rows: list[RowRecord]) -> None:
    """A run whose rows hold what another run's prompts hold."""
    world.make("verifier", (), {"config.json": b"{}"})
    world.make("prepare", (), {"rows-000000.jsonl": encode_lines(rows), "heldout.jsonl": b""})
    world.make("extract", ("prepare", "verifier"), {"hidden-000000.safetensors": b"states"})
    world.make("vocab", ("verifier",), {"coverage.json": b"{}"})
    world.make("train", ("extract", "vocab"), {"metrics.jsonl": b""})
    world.make("export", ("train", "verifier"), {"config.json": b"{}"})


def test_a_draft_whose_upstream_is_gone_is_refused(world, engines):
    world.store.delete("extract/data_config.json")
    with pytest.raises(UpstreamMissing, match="extract"):
        story(world.run(), engines)


def test_a_draft_whose_upstream_was_replaced_is_refused(world, engines):
    manifest = msgspec.structs.replace(world.made["extract"].manifest, identity="another")
    world.store.delete("extract/data_config.json")
    artifacts.commit(world.store.child("extract"), manifest)
    with pytest.raises(ManifestInvalid, match="extract"):
        story(world.run(), engines)


def test_an_exported_draft_with_a_flipped_byte_is_not_served(world, tmp_path):
    export = world.made["export"]
    assert draft_folder(export, tmp_path, TRAINED).name == "export"
    assert draft_folder(export, tmp_path, UNTRAINED).name == "untrained"
    export.store.write_bytes("model.safetensors", b"weightz")
    with pytest.raises(ManifestInvalid, match=r"model\.safetensors"):
        draft_folder(export, tmp_path, TRAINED)


def test_an_export_in_object_storage_is_brought_here_once(tmp_path):
    world = World("memory://evaluate-test/run")
    folder = draft_folder(world.made["export"], tmp_path / "export", UNTRAINED)
    assert (folder / "model.safetensors").read_bytes() == b"zeros"
    (folder / "model.safetensors").touch()
    assert draft_folder(world.made["export"], tmp_path / "export", TRAINED) == tmp_path / "export"
