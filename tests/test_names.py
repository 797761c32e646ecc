"""One word per stage everywhere: job file, section, command, README, Makefile, documents."""

from __future__ import annotations

import re
import subprocess
import sys

import msgspec
import pytest

from eagle3.config import RunConfig, parse_config
from eagle3.conversations.messages import COLUMNS
from eagle3.stages import ARTIFACT_KINDS, STAGE_NAMES, STAGES, stage_named
from eagle3.store import open_store
from jobs import process
from jobs.cli.artifacts import COMMANDS
from jobs.process import input_urls
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text()
AGENTS = (ROOT / "AGENTS.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()

# Modules of jobs/ that are no stage.
NO_STAGES = {
    "__init__",
    "arguments",
    "cli",
    "demo_inputs",
    "gate",
    "local",
    "process",
    "standard_output",
    "installed",
    "patience",
    "runner",
    "operate",
    "lineage",
    "delete",
    "importing",
    "kept_verifier",
    "plan",
    "show",
    "verify",
}

# File, in which a path or target that is written down must exist.
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "AGENTS.md", *(ROOT / "docs").glob("*.md")])


def table_rows(text: str) -> list[list[str]]:
    """The cells of every row of the Markdown tables in a text."""
    rows = [line.strip().strip("|").split("|") for line in text.splitlines() if "|" in line]
    return [[cell.strip().strip("`") for cell in row] for row in rows]


def test_every_stage_is_a_job_of_its_name_and_nothing_else_is():
    jobs = {path.stem for path in (ROOT / "jobs").glob("*.py")}
    assert jobs - NO_STAGES == set(STAGE_NAMES), "a stage is jobs/<name>.py and a row of STAGES"


def test_every_stage_is_a_section_of_the_configuration():
    fields = [field.name for field in msgspec.structs.fields(RunConfig)]
    sections = [name for name in fields if name not in ("verifier", "store", "inputs")]
    assert set(sections) == set(STAGE_NAMES)


@pytest.mark.parametrize("name", STAGE_NAMES)
def test_a_job_speaks_of_itself_by_its_name(name):
    text = (ROOT / "jobs" / f"{name}.py").read_text()
    assert text.startswith(f'"""{name}: '), f'jobs/{name}.py must begin with """{name}: ...'
    assert re.search(rf'run_stage\("{name}"', text), f"its main must call run_stage({name!r}, ...)"
    assert 'if __name__ == "__main__":\n    sys.exit(main())' in text


def test_the_command_has_every_stage():
    done = subprocess.run(
        [sys.executable, "-m", "jobs.cli", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    listed = re.findall(r"^  (\w+)  ", done.stdout, flags=re.MULTILINE)
    operated = {"status", "submit", "scale", "retry", "logs", "cancel"}
    own = {"run", "gate", "config", *operated, *COMMANDS}
    assert set(listed) == {*STAGE_NAMES, *own}


def test_the_readme_s_table_is_the_table_of_stages():
    rows = {row[0].split()[0].strip("`"): row for row in table_rows(README) if row[0]}
    for stage in STAGES:
        assert stage.name in rows, f"README's table of stages lacks {stage.name}"
        row = rows[stage.name]
        for kind in stage.writes:
            assert f"{kind}/" in row[2], f"README: {stage.name} writes {kind}/"
        assert row[3] == stage.image, f"README: {stage.name} runs in the image {stage.image}"
        assert bool(stage.gpus) == (row[4] != "0"), f"README: GPUs of {stage.name}"
    order = [row[0].split()[0].strip("`") for row in table_rows(README) if row[0]]
    assert [name for name in order if name in STAGE_NAMES][: len(STAGES)] == list(STAGE_NAMES)


def test_the_inputs_that_are_written_down_are_those_of_the_stages():
    rows = table_rows((ROOT / "docs" / "running.md").read_text())
    inputs = [row for row in rows if re.fullmatch(r"[a-z]+\.[a-z]+", row[0])]
    written = {row[0]: row[1].replace("`", "") for row in inputs}
    assert written == {
        f"{stage.name}.{name}": " or ".join(kinds)
        for stage in STAGES
        for name, kinds in stage.reads.items()
    }


def test_the_forms_that_are_written_down_are_those_that_are_read():
    text = (ROOT / "docs" / "running.md").read_text().partition("## The verifier")[0]
    named = {key for key in COLUMNS if f"`{key}`" in text or f'"{key}": ' in text}
    # Rows with a history beside the prompt are rejected, which is no form.
    assert COLUMNS - named == {"history"}


def test_the_exit_codes_of_the_readme_are_those_of_the_errors():
    codes = {int(row[0]) for row in table_rows(README) if row[0].isdecimal()}
    assert codes >= {0, 64, 65, 66, 69, 75, 77, 78, 143}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_target_that_is_written_down_exists(path):
    targets = set(re.findall(r"^([a-z-]+):", MAKEFILE, flags=re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)", path.read_text()))
    named |= set(re.findall(r"^(?:\$ )?make ([a-z-]+)", path.read_text(), flags=re.MULTILINE))
    assert named <= targets


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_file_that_is_written_down_exists(path):
    found = re.findall(
        r"`((?:eagle3|jobs|tests|docs|\.ci)/[\w./-]*\w\.?\w*|[\w.-]+\.(?:toml|txt|md))`",
        path.read_text(),
    )
    # A folder of a run is written with a slash at its end and is no file of ours.
    lost = sorted({name for name in found if not (ROOT / name).exists()})
    assert not lost, f"{path.name} speaks of what is not there: {lost}"


def test_every_module_has_its_line_in_the_map():
    units = {path.stem for path in (ROOT / "eagle3").glob("*.py")} - {"__init__"}
    units |= {path.parent.name for path in (ROOT / "eagle3").glob("*/__init__.py")}
    lost = sorted(unit for unit in units if not re.search(rf"`{unit}(\.py|/)`", AGENTS))
    assert not lost, f"AGENTS.md's map lacks {lost}: one phrase each"
    stories = {path.stem for path in (ROOT / "jobs").glob("*.py")} - {"__init__"}
    lost = sorted(story for story in stories if f"`{story}.py`" not in AGENTS)
    assert not lost, f"AGENTS.md's map lacks jobs/{lost}: one phrase each"


def test_ci_runs_what_a_person_runs():
    script = (ROOT / ".ci" / "run").read_text()
    assert "make --no-print-directory test" in script
    # All tests but those of the container images, which take half an hour of their own.
    everything = r'^\t@?.*-m pytest \$\(WORKERS\) -m "not images"$'
    assert re.search(everything, MAKEFILE, flags=re.MULTILINE)


def test_an_input_lies_where_its_writer_puts_it():
    store = open_store("memory://names/run")
    config = parse_config({"verifier": {"source": "m"}, "prepare": {"data": ["a"]}})
    for stage in STAGES:
        for name, url in input_urls(config, store, stage).items():
            assert url.rsplit("/", 1)[1] in stage.reads[name]
            assert url.rsplit("/", 1)[1] in ARTIFACT_KINDS


def test_a_run_hands_its_output_over_under_the_stage_s_word():
    store = open_store("memory://names/run")
    config = parse_config({"verifier": {"source": "m"}, "prepare": {"data": ["a"]}})
    for name in STAGE_NAMES:
        run = process.StageRun(stage=stage_named(name), config=config, store=store, inputs={})
        assert run.output().url == store.child(name).url
