"""Killed with SIGKILL at a write and run again, a stage leaves what an undisturbed run leaves.

extract and regenerate on the shipped fakes and vocab at every write; the others, and the real
engines, at seeded moments. One moment of each lies between the last object and its manifest.
prepare's own kills are in `tests/test_prepare.py`.
"""

import getpass
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import yaml

from eagle3.draft.metrics import CurvePoint, decode_curve
from eagle3.store import Store, open_store
from jobs import prepare
from tests.evaluable import World
from tests.kill_driver import MOMENTS
from tests.tiny_run import artifact_at, content_of, done_in, write_config, write_conversations
from tests.tiny_verifiers import make_llama
from tests.trainable import config_of, make_run

ROOT = Path(__file__).resolve().parent.parent
Case = tuple[str, str, str]
# Where every other process has its compiled kernels.
KERNELS = str(Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


class Driver:
    """The process that runs and kills stages, one for all tests: its imports take longest."""

    def __init__(self, log: Path) -> None:
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.kill_driver"],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": KERNELS},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def run(self, folder: Path, stage: str, engine: str, cases: Sequence[Case]) -> None:
        """Let it run the cases by the configuration in `folder`, where what killed processes
        leave on the disk stays too."""
        scratch = folder / "scratch"
        scratch.mkdir(exist_ok=True)
        order = {
            "stage": stage,
            "engine": engine,
            "config": str(folder / "run.yaml"),
            "scratch": str(scratch),
            "cases": cases,
        }
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer == "\n", answer + self.log.read_text()[-3000:]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """See `Driver`."""
    running = Driver(tmp_path_factory.mktemp("driver") / "log")
    yield running
    running.process.kill()
    running.process.communicate()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration and a prepared run, `calm`, for the stages that read its rows."""
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
    rows = str(folder / "calm" / "prepare")
    settings["inputs"] = {"extract.rows": rows, "vocab.rows": rows}
    config.write_text(yaml.safe_dump(settings))
    return folder


@pytest.fixture(scope="module")
def trainable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration and a run that is ready to train, `calm`."""
    folder = tmp_path_factory.mktemp("trainable")
    verifier = make_llama(folder / "verifier", dtype="bfloat16")
    make_run(f"file://{folder}/calm", verifier, num_rows=8)
    (folder / "run.yaml").write_text(json.dumps(msgspec.to_builtins(config_of())))
    return folder


