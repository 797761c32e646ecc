"""From our configuration to upstream's: every field by name, and proof that it arrived.

Upstream ignores keys that it does not know, so a renamed field would silently fall back to a
default. Each one is looked up first and compared with what upstream resolved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from speculators.train.config import TrainConfig as UpstreamConfig
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

from eagle3.config import TrainConfig
from eagle3.draft.backend import BACKEND
from eagle3.draft.rows import Split
from eagle3.errors import ConfigError, EnvironmentMisconfigured


@dataclass(frozen=True, kw_only=True)
class Paths:
    """Local files and folders of one training: all below its scratch folder.

    Attributes:
        verifier: the three tensors, plain config and a weight index.
        layer_config: folder with the decoder's config.json.
        d2t, t2d: the mapping as .npy files.
        dataset: the data set folder with the row index.
        checkpoints: where upstream saves and resumes.
    """

    verifier: Path
    layer_config: Path
    d2t: Path
    t2d: Path
    dataset: Path
    checkpoints: Path

    @classmethod
    def below(cls, scratch: Path) -> Paths:
        """The layout of a scratch folder. Nothing is created."""
        return cls(
            verifier=scratch / "verifier",
            layer_config=scratch / "draft",
            d2t=scratch / "d2t.npy",
            t2d=scratch / "t2d.npy",
            dataset=scratch / "dataset",
            checkpoints=scratch / "checkpoints",
        )


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """How many steps each epoch takes: packing makes it differ from one to the next."""

    steps_per_epoch: tuple[int, ...]

    @property
    def total(self) -> int:
        """Steps of the whole training."""
        return sum(self.steps_per_epoch)


def plan_steps(
    lengths: list[int], config: TrainConfig, *, num_train: int, world_size: int
) -> StepPlan:
    """The steps that upstream's packing will make of these rows.

    `max_steps` shortens the plan to whole and one partial epoch, since upstream, once there,
    would still take one step of every epoch that is left.

    Args:
        lengths: tokens of every row, in order.
        num_train: rows that train, the first ones.
        world_size: processes that share a step.

    Raises ConfigError where the rows do not fill one step on every process.
    """
    sampler = MultipackDistributedBatchSamplerV2(
        batch_max_length=config.total_seq_len,
        lengths=lengths[:num_train],
        num_replicas=world_size,
        rank=0,
        seed=config.seed,
    )
    steps: list[int] = []
    for epoch in range(config.epochs):
        sampler.set_epoch(epoch)
        left = len(sampler) if config.max_steps is None else config.max_steps - sum(steps)
        if left <= 0:
            break
        steps.append(min(len(sampler), left))
    if not steps or not min(steps):
        raise ConfigError(
            "train: rows",
            wanted=f"rows for at least one step on each of {world_size} processes",
            found=f"{num_train} rows to train on",
            remedy="prepare more conversations, or run on fewer GPUs",
        )
    return StepPlan(steps_per_epoch=tuple(steps))


def upstream_config(
    config: TrainConfig, paths: Paths, plan: StepPlan, split: Split, facts: Mapping[str, Any]
) -> UpstreamConfig:
    """The resolved configuration of upstream's trainer.

    Args:
        facts: what the upstream artefacts decide: `target_layer_ids`, `draft_vocab_size`.

    Raises EnvironmentMisconfigured where upstream did not take a field over as it was given.
    """
    values = {**_fields(config, paths, plan, split), **facts}
    resolved = UpstreamConfig.from_sources(cli=values, argv=["python", "-m", "jobs.train"])
    flat = resolved.flatten()
    for name, value in values.items():
        if name not in flat or flat[name] != value:
            raise EnvironmentMisconfigured(
                f"speculators: {name}",
                wanted=value,
                found=flat.get(name, "no such field"),
                remedy="install the version of speculators that eagle3 pins",
            )
    return resolved


def _fields(config: TrainConfig, paths: Paths, plan: StepPlan, split: Split) -> dict[str, Any]:
    gpu = torch.accelerator.is_available()
    return {
        "speculator_type": "eagle3",
        "seed": config.seed,
        "verifier_name_or_path": str(paths.verifier),
        "draft_config": str(paths.layer_config),
        "d2t_path": str(paths.d2t),
        "t2d_path": str(paths.t2d),
        # Of no use to EAGLE-3; given, so that upstream opens no tokenizer to find one.
        "mask_token_id": 0,
        "norm_before_fc": config.norm_before_fc,
        "norm_output": config.norm_output,
        # The other two need an accelerator's compiler.
        "draft_attn_impl": "simple_flex_attention" if gpu else "sdpa",
        "loss_implementation": "fused" if gpu else "eager",
        "data_path": str(paths.dataset),
        "hidden_states_backend": BACKEND,
        "on_missing": "raise",
        "total_seq_len": config.total_seq_len,
        "train_data_ratio": split.ratio,
        "hidden_states_dtype": config.dtype,
        "num_workers": config.num_workers,
        "ttt_steps": config.ttt_steps,
        "optimizer": config.optimizer,
        "lr": config.learning_rate,
        "scheduler_type": config.scheduler,
        "scheduler_warmup_ratio": config.warmup_share,
        "scheduler_total_steps": plan.total,
        "epochs": len(plan.steps_per_epoch),
        "max_steps": plan.total,
        "checkpoint_freq": 1 / config.checkpoints_per_epoch,
        "save_path": str(paths.checkpoints),
        "log_dir": str(paths.checkpoints / "logs"),
        "log_freq": 1,
    }
