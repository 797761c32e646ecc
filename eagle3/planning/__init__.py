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

__all__ = [
    "DEFAULT_RATES",
    "DraftShape",
    "Known",
    "Rate",
    "RunPlan",
    "StagePlan",
    "TrainingMemory",
    "bytes_of",
    "bytes_per_token",
    "draft_shape",
    "extract_bytes",
    "frozen_parameters",
    "know",
    "served_parameters",
    "state_bytes",
    "tokens_of",
    "trained_parameters",
    "training_memory",
]