@pytest.fixture(scope="module")
def trained(trainable: Path, driver: Driver, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, trained undisturbed."""
    folder = tmp_path_factory.mktemp("trained")
    run_calmly(driver, trainable, folder, "train", "real")
    return folder


def run_calmly(driver: Driver, source: Path, folder: Path, stage: str, engine: str) -> Store:
    """A copy of a run in `folder`, with the stage done in it undisturbed."""
    shutil.copytree(source / "calm", folder / "calm")
    shutil.copy(source / "run.yaml", folder)
    driver.run(folder, stage, engine, [(str(folder / "calm"), "", "")])
    return open_store(str(folder / "calm"))


def created(calm: Store, stage: str) -> list[str]:
    """Every object that the stage creates, as the end of its path, the manifest last."""
    objects = [info.path.removeprefix(f"{stage}/") for info in calm.list(stage)]
    work = [info.path for info in done_in(calm, stage).list()]
    return [*sorted({"claim.json", *objects, *work} - {"data_config.json"}), "data_config.json"]


def killed(source: Path, folder: Path, moments: Sequence[tuple[str, str]]) -> list[Case]:
    """For each moment a copy of the run that is killed at it, then run again."""
    cases: list[Case] = []
    for path, moment in dict.fromkeys(moments):
        store = str(folder / f"killed-{len(cases) // 2}")
        shutil.copytree(source / "calm", store)
        cases += [(store, path, moment), (store, "", "")]
    return cases


@pytest.mark.parametrize(
    ("stage", "engine"), [("extract", "fake"), ("regenerate", "fake"), ("vocab", "real")]
)
def test_killed_at_any_write_it_goes_on_to_the_same_bytes(
    driver: Driver, prepared: Path, tmp_path: Path, stage: str, engine: str
) -> None:
    calm = run_calmly(driver, prepared, tmp_path, stage, engine)
    # Each write at one moment, and the one that matters most at all.
    moments = [(path, MOMENTS[at % 3]) for at, path in enumerate(created(calm, stage))]
    moments += [("data_config.json", "before")]
    if stage != "vocab":
        moments += [("units/000001.json", "before")]
    cases = killed(prepared, tmp_path, moments)
    assert len(cases) >= 2 * 3
    driver.run(tmp_path, stage, engine, cases)
    wanted = content_of(calm, stage)
    for store, path, moment in cases[::2]:
        assert content_of(open_store(store), stage) == wanted, f"killed {moment} {path}"


@pytest.mark.parametrize("stage", ["extract", "regenerate"])
def test_killed_three_times_with_real_engines_it_goes_on_to_the_same_bytes(
    driver: Driver, prepared: Path, tmp_path: Path, stage: str
) -> None:
    calm = run_calmly(driver, prepared, tmp_path, stage, "real")
    store = str(tmp_path / "killed")
    shutil.copytree(prepared / "calm", store)
    draw = random.Random(stage)
    shards = [path for path in created(calm, stage) if path.endswith("s")]
    moments = [
        *((store, path, draw.choice(MOMENTS)) for path in sorted(draw.sample(shards, 2))),
        (store, "data_config.json", "before"),
        (store, "", ""),
    ]
    driver.run(tmp_path, stage, "real", moments)
    assert content_of(open_store(store), stage) == content_of(calm, stage)


def test_export_killed_at_a_write_goes_on_to_the_same_bytes(
    driver: Driver, trained: Path, tmp_path: Path
) -> None:
    calm = run_calmly(driver, trained, tmp_path, "export", "real")
    moments = [("config.json", "within"), ("untrained/model.safetensors", "after")]
    cases = killed(trained, tmp_path, [*moments, ("data_config.json", "before")])
    driver.run(tmp_path, "export", "real", cases)
    wanted = content_of(calm, "export")
    for store, path, moment in cases[::2]:
        assert content_of(open_store(store), "export") == wanted, f"killed {moment} {path}"


def curve_of(store: Store) -> list[CurvePoint]:
    return decode_curve(artifact_at(store, "train").store.read_bytes("metrics.jsonl"))


def test_train_killed_where_no_step_is_lost_goes_on_to_the_same_bytes(
    driver: Driver, trainable: Path, trained: Path, tmp_path: Path
) -> None:
    shutil.copy(trainable / "run.yaml", tmp_path)
    moments = [
        ("untrained/*-model.safetensors", "within"),
        # The first checkpoint is not whole, so all begins anew.
        ("checkpoints/*/COMPLETE.json", "before"),
        ("draft/model.safetensors", "after"),
        ("data_config.json", "before"),
    ]
    cases = killed(trainable, tmp_path, moments)
    driver.run(tmp_path, "train", "real", cases)
    calm = open_store(str(trained / "calm"))
    wanted = content_of(calm, "train")
    for store, path, moment in cases[::2]:
        assert content_of(open_store(store), "train") == wanted, f"killed {moment} {path}"


def test_train_killed_after_a_checkpoint_goes_on_to_the_same_step(
    driver: Driver, trainable: Path, trained: Path, tmp_path: Path
) -> None:
    shutil.copy(trainable / "run.yaml", tmp_path)
    calm = open_store(str(trained / "calm"))
    wanted = curve_of(calm)
    moments = [
        # Between an epoch's checkpoint and its validation: after the first, and after the last.
        ("checkpoints/*/COMPLETE.json", "after"),
        (f"checkpoints/{wanted[-1].step:08d}/COMPLETE.json", "after"),
        # Before the second is whole.
        (f"checkpoints/{wanted[-1].step:08d}/COMPLETE.json", "before"),
    ]
    cases = killed(trainable, tmp_path, moments)
    driver.run(tmp_path, "train", "real", cases)
    for store, path, moment in cases[::2]:
        found = curve_of(open_store(store))
        assert places(found) == places(wanted), f"killed {moment} {path}"
        # Upstream keeps weights and moments in bfloat16: alike, not equal.
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine.loss == pytest.approx(theirs.loss, rel=0.02)
        assert digests(open_store(store)) == digests(calm)


def places(curve: Sequence[CurvePoint]) -> list[tuple[str, int, int]]:
    """What was done when, without what came of it."""
    return [(point.kind, point.step, point.epoch) for point in curve]


def digests(store: Store) -> dict[str, str]:
    """What a training was made from."""
    inputs = artifact_at(store, "train").manifest.inputs
    return {name: ref.digest for name, ref in inputs.items()}


def test_evaluate_killed_at_a_write_goes_on_to_the_same_figures(
    driver: Driver, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    world = World(str(source / "calm"))
    (source / "run.yaml").write_text(json.dumps(msgspec.to_builtins(world.config())))
    calm = run_calmly(driver, source, tmp_path, "evaluate", "fake")
    draw = random.Random("evaluate")
    blocks = [Path(path).name for path in created(calm, "evaluate") if "answers" in path]
    blocks = draw.sample(sorted(set(blocks)), 2)
    moments = [(path, draw.choice(MOMENTS)) for path in (*blocks, "acceptance.json")]
    cases = killed(source, tmp_path, [*moments, ("data_config.json", "before")])
    driver.run(tmp_path, "evaluate", "fake", cases)
    wanted = content_of(calm, "evaluate")
    for store, path, moment in cases[::2]:
        assert content_of(open_store(store), "evaluate") == wanted, f"killed {moment} {path}"
