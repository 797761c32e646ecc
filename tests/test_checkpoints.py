"""Two live trainers on one prefix: a checkpoint that a marker names is never taken apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle3.draft.checkpoints import (
    CONFIG_NAME,
    DRAFT_FILES,
    MODEL_NAME,
    OPTIMIZER_NAME,
    SCHEDULER_NAME,
    STATE_NAME,
    Checkpoints,
)
from eagle3.errors import IdentityConflict
from eagle3.store import Store, open_store


@pytest.fixture
def work(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path}/work")


def saved(folder: Path, step: int, *, value: float) -> Path:
    """What upstream leaves of a checkpoint; `value` tells one trainer's weights from another's."""
    folder = folder / "0"
    folder.mkdir(parents=True)
    save_file({"fc.weight": torch.full((2, 2), value)}, folder / MODEL_NAME)
    (folder / CONFIG_NAME).write_text("{}")
    (folder / OPTIMIZER_NAME).write_bytes(b"moments")
    (folder / SCHEDULER_NAME).write_bytes(b"rates")
    state = {"epoch": 0, "local_step": 0, "global_step": step}
    (folder / STATE_NAME).write_text(json.dumps(state))
    return folder


def test_a_marker_deletes_nothing_that_another_trainer_is_uploading(
    work: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = Checkpoints(work), Checkpoints(open_store(work.url))
    one_folder = saved(tmp_path / "one", 9, value=1.0)
    put = work.put_file

    def put_and_the_other_marks(source: Path, path: str) -> None:
        put(source, path)
        # The whole of the other's save falls between two of ours.
        if source.name == MODEL_NAME:
            other.save(saved(tmp_path / "other", 9, value=2.0), curve=b"other")

    monkeypatch.setattr(work, "put_file", put_and_the_other_marks)
    marker = one.save(one_folder, curve=b"one")
    assert one.newest() == marker
    folder = one.fetch(marker, tmp_path / "fetched")
    assert (folder / MODEL_NAME).read_bytes() == (one_folder / MODEL_NAME).read_bytes()


def test_a_later_validation_does_not_bring_back_a_checkpoint_saved_anew(
    work: Store, tmp_path: Path
) -> None:
    one, other = Checkpoints(work), Checkpoints(work)
    first = one.save(saved(tmp_path / "one", 9, value=1.0), curve=b"one")
    second = other.save(saved(tmp_path / "other", 9, value=2.0), curve=b"other")
    assert one.with_curve(first, b"one, validated") == first
    assert one.newest() == second
    one.fetch(second, tmp_path / "fetched")


def test_a_trainer_that_is_behind_takes_part_in_nothing(work: Store, tmp_path: Path) -> None:
    ahead, behind = Checkpoints(work), Checkpoints(work)
    ahead.save(saved(tmp_path / "a", 20, value=1.0), curve=b"")
    newest = ahead.save(saved(tmp_path / "b", 30, value=1.0), curve=b"")
    late = behind.save(saved(tmp_path / "c", 10, value=2.0), curve=b"")
    assert behind.with_curve(late, b"validated") == late
    assert work.list(late.prefix) == []
    assert behind.newest() == newest


def test_a_checkpoint_deleted_as_soon_as_it_is_saved_ends_no_training(
    work: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = work.write_bytes

    def write_and_lose(path: str, data: bytes) -> None:
        write(path, data)
        for info in work.list():
            work.delete(info.path)

    monkeypatch.setattr(work, "write_bytes", write_and_lose)
    checkpoints = Checkpoints(work)
    checkpoints.save(saved(tmp_path / "a", 9, value=1.0), curve=b"")
    assert checkpoints.newest() is None


def test_a_draft_alone_is_fetched_without_what_training_would_need(
    work: Store, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(work)
    marker = checkpoints.save(saved(tmp_path / "a", 9, value=1.0), curve=b"")
    folder = checkpoints.fetch(marker, tmp_path / "fetched", names=DRAFT_FILES)
    assert {path.name for path in folder.iterdir()} == set(DRAFT_FILES)


def test_nothing_is_uploaded_by_a_trainer_that_has_lost_its_claim(
    work: Store, tmp_path: Path
) -> None:
    def lost() -> None:
        raise IdentityConflict("claim", wanted="ours", found="none", remedy="look")

    trainer = Checkpoints(work, before_save=lost)
    folder = saved(tmp_path / "one", 9, value=1.0)
    for save in (lambda: trainer.save(folder, curve=b""), lambda: trainer.save_untrained(folder)):
        with pytest.raises(IdentityConflict):
            save()
    assert work.list() == []
