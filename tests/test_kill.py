"""Killed with SIGKILL at any write and run again, a stage leaves what an undisturbed run leaves.

On the shipped fakes at every write; on the real engines at three seeded moments, one
of them between the last object and its manifest.
"""

import getpass
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from eagle3.store import Store, open_store
from jobs import prepare
from tests.kill_driver import MOMENTS
from tests.tiny_run import content_of, write_config, write_conversations
from tests.tiny_verifiers import make_llama

ROOT = Path(__file__).resolve().parent.parent
Case = tuple[str, str, str]
# Where every other process has its compiled kernels: with TMPDIR alone they would be made anew.
KERNELS = str(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration and a prepared run, `calm`, for both stages."""
    folder = tmp_path_factory.mktemp("killed")
    verifier = make_llama(folder / "verifier")
    data = write_conversations(folder / "chats.jsonl", 30)
    config = write_config(
        folder / "run.yaml",
        verifier,
        data,
        regenerate={"unit_rows": 10, "max_new_tokens": 8},
        extract={"unit_rows": 10},
    )
    assert prepare.main(["--config", str(config), "--store", str(folder / "calm")]) == 0
    settings = yaml.safe_load(config.read_text())
    settings["inputs"] = {"extract.rows": str(folder / "calm" / "prepare")}
    config.write_text(yaml.safe_dump(settings))
    return folder


def drive(folder: Path, stage: str, engine: str, cases: Sequence[Case]) -> None:
    """Let the driver run the cases; what killed processes leave on the disk goes with the test."""
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.kill_driver",
            stage,
            engine,
            str(folder / "run.yaml"),
            json.dumps(cases),
        ],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(scratch), "TORCHINDUCTOR_CACHE_DIR": KERNELS},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]


def run_calmly(prepared: Path, folder: Path, stage: str, engine: str) -> Store:
    """A copy of the prepared run in `folder`, with the stage done in it undisturbed."""
    shutil.copytree(prepared / "calm", folder / "calm")
    shutil.copy(prepared / "run.yaml", folder)
    drive(folder, stage, engine, [(str(folder / "calm"), "", "")])
    return open_store(str(folder / "calm"))


def created(calm: Store, stage: str) -> list[str]:
    """Every object that the stage creates, as the end of its path, the manifest last."""
    objects = [info.path.removeprefix(f"{stage}/") for info in calm.list(stage)]
    work = [info.path.removeprefix(f"work/{stage}/") for info in calm.list(f"work/{stage}")]
    return [*sorted({*objects, *work} - {"data_config.json"}), "data_config.json"]


@pytest.mark.parametrize("stage", ["extract", "regenerate"])
def test_killed_at_any_write_it_goes_on_to_the_same_bytes(
    prepared: Path, tmp_path: Path, stage: str
) -> None:
    calm = run_calmly(prepared, tmp_path, stage, "fake")
    cases: list[Case] = []
    # Each write at one moment, and the two that matter most, around the last record, at all.
    targets = [(path, MOMENTS[at % 3]) for at, path in enumerate(created(calm, stage))]
    targets += [("data_config.json", "before"), ("units/000001.json", "before")]
    for path, moment in dict.fromkeys(targets):
        store = str(tmp_path / f"killed-{len(cases)}")
        shutil.copytree(prepared / "calm", store)
        cases += [(store, path, moment), (store, "", "")]
    assert len(cases) >= 2 * 7
    drive(tmp_path, stage, "fake", cases)
    wanted = content_of(calm, stage)
    for store, path, moment in cases[::2]:
        assert content_of(open_store(store), stage) == wanted, f"killed {moment} {path}"


@pytest.mark.parametrize("stage", ["extract", "regenerate"])
def test_killed_three_times_with_real_engines_it_goes_on_to_the_same_bytes(
    prepared: Path, tmp_path: Path, stage: str
) -> None:
    calm = run_calmly(prepared, tmp_path, stage, "real")
    store = str(tmp_path / "killed")
    shutil.copytree(prepared / "calm", store)
    draw = random.Random(stage)
    first, second = sorted(
        draw.sample([path for path in created(calm, stage) if path.endswith("s")], 2)
    )
    moments = [
        (store, first, draw.choice(MOMENTS)),
        (store, second, draw.choice(MOMENTS)),
        (store, "data_config.json", "before"),
        (store, "", ""),
    ]
    drive(tmp_path, stage, "real", moments)
    assert content_of(open_store(store), stage) == content_of(calm, stage)
