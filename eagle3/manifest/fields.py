"""The fields of a manifest, and of what it names."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

MANIFEST_NAME = "data_config.json"
Natural = Annotated[int, msgspec.Meta(ge=0)]
FORMAT_VERSION = 2

# Id k is the residual stream entering layer k, so the last one is num_hidden_layers; older data
# counts a layer's output, one lower.
LAYER_ID_CONVENTION = "input_of_layer"
FINAL_HIDDEN_STATE = "pre_norm"
STATES_DTYPE = "bfloat16"


def default_layer_ids(num_hidden_layers: int) -> tuple[int, int, int, int]:
    """The ids that vLLM's own default takes, and the last: [2, n//2, n-3, n]."""
    n = num_hidden_layers
    return (2, n // 2, n - 3, n)


# Past so many objects a manifest names an index of them and not each by itself.
MOST_INLINE = 1000


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One object of an artefact: its path below the prefix, its bytes, and what it holds.

    `header_sha256` is that of the JSON at the head of a shard: whoever reads a shard
    row by row proves the header by it, and each row by the checksum that the header holds.
    `timed` objects hold seconds, rates or urls (a loss curve, a report): their bytes are checked
    like any other's, and stay out of the content digest.
    """

    path: str
    bytes: Natural
    sha256: str
    samples: Natural = 0
    tokens: Natural = 0
    timed: bool = False
    header_sha256: str = ""


class FileIndex(msgspec.Struct, frozen=True, kw_only=True):
    """The object that lists an artefact's objects, a `FileEntry` in JSON on each line."""

    path: str
    bytes: Natural
    sha256: str
    objects: Natural


class InputRef(msgspec.Struct, frozen=True, kw_only=True):
    """An upstream artefact as it was read: its kind, where it lay, and its content digest."""

    artifact: str
    url: str
    digest: str


class SourceFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of conversations as prepare read it."""

    url: str
    bytes: Natural
    sha256: str


class VerifierFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which verifier the data belongs to, never by path alone.

    `fingerprint` covers config.json, the weight index, the bytes of the three tensors that later
    stages use and pieces of every weight file, see `eagle3.verifier.fingerprint`. `vocab_size`
    is the number of rows of lm_head. `commit` is that of a hub repository: it tells where the
    weights lay and not what they are, so it is part of no comparison and of no digest.
    """

    fingerprint: str
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    commit: str = ""

    def elsewhere(self) -> VerifierFacts:
        """The same weights without the place that they were read from."""
        return msgspec.structs.replace(self, commit="")


class TokenizerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Fingerprint of the tokenizer's files together with the effective chat template."""

    fingerprint: str
    size: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a prefix holds. Unknown fields are ignored, so that newer writers can be read.

    Attributes:
        artifact: its kind, a word of `eagle3.stages.ARTIFACT_KINDS`.
        files: every object, in memory; in a store none of them where `index` is set.
        index: the object that lists them, in a store only, see `split`.
        inputs: input name -> the upstream manifest it was made from.
        sources: the conversations' files (prepare only).
        identity: hash of the inputs' digests and of the fields that affect the result.
        rows_in, rows_kept, rejected: rows_in = rows_kept + the sum of rejected, always.
        total_samples, total_tokens: sums over `files`.
        facts: figures particular to the kind, part of the digest.
        measured: rates and seconds, not part of the digest.
        layer_ids ... codec: hidden states only; `dtype` is that of the stored states.
    """

    artifact: str
    identity: str
    files: tuple[FileEntry, ...]
    index: FileIndex | None = None
    data_format_version: int = FORMAT_VERSION
    created_at: str = ""
    produced_by: dict[str, str] = {}
    inputs: dict[str, InputRef] = {}
    sources: tuple[SourceFile, ...] = ()
    config: dict[str, Any] = {}
    verifier: VerifierFacts | None = None
    tokenizer: TokenizerFacts | None = None
    rows_in: Natural = 0
    rows_kept: Natural = 0
    rejected: dict[str, Natural] = {}
    total_samples: Natural = 0
    total_tokens: Natural = 0
    facts: dict[str, Any] = {}
    measured: dict[str, float] = {}
    # Hidden states: with data_format_version and the two totals, the ten fields of version 1.
    model_path: str | None = None
    layer_ids: tuple[int, ...] | None = None
    max_seq_len: Natural | None = None
    tp_size: int | None = None
    total_time_seconds: float | None = None
    hidden_size: int | None = None
    num_layers_captured: int | None = None
    layer_id_convention: str | None = None
    final_hidden_state: str | None = None
    dtype: str | None = None
    codec: str | None = None
