"""Checkpoints in the store: each is whole or does not count.

Below what was done under the stage's claim, `checkpoints/<step>/` holds what upstream saved and
the curve so far, every object under a name that begins with its hash, and a marker that is written
last and names them all. What is saved again lies beside what stands until the marker is replaced,
so that a process killed in between leaves no less than before. Then only what the replaced marker
named is deleted: anything else may be another live process's, which saves the same step. A training
continues from the newest whole one; the last two are kept, and `untrained/` beside them, the draft
before its first step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from hashlib import sha256
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open

from eagle3 import strict_json
from eagle3.errors import DraftInvalid
from eagle3.manifest import FileEntry
from eagle3.store import Store, sha256_of_file

MARKER_NAME = "COMPLETE.json"
MODEL_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
CURVE_NAME = "metrics.jsonl"
STATE_NAME = "training_state.json"
DRAFT, UNTRAINED = "draft", "untrained"
DRAFT_FILES = (CONFIG_NAME, MODEL_NAME)
# What else upstream needs to go on from a draft. Without one of these it would begin anew with
# that part, and say nothing; it saves the second one only where there is a schedule.
OPTIMIZER_NAME, SCHEDULER_NAME = "optimizer_state_dict.pt", "scheduler_state_dict.pt"
# The newest, and the one before in case the newest turns out to be damaged.
_KEPT = 2
_FOLDER = "checkpoints"


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

    def path_of(self, entry: FileEntry) -> str:
        """The object that holds one of the files, below the stage's work."""
        return f"{self.prefix}/{entry.sha256[:16]}-{entry.path}"


