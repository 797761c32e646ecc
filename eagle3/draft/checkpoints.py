"""Checkpoints in the store: each is whole or does not count.

`checkpoints/<step>/` below the stage's work holds what upstream saved, the curve so far, and a
marker that is written last and names every file with its hash. A training continues from the
newest one that has a marker; `untrained/` beside them is the draft before its first step.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
from safetensors import safe_open

from eagle3.errors import DraftInvalid
from eagle3.manifest import FileEntry
from eagle3.store import Store, sha256_of_file

MARKER_NAME = "COMPLETE.json"
MODEL_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
CURVE_NAME = "metrics.jsonl"
STATE_NAME = "training_state.json"
DRAFT, UNTRAINED = "draft", "untrained"
# What a draft is, and what else upstream needs to go on from it.
DRAFT_FILES = (CONFIG_NAME, MODEL_NAME)
_RESUME_FILES = ("optimizer_state_dict.pt", "scheduler_state_dict.pt", STATE_NAME, CURVE_NAME)


class TrainingState(msgspec.Struct, frozen=True, kw_only=True):
    """Upstream's own record of where a checkpoint stands.

    `epoch` is the folder's name; `local_step` is 0 at the end of an epoch.
    """

    epoch: int
    local_step: int
    global_step: int


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """What a whole checkpoint consists of; `prefix` is below the stage's work."""

    prefix: str
    files: tuple[FileEntry, ...]
    state: TrainingState | None = None


class Checkpoints:
    """The checkpoints of one training."""

    def __init__(self, work: Store) -> None:
        """Args: work: the stage's work prefix."""
        self._work = work

    def save(self, folder: Path, *, curve: bytes) -> Marker:
        """Upload a numbered checkpoint that upstream has finished. Raises DraftInvalid.

        Args:
            folder: upstream's `<epoch>/`, with its training state.
            curve: the curve up to this step, which goes on with it.
        """
        state = read_state(folder)
        check_finite(folder)
        (folder / CURVE_NAME).write_bytes(curve)
        names = [name for name in (*DRAFT_FILES, *_RESUME_FILES) if (folder / name).exists()]
        return self._upload(folder, f"checkpoints/{state.global_step:08d}", names, state)

    def save_untrained(self, folder: Path) -> Marker:
        """Upload the draft before its first step, once; a second time changes nothing."""
        standing = self._marker(UNTRAINED)
        if standing is not None:
            return standing
        check_finite(folder)
        return self._upload(folder, UNTRAINED, list(DRAFT_FILES), None)

    def newest(self) -> Marker | None:
        """The whole checkpoint with the most steps, or None."""
        prefixes = {info.path.rpartition("/")[0] for info in self._work.list("checkpoints")}
        for prefix in sorted(prefixes, reverse=True):
            if (marker := self._marker(prefix)) is not None:
                return marker
        return None

    def untrained(self) -> Marker | None:
        """The untrained draft, or None while no process has saved it."""
        return self._marker(UNTRAINED)

    def fetch(self, marker: Marker, folder: Path) -> Path:
        """Download a checkpoint's files, every byte checked, and return the folder.

        Raises DraftInvalid where an object is gone or differs from the marker.
        """
        for entry in marker.files:
            target, path = folder / entry.path, f"{marker.prefix}/{entry.path}"
            try:
                self._work.get_file(path, target)
                found = sha256_of_file(target)
            except FileNotFoundError:
                found = "no object"
            if found != entry.sha256:
                raise DraftInvalid(
                    f"{self._work.url}/{path}",
                    wanted=f"sha256 {entry.sha256[:16]}, as its marker says",
                    found=found[:16],
                    remedy=f"delete {self._work.url}/{marker.prefix} and run train again, "
                    "which continues from the checkpoint before",
                )
        return folder

    def _upload(
        self, folder: Path, prefix: str, names: list[str], state: TrainingState | None
    ) -> Marker:
        # Where a process that was stopped at this step had saved it, it is replaced.
        self._work.delete(f"{prefix}/{MARKER_NAME}")
        entries = []
        for name in names:
            path = folder / name
            self._work.put_file(path, f"{prefix}/{name}")
            size = path.stat().st_size
            entries.append(FileEntry(path=name, bytes=size, sha256=sha256_of_file(path)))
        marker = Marker(prefix=prefix, files=tuple(entries), state=state)
        self._work.write_bytes(f"{prefix}/{MARKER_NAME}", msgspec.json.encode(marker))
        return marker

    def _marker(self, prefix: str) -> Marker | None:
        try:
            data = self._work.read_bytes(f"{prefix}/{MARKER_NAME}")
            return msgspec.json.decode(data, type=Marker)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise DraftInvalid(
                f"{self._work.url}/{prefix}/{MARKER_NAME}",
                wanted="the marker of a whole checkpoint",
                found=error,
                remedy="delete it and run train again",
            ) from error


def read_state(folder: Path) -> TrainingState:
    """Upstream's training state in a checkpoint's folder. Raises DraftInvalid."""
    try:
        return msgspec.json.decode((folder / STATE_NAME).read_bytes(), type=TrainingState)
    except (FileNotFoundError, msgspec.DecodeError) as error:
        raise DraftInvalid(
            f"{folder.name}/{STATE_NAME}",
            wanted="epoch, local_step and global_step",
            found=error,
            remedy="install the version of speculators that eagle3 pins",
        ) from error


def check_finite(folder: Path) -> None:
    """Every number of a draft's weights is finite. Raises DraftInvalid naming a tensor."""
    with safe_open(folder / MODEL_NAME, "pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - it is not a dict
            tensor = weights.get_tensor(name)
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise DraftInvalid(
                    f"{folder.name}/{MODEL_NAME}: {name}",
                    wanted="finite weights",
                    found="NaN or infinity",
                    remedy="lower train.learning_rate under a prefix of its own",
                )
