"""One training from gated artefacts to saved checkpoints: what `jobs.train` is told with.

`lay_out` puts everything that upstream reads into a scratch folder, checked; `Session` watches
the training, stores its checkpoints as they are made, and finds where to go on from.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eagle3.artifact import Artifact
from eagle3.config import TrainConfig
from eagle3.draft.checkpoints import CURVE_NAME, UNTRAINED, Checkpoints, Marker
from eagle3.draft.geometry import layer_config
from eagle3.draft.metrics import CurvePoint, decode_curve, encode_curve, read_record
from eagle3.draft.recipe import Paths, StepPlan, plan_steps, upstream_config
from eagle3.draft.rows import (
    Split,
    Supervision,
    check_rows,
    index_rows,
    save_dataset,
    split_rows,
)
from eagle3.draft.trainer import train
from eagle3.errors import EnvironmentMisconfigured, ManifestInvalid, Stopped
from eagle3.progress import Progress
from eagle3.verifier import LoadedVerifier
from eagle3.verifier.text_model import EMBED_KEY, LM_HEAD_KEY, NORM_KEY
from eagle3.vocab import Mapping as VocabMapping

NUM_AUX_LAYERS = 3


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among those of one training, as torchrun numbers them.

    `launched` says that somebody has started it as one of several.
    """

    rank: int = 0
    world_size: int = 1
    launched: bool = False

    @classmethod
    def from_environment(cls) -> Ranks:
        """RANK and WORLD_SIZE, or one process alone. Raises EnvironmentMisconfigured."""
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        given = {name: os.environ[name] for name in names if name in os.environ}
        if not given:
            return cls()
        if len(given) < len(names) or not all(value.isdecimal() for value in given.values()):
            raise EnvironmentMisconfigured(
                ", ".join(names),
                wanted="all three as numbers, or none",
                found=given,
                remedy="start the processes with torchrun",
            )
        return cls(rank=int(given["RANK"]), world_size=int(given["WORLD_SIZE"]), launched=True)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A training that is ready to start: its local files, its rows and its steps.

    Attributes:
        supervision: tokens to learn from, over all rows.
        aux_layer_ids: the three auxiliary layers, ascending.
        layer: the decoder config, as `eagle3.draft.geometry` has it.
    """

    paths: Paths
    split: Split
    supervision: Supervision
    plan: StepPlan
    aux_layer_ids: tuple[int, ...]
    draft_vocab_size: int
    layer: dict[str, Any]


def lay_out(
    config: TrainConfig,
    states: Artifact,
    mapping: VocabMapping,
    verifier: LoadedVerifier,
    scratch: Path,
    ranks: Ranks,
) -> Layout:
    """Write all that upstream reads below `scratch`, after checking it.

    Raises ConfigError, ManifestInvalid, ShardInvalid, VerifierInvalid.
    """
    aux_layer_ids = auxiliary_layers(states)
    layer = layer_config(config.geometry, verifier.text_config)
    index = index_rows(states)
    check_rows(
        index,
        layers=NUM_AUX_LAYERS + 1,
        hidden_size=verifier.hidden_size,
        total_seq_len=config.total_seq_len,
    )
    split = split_rows(len(index.refs), config.validation_share, world_size=ranks.world_size)
    lengths = [ref.num_tokens for ref in index.refs]
    plan = plan_steps(lengths, config, num_train=split.num_train, world_size=ranks.world_size)
    paths = Paths.below(scratch)
    _link_verifier(verifier, paths.verifier)
    paths.layer_config.mkdir()
    (paths.layer_config / "config.json").write_text(json.dumps(layer, indent=2))
    np.save(paths.d2t, mapping.d2t.numpy())
    np.save(paths.t2d, mapping.t2d.numpy())
    return Layout(
        paths=paths,
        split=split,
        supervision=save_dataset(index, paths.dataset, t2d=mapping.t2d),
        plan=plan,
        aux_layer_ids=aux_layer_ids,
        draft_vocab_size=mapping.draft_vocab_size,
        layer=layer,
    )


def auxiliary_layers(states: Artifact) -> tuple[int, ...]:
    """The three auxiliary layer ids of an `extract/` artefact, without the last one.

    That the ids are ascending and end with the final layer's, the gate has made sure of; upstream
    takes any number of them and vLLM three. Raises ManifestInvalid.
    """
    ids = states.manifest.layer_ids or ()
    if len(ids) != NUM_AUX_LAYERS + 1:
        raise ManifestInvalid(
            f"{states.store.url}: layer_ids",
            wanted=f"{NUM_AUX_LAYERS} auxiliary ids and the last",
            found=list(ids),
            remedy="run extract again",
        )
    return ids[:-1]


def _link_verifier(verifier: LoadedVerifier, folder: Path) -> None:
    """The verifier as upstream loads it: config, the three tensors, and an index of exact names.

    Upstream matches tensors by suffix; in a folder of three names there is nothing to mistake.
    """
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to((verifier.folder / name).absolute())
    weight_map = dict.fromkeys((EMBED_KEY, NORM_KEY, LM_HEAD_KEY), "model.safetensors")
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)


class Session:
    """The watch over one training, which may take several processes' lives.

    Args:
        layout: as `lay_out` made it.
        checkpoints: where they are stored.
        stop_requested: whether SIGTERM has come.
        progress: of the first rank.
    """

    def __init__(
        self,
        layout: Layout,
        checkpoints: Checkpoints,
        stop_requested: Callable[[], bool],
        progress: Progress | None,
    ) -> None:
        self._layout = layout
        self._checkpoints = checkpoints
        self._progress = progress
        self.stop_requested = stop_requested
        self._started = time.monotonic()
        self._seconds_before = 0.0
        self._step = 0
        self._last: Marker | None = None
        self.curve: list[CurvePoint] = []

    def run(self, config: TrainConfig) -> Marker:
        """Train from the newest checkpoint to the last step and return the final one.

        Raises Stopped when asked to stop, and what the checks of the data and of the metrics
        raise.
        """
        resumed = self._checkpoints.newest()
        if resumed is not None:
            self._go_on_from(resumed)
        if self._step < self._total or self._validation_missing():
            train(self._upstream(config), self)
        final = self._checkpoints.newest()
        if final is None or final.state is None or final.state.global_step != self._total:
            # Upstream came back early without an exception: never a success.
            raise Stopped("train", found=f"step {self._step} of {self._total}")
        return final

    @property
    def _total(self) -> int:
        return self._layout.plan.total

    def _go_on_from(self, marker: Marker) -> None:
        assert marker.state is not None, "a numbered checkpoint has a state"
        folder = self._layout.paths.checkpoints / str(marker.state.epoch)
        self._checkpoints.fetch(marker, folder)
        self.curve = decode_curve((folder / CURVE_NAME).read_bytes())
        self._seconds_before = self.curve[-1].seconds if self.curve else 0.0
        self._step, self._last = marker.state.global_step, marker
        if self._progress is not None:
            self._progress.advance(self._step, resumed=True)

    def _upstream(self, config: TrainConfig) -> Any:
        facts = {
            "target_layer_ids": list(self._layout.aux_layer_ids),
            "draft_vocab_size": self._layout.draft_vocab_size,
        }
        layout = self._layout
        return upstream_config(config, layout.paths, layout.plan, layout.split, facts)

    def began(self, step: int) -> None:
        """Upstream starts where our checkpoint says. Raises EnvironmentMisconfigured."""
        if step != self._step:
            raise EnvironmentMisconfigured(
                "speculators: global_step",
                wanted=f"{self._step}, from the checkpoint",
                found=step,
                remedy="install the version of speculators that eagle3 pins",
            )
        self._started = time.monotonic()

    def metrics(self, record: Mapping[str, Any], step: int) -> None:
        """Check a record and keep it. Raises DraftInvalid, ShardInvalid."""
        seconds = self._seconds_before + time.monotonic() - self._started
        point = read_record(record, step=step, seconds=seconds)
        if point is not None:
            self.curve.append(point)

    def stepped(self, step: int) -> None:
        """Count a step and show its loss."""
        self._step = step
        if self._progress is None:
            return
        point = self.curve[-1]
        accuracy = " ".join(f"{share:.2f}" for share in point.accuracy)
        self._progress.advance(1, note=f"loss {point.loss:.3f}, accuracy {accuracy}")

    def saved(self, folder: Path) -> None:
        """Store what upstream has saved, whole."""
        if folder.name == UNTRAINED:
            self._checkpoints.save_untrained(folder)
        else:
            self._last = self._checkpoints.save(folder, curve=encode_curve(self.curve))
            _remove_older(folder)

    def owes_validation(self, epoch: int) -> bool:
        """See `Watch.owes_validation`."""
        state = self._last.state if self._last else None
        return state is not None and state.epoch == epoch and self._validation_missing()

    def validated(self) -> None:
        """Let the last checkpoint's curve have the validation that followed it."""
        assert self._last is not None, "an epoch is saved before it is validated"
        self._last = self._checkpoints.with_curve(self._last, encode_curve(self.curve))

    def _validation_missing(self) -> bool:
        """Whether the last checkpoint ends an epoch that its curve has no validation of."""
        state = self._last.state if self._last else None
        if state is None or state.local_step:
            return False
        return not any(p.kind == "validation" and p.epoch == state.epoch for p in self.curve)


def _remove_older(saved: Path) -> None:
    """Delete the local folders of earlier epochs: what is kept of them lies in the store."""
    for folder in saved.parent.iterdir():
        if folder.name.isdecimal() and int(folder.name) < int(saved.name):
            shutil.rmtree(folder)


def last_validation(curve: list[CurvePoint]) -> dict[str, Any]:
    """Figures of the last validation for the manifest; empty where there was none."""
    validations = [point for point in curve if point.kind == "validation"]
    if not validations:
        return {}
    last = validations[-1]
    return {
        "validation_loss": round(last.loss, 6),
        "validation_accuracy": [round(share, 6) for share in last.accuracy],
    }