class Checkpoints:
    """The checkpoints of one training."""

    def __init__(
        self,
        work: Store,
        *,
        scheduled: bool = True,
        before_save: Callable[[], None] = lambda: None,
    ) -> None:
        """Args:
        work: the prefix of what is done under the stage's claim.
        scheduled: whether the learning rate has a schedule, whose state then belongs to a whole
            checkpoint.
        before_save: called before anything is uploaded; what it raises keeps it from being.
        """
        self._work = work
        self._before_save = before_save
        states = (OPTIMIZER_NAME, SCHEDULER_NAME) if scheduled else (OPTIMIZER_NAME,)
        self._needed = (*DRAFT_FILES, *states, STATE_NAME, CURVE_NAME)

    @property
    def url(self) -> str:
        """The prefix that they lie below."""
        return self._work.url

    def save(self, folder: Path, *, curve: bytes) -> Marker:
        """Upload a numbered checkpoint that upstream has finished, and delete older ones.

        Args:
            folder: upstream's `<epoch>/`, with its training state.
            curve: the curve up to this step, which goes on with it.

        Raises DraftInvalid for weights that are not finite, and where upstream left out a file
        that it would need to go on.
        """
        state = read_state(folder)
        check_finite(folder)
        (folder / CURVE_NAME).write_bytes(curve)
        marker = self._upload(folder, f"{_FOLDER}/{state.global_step:08d}", self._needed, state)
        self._prune()
        return marker

    def save_untrained(self, folder: Path) -> Marker:
        """Upload the draft before its first step, once; a second time changes nothing."""
        standing = self._marker(UNTRAINED)
        if standing is not None:
            return standing
        check_finite(folder)
        return self._upload(folder, UNTRAINED, DRAFT_FILES, None)

    def with_curve(self, marker: Marker, curve: bytes) -> Marker:
        """The same checkpoint with a longer curve: a validation came after it was saved.

        Where another process has saved the step anew, that one stands, and this changes nothing.
        """
        if self._marker(marker.prefix) != marker:
            return marker
        entry = FileEntry(path=CURVE_NAME, bytes=len(curve), sha256=sha256(curve).hexdigest())
        files = tuple(entry if old.path == CURVE_NAME else old for old in marker.files)
        longer = msgspec.structs.replace(marker, files=files)
        self._work.write_bytes(longer.path_of(entry), curve)
        self._mark(longer)
        return longer

    def newest(self) -> Marker | None:
        """The whole checkpoint with the most steps, or None."""
        return next(iter(self._newest(1)), None)

    def untrained(self) -> Marker | None:
        """The untrained draft, or None while no process has saved it."""
        return self._marker(UNTRAINED)

    def fetch(self, marker: Marker, folder: Path, *, names: Collection[str] = ()) -> Path:
        """Download a checkpoint's files, every byte checked, and return the folder.

        Args: names: only these; by default all.

        Raises DraftInvalid where an object is gone or differs from the marker.
        """
        for entry in (file for file in marker.files if not names or file.path in names):
            target, path = folder / entry.path, marker.path_of(entry)
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
        self, folder: Path, prefix: str, names: Sequence[str], state: TrainingState | None
    ) -> Marker:
        self._before_save()
        forget_verifier_path(folder / CONFIG_NAME)
        entries = []
        for name in names:
            path = folder / name
            if not path.exists():
                raise DraftInvalid(
                    f"{folder.name}/{name}",
                    wanted="every file that a checkpoint is continued from",
                    found="none",
                    remedy="install the version of speculators that eagle3 pins",
                )
            size = path.stat().st_size
            entries.append(FileEntry(path=name, bytes=size, sha256=sha256_of_file(path)))
        marker = Marker(prefix=prefix, files=tuple(entries), state=state)
        for entry in entries:
            self._work.put_file(folder / entry.path, marker.path_of(entry))
        self._mark(marker)
        return marker

    def _mark(self, marker: Marker) -> None:
        """Let the marker stand for its checkpoint, then delete what only the one before named."""
        replaced = self._marker(marker.prefix)
        self._work.write_bytes(f"{marker.prefix}/{MARKER_NAME}", msgspec.json.encode(marker))
        if replaced is not None:
            named = set(map(marker.path_of, marker.files))
            self._delete(
                [path for path in map(replaced.path_of, replaced.files) if path not in named]
            )

    def _newest(self, count: int) -> list[Marker]:
        """Up to so many whole checkpoints, the one with the most steps first."""
        sizes = {info.path: info.bytes for info in self._work.list(_FOLDER)}
        found: list[Marker] = []
        for prefix in sorted({path.rpartition("/")[0] for path in sizes}, reverse=True):
            if len(found) < count and (marker := self._marker(prefix)) is not None:
                names = {entry.path for entry in marker.files}
                there = all(sizes.get(marker.path_of(e)) == e.bytes for e in marker.files)
                if there and names.issuperset(self._needed):
                    found.append(marker)
        return found

    def _prune(self) -> None:
        kept = self._newest(_KEPT)
        if not kept:
            # Another process that is further on has deleted this one already.
            return
        paths = [info.path for info in self._work.list(_FOLDER)]
        self._delete([path for path in paths if path.rpartition("/")[0] < kept[-1].prefix])

    def _delete(self, paths: Sequence[str]) -> None:
        """Markers first: a checkpoint that is half deleted must not look whole."""
        for path in sorted(paths, key=lambda path: not path.endswith(MARKER_NAME)):
            self._work.delete(path)

    def _marker(self, prefix: str) -> Marker | None:
        try:
            data = self._work.read_bytes(f"{prefix}/{MARKER_NAME}")
            return strict_json.decode(data, Marker)
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
        return strict_json.decode((folder / STATE_NAME).read_bytes(), TrainingState)
    except (FileNotFoundError, msgspec.DecodeError) as error:
        raise DraftInvalid(
            f"{folder.name}/{STATE_NAME}",
            wanted="epoch, local_step and global_step",
            found=error,
            remedy="install the version of speculators that eagle3 pins",
        ) from error


def forget_verifier_path(config: Path) -> None:
    """Take the path of the verifier's tensors out of a draft's config.json.

    Upstream writes where it found them, a scratch folder, which differs from process to process
    and means nothing after it. Export writes the name under which the verifier is served.
    """
    record = json.loads(config.read_text(encoding="utf-8"))
    record.get("speculators_config", {}).get("verifier", {})["name_or_path"] = None
    config.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


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
