"""The manifest of an artefact: `data_config.json`, version 2.

A manifest is the commit of its prefix: written last, by exclusive create, never changed. No
manifest means that the artefact does not exist, whatever objects lie there. For hidden states it
keeps the ten fields of version 1 under their names and types.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

import msgspec

from eagle3.errors import ManifestInvalid

MANIFEST_NAME = "data_config.json"
Natural = Annotated[int, msgspec.Meta(ge=0)]
FORMAT_VERSION = 2

# Id k is the residual stream entering layer k, so the last one is num_hidden_layers; older data
# counts a layer's output, one lower.
LAYER_ID_CONVENTION = "input_of_layer"
FINAL_HIDDEN_STATE = "pre_norm"
STATES_DTYPE = "bfloat16"

# Past so many objects a manifest names an index of them and not each by itself.
MOST_INLINE = 1000

# Where and when work was done does not change what it is: none of these enter the digest.
# `config` is left out because `identity` stands for the part of it that affects the result.
_NOT_IN_DIGEST = frozenset(
    {
        "created_at",
        "produced_by",
        "config",
        "index",
        "measured",
        "model_path",
        "total_time_seconds",
        "tp_size",
    }
)


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


def encode(manifest: Manifest) -> bytes:
    """The manifest as it lies in a store: indented JSON, keys sorted, a newline at the end.

    The version is always written, although it has a default, since readers of every version
    look at it first.
    """
    record = msgspec.to_builtins(manifest)
    record["data_format_version"] = manifest.data_format_version
    plain = msgspec.json.encode(record, order="sorted")
    return msgspec.json.format(plain, indent=2) + b"\n"


def split(manifest: Manifest) -> tuple[Manifest, bytes]:
    """A manifest as it is stored past MOST_INLINE objects, and the bytes of its index.

    The same objects give the same index under the same name.
    """
    encoder = msgspec.json.Encoder(order="sorted")
    lines = b"".join(encoder.encode(entry) + b"\n" for entry in manifest.files)
    sha256 = hashlib.sha256(lines).hexdigest()
    index = FileIndex(
        path=f"files-{sha256[:16]}.jsonl",
        bytes=len(lines),
        sha256=sha256,
        objects=len(manifest.files),
    )
    return msgspec.structs.replace(manifest, files=(), index=index), lines


def decode(data: bytes, where: str, read: Callable[[str], bytes] | None = None) -> Manifest:
    """Read and check a manifest.

    Args:
        where: names it in an error.
        read: the bytes of an object beside it, for an index. Raises FileNotFoundError.

    Raises ManifestInvalid for anything that is no whole manifest of this version.
    """
    try:
        head = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ManifestInvalid(
            where, wanted="a JSON object", found=error, remedy="run the stage that wrote it again"
        ) from error
    version = head.get("data_format_version")
    if version == 1:
        raise ManifestInvalid(
            f"{where}: data_format_version",
            wanted=FORMAT_VERSION,
            found="1, whose layer ids follow another convention",
            remedy="extract the hidden states again; version 1 is never read in place",
        )
    if version != FORMAT_VERSION:
        raise ManifestInvalid(
            f"{where}: data_format_version",
            wanted=f"the number {FORMAT_VERSION}",
            found=repr(version),
            remedy="use the version of eagle3 that wrote it",
        )
    try:
        manifest = msgspec.convert(head, Manifest)
    except msgspec.ValidationError as error:
        raise ManifestInvalid(
            where,
            wanted="a whole manifest",
            found=error,
            remedy="run the stage that wrote it again",
        ) from error
    if manifest.index is not None:
        files = _indexed(manifest.index, where, read)
        manifest = msgspec.structs.replace(manifest, files=files, index=None)
    check(manifest, where)
    return manifest


def _indexed(
    index: FileIndex, where: str, read: Callable[[str], bytes] | None
) -> tuple[FileEntry, ...]:
    """The entries of an index, whose bytes are proven first. Raises ManifestInvalid."""
    try:
        lines = read(index.path) if read and "/" not in index.path else b""
        found = (len(lines), lines.count(b"\n"), hashlib.sha256(lines).hexdigest())
        if found != (index.bytes, index.objects, index.sha256):
            raise FileNotFoundError(f"{found[0]} bytes of {found[1]} objects, or other ones")
        # Line by line: dicts of a hundred thousand entries would take many times the memory.
        return tuple(msgspec.json.Decoder(FileEntry).decode_lines(lines))
    except (FileNotFoundError, msgspec.DecodeError) as error:
        raise ManifestInvalid(
            f"{where}: index",
            wanted=f"{index.path}, {index.bytes} bytes, {index.objects} objects",
            found=error,
            remedy="run the stage that wrote it again under a prefix of its own",
        ) from error


def check(manifest: Manifest, where: str) -> None:
    """What must hold inside one manifest, whatever its kind. Raises ManifestInvalid."""
    rejected = sum(manifest.rejected.values())
    sums = {
        "rows_in": (manifest.rows_kept + rejected, manifest.rows_in),
        "total_samples": (sum(f.samples for f in manifest.files), manifest.total_samples),
        "total_tokens": (sum(f.tokens for f in manifest.files), manifest.total_tokens),
    }
    for field, (wanted, found) in sums.items():
        if wanted != found:
            raise ManifestInvalid(
                f"{where}: {field}",
                wanted=f"{wanted}, the sum of its parts",
                found=found,
                remedy="run the stage that wrote it again",
            )
    paths = [entry.path for entry in manifest.files]
    doubled = sorted(path for path, count in Counter(paths).items() if count > 1)
    unsafe = [path for path in paths if path.startswith("/") or ".." in path.split("/")]
    if doubled or unsafe or MANIFEST_NAME in paths:
        raise ManifestInvalid(
            f"{where}: files",
            wanted="each object once, below the prefix",
            found=(doubled + unsafe or [MANIFEST_NAME])[0],
            remedy="run the stage that wrote it again",
        )


def check_states(manifest: Manifest, where: str) -> None:
    """What must hold for hidden states, so that a consumer reads what was captured.

    Raises ManifestInvalid naming the field.
    """
    facts, ids = manifest.verifier, manifest.layer_ids or ()
    wanted = {
        "layer_id_convention": (LAYER_ID_CONVENTION, manifest.layer_id_convention),
        "final_hidden_state": (FINAL_HIDDEN_STATE, manifest.final_hidden_state),
        "dtype": (STATES_DTYPE, manifest.dtype),
        "num_layers_captured": (len(ids), manifest.num_layers_captured),
        "layer_ids": (sorted(set(ids)), list(ids)),
    }
    unproven = [f.path for f in manifest.files if f.samples and not f.header_sha256]
    if unproven:
        wanted[f"files: {unproven[0]}: header_sha256"] = ("that of the shard's header", "none")
    if facts is not None:
        wanted["hidden_size"] = (facts.hidden_size, manifest.hidden_size)
        wanted["layer_ids: the last"] = (facts.num_hidden_layers, ids[-1] if ids else None)
    for field, (right, found) in wanted.items():
        if right != found:
            raise ManifestInvalid(
                f"{where}: {field}",
                wanted=right,
                found=found,
                remedy="extract the hidden states again",
            )


def digest(manifest: Manifest) -> str:
    """Content digest: sha256 over canonical JSON without times, urls, rates and versions.

    The same work done again, or elsewhere, has the same digest.
    """
    record = {k: v for k, v in msgspec.to_builtins(manifest).items() if k not in _NOT_IN_DIGEST}
    record["data_format_version"] = manifest.data_format_version
    record["files"] = [
        {"path": entry["path"]} if entry.get("timed") else entry for entry in record["files"]
    ]
    for part in [*record.get("inputs", {}).values(), *record.get("sources", ())]:
        part.pop("url", None)
    (record.get("verifier") or {}).pop("commit", None)
    return hashlib.sha256(msgspec.json.encode(record, order="sorted")).hexdigest()


def identity_of(inputs: Mapping[str, str], settings: Mapping[str, Any]) -> str:
    """Hash that decides whether work is reused: upstream digests and result-affecting settings.

    Args:
        inputs: input name -> content digest.
        settings: field name -> value, JSON-like.
    """
    record = {"inputs": dict(inputs), "settings": dict(settings)}
    return hashlib.sha256(msgspec.json.encode(record, order="sorted")).hexdigest()


def totals(entries: Iterable[FileEntry]) -> tuple[int, int]:
    """(samples, tokens) over objects."""
    entries = list(entries)
    return sum(e.samples for e in entries), sum(e.tokens for e in entries)
