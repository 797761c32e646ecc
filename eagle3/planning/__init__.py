"""What a run will take, before any GPU is asked for: known facts, and arithmetic on them.

Torch is not needed: the verifier's sizes come from its config.json or its manifest.
"""

from eagle3.planning.arithmetic import (
    DEFAULT_RATES,
    DraftShape,
    Rate,
    RunPlan,
    StagePlan,
    TrainingMemory,
    bytes_of,
    bytes_per_token,
    draft_shape,
    extract_bytes,
    frozen_parameters,
    served_parameters,
    state_bytes,
    tokens_of,
    trained_parameters,
    training_memory,
)
from eagle3.planning.known import Known, know
from eagle3.planning.standing import Done, done_of, other_data, other_settings

__all__ = [
    "DEFAULT_RATES",
    "Done",
    "DraftShape",
    "Known",
    "Rate",
    "RunPlan",
    "StagePlan",
    "TrainingMemory",
    "bytes_of",
    "bytes_per_token",
    "done_of",
    "draft_shape",
    "extract_bytes",
    "frozen_parameters",
    "know",
    "other_data",
    "other_settings",
    "served_parameters",
    "state_bytes",
    "tokens_of",
    "trained_parameters",
    "training_memory",
]
