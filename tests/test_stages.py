"""The table of stages is a pipeline: what a stage reads, an earlier one writes."""

from __future__ import annotations

import pytest

from eagle3.stages import ARTIFACT_KINDS, STAGE_NAMES, STAGES, Stage, stage_named


def test_every_word_names_one_stage_and_one_kind():
    assert len(set(STAGE_NAMES)) == len(STAGE_NAMES)
    assert len(set(ARTIFACT_KINDS)) == len(ARTIFACT_KINDS)


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_stage_reads_only_what_earlier_stages_write(stage: Stage):
    earlier = STAGES[: STAGES.index(stage)]
    written = {kind for one in earlier for kind in one.writes}
    assert {kind for kinds in stage.reads.values() for kind in kinds} <= written


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_a_stage_s_own_artefact_bears_its_name(stage: Stage):
    assert stage.writes[-1] == stage.name


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
def test_an_input_is_never_only_an_optional_stage_s_work(stage: Stage):
    optional = {one.name for one in STAGES if one.optional}
    for name, kinds in stage.reads.items():
        assert set(kinds) - optional, f"{stage.name}.{name} could not be without {kinds}"


def test_only_stages_without_gpus_run_in_the_base_image():
    assert {stage.image for stage in STAGES if stage.gpus == 0} <= {"base", "train"}
    assert all(stage.image != "base" for stage in STAGES if stage.gpus)


def test_no_other_word_names_a_stage():
    with pytest.raises(KeyError):
        stage_named("tokenise")
