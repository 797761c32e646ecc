"""Everything particular to a verifier: its config, key table, three tensors and tokenizer.

A verifier is opened from a folder, a hub id or any fsspec URL, and never loaded: of its weights
only three tensors are read (embedding, final norm, lm_head), which is all that later stages need.
`prepare` saves them under plain names with a plain text config and the tokenizer as the
`verifier/` artefact; every later stage loads that with `load_verifier_artifact`.
"""

from eagle3.verifier.loaded import LoadedVerifier, load_verifier_artifact
from eagle3.verifier.opened import Verifier, open_verifier, reopen_verifier
from eagle3.verifier.text_model import (
    CONFIG_NAME,
    TENSORS_NAME,
    TextModel,
    ThreeTensors,
)

__all__ = [
    "CONFIG_NAME",
    "TENSORS_NAME",
    "LoadedVerifier",
    "TextModel",
    "ThreeTensors",
    "Verifier",
    "load_verifier_artifact",
    "open_verifier",
    "reopen_verifier",
]
