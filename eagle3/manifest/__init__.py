"""The manifest of an artefact: `data_config.json`, version 2.

A manifest is the commit of its prefix: written last, by exclusive create, never changed. No
manifest means that the artefact does not exist, whatever objects lie there. For hidden states it
keeps the ten fields of version 1 under their names and types.
"""

from eagle3.manifest.checks import check, check_states
from eagle3.manifest.coding import decode, encode, split
from eagle3.manifest.digests import digest, identity_of, totals
from eagle3.manifest.fields import (
    FINAL_HIDDEN_STATE,
    FORMAT_VERSION,
    LAYER_ID_CONVENTION,
    MANIFEST_NAME,
    MOST_INLINE,
    STATES_DTYPE,
    FileEntry,
    FileIndex,
    InputRef,
    Manifest,
    Natural,
    SourceFile,
    TokenizerFacts,
    VerifierFacts,
    default_layer_ids,
)
from eagle3.manifest.seal import sealed

__all__ = [
    "FINAL_HIDDEN_STATE",
    "FORMAT_VERSION",
    "LAYER_ID_CONVENTION",
    "MANIFEST_NAME",
    "MOST_INLINE",
    "STATES_DTYPE",
    "FileEntry",
    "FileIndex",
    "InputRef",
    "Manifest",
    "Natural",
    "SourceFile",
    "TokenizerFacts",
    "VerifierFacts",
    "check",
    "check_states",
    "decode",
    "default_layer_ids",
    "digest",
    "encode",
    "identity_of",
    "sealed",
    "split",
    "totals",
]
