"""The stages, once: what each reads and writes, the image it runs in, the GPUs it holds.

README, the images and the chart agree with this table by test. The word in `name` is the
stage's only name: job file, config section, image value, test, log field and bucket folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Image = Literal["base", "extract", "train"]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of the pipeline.

    Attributes:
        name: the one word for it.
        reads: input name -> the artefact kinds that may stand there, the default first.
        writes: the artefact kinds it commits, each under a prefix of that name.
        image: the dependency set it runs in.
        gpus: GPUs a pod of it holds in production.
        indexed: whether several pods may share its work.
        optional: whether a run may leave it out.
    """

    name: str
    reads: dict[str, tuple[str, ...]]
    writes: tuple[str, ...]
    image: Image
    gpus: int
    indexed: bool = False
    optional: bool = False


STAGES: tuple[Stage, ...] = (
    Stage(name="prepare", reads={}, writes=("verifier", "prepare"), image="base", gpus=0),
    Stage(
        name="regenerate",
        reads={"rows": ("prepare",), "verifier": ("verifier",)},
        writes=("regenerate",),
        image="extract",
        gpus=8,
        indexed=True,
        optional=True,
    ),
    Stage(
        name="extract",
        reads={"rows": ("regenerate", "prepare"), "verifier": ("verifier",)},
        writes=("extract",),
        image="extract",
        gpus=8,
        indexed=True,
    ),
    Stage(
        name="vocab",
        reads={"rows": ("regenerate", "prepare"), "verifier": ("verifier",)},
        writes=("vocab",),
        image="base",
        gpus=0,
    ),
    Stage(
        name="train",
        reads={"states": ("extract",), "vocab": ("vocab",), "verifier": ("verifier",)},
        writes=("train",),
        image="train",
        gpus=8,
    ),
    Stage(
        name="export",
        reads={"train": ("train",), "vocab": ("vocab",), "verifier": ("verifier",)},
        writes=("export",),
        image="train",
        gpus=0,
    ),
    Stage(
        name="evaluate",
        reads={"export": ("export",), "prompts": ("prepare",), "verifier": ("verifier",)},
        writes=("evaluate",),
        image="extract",
        gpus=8,
    ),
)

STAGE_NAMES: tuple[str, ...] = tuple(stage.name for stage in STAGES)
ARTIFACT_KINDS: tuple[str, ...] = tuple(kind for stage in STAGES for kind in stage.writes)


def stage_named(name: str) -> Stage:
    """The stage of that name; KeyError for a word that is none (a mistake of ours)."""
    return {stage.name: stage for stage in STAGES}[name]
