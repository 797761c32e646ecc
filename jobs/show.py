"""`eagle3 show`: rows as they will be trained on, and rows that were rejected.

What is supervised is coloured, and on anything but a terminal it stands between `[[` and `]]`.
Special tokens are spelt out. Nothing that a text holds is obeyed by the terminal.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from eagle3 import artifact as artifacts
from eagle3.artifact import Artifact
from eagle3.conversations import (
    Stretch,
    bracketed,
    read_rejected,
    rejected_in_words,
    stretches,
    visible,
)
from eagle3.errors import ConfigError, ManifestInvalid, UpstreamMissing
from eagle3.lineage import input_of
from eagle3.manifest import MANIFEST_NAME, FileEntry, Manifest
from eagle3.shards import ShardReader, TokenRow, decode_rows, read_tokens
from eagle3.store import open_store
from eagle3.verifier import LoadedVerifier, load_verifier_artifact

_SHOWN = ("prepare", "regenerate", "extract")
_STYLES = {
    (False, False): "dim",
    (False, True): "magenta",
    (True, False): "bold green",
    (True, True): "bold magenta underline",
}


def run(
    url: str,
    console: Console,
    *,
    rows: int,
    rejected: bool = False,
    row: str | None = None,
    trust_remote_code: bool = False,
) -> int:
    """Print rows of an artefact, or its rejected ones.

    Args:
        rows: how many at most.
        row: the one row of this name.

    Raises UpstreamMissing, ConfigError, and ManifestInvalid for objects that are not those of
    the manifest.
    """
    artifact = _find(url)
    manifest = artifact.manifest
    console.print(Text(_headline(manifest)), soft_wrap=True)
    if rejected:
        _show_rejected(artifact, console, rows)
        return 0
    found = _named(artifact, row) if row else _first(artifact, rows)
    with tempfile.TemporaryDirectory(prefix="eagle3-show-") as scratch:
        verifier = _verifier(artifact, Path(scratch), trust_remote_code)
        for one in found:
            _show_row(one, verifier, console)
    return 0


def _find(url: str) -> Artifact:
    store = open_store(url)
    found = artifacts.find(store)
    if found is None:
        raise UpstreamMissing(
            f"{store.url}/{MANIFEST_NAME}",
            wanted=f"a committed artefact: {', '.join(_SHOWN)}",
            found="no manifest",
            remedy="name the artefact's own folder, such as RUN/prepare",
        )
    if found.manifest.artifact not in _SHOWN:
        raise ConfigError(
            store.url,
            wanted=f"an artefact with token rows: {', '.join(_SHOWN)}",
            found=found.manifest.artifact,
            remedy="name one of these",
        )
    return found


def _headline(manifest: Manifest) -> str:
    return (
        f"{manifest.artifact}: {manifest.rows_in} in, {manifest.rows_kept} kept, "
        f"{rejected_in_words(manifest.rejected)}; {manifest.total_samples} token rows, "
        f"{manifest.total_tokens} tokens"
    )


def _verifier(artifact: Artifact, scratch: Path, trusted: bool) -> LoadedVerifier:
    """The `verifier/` artefact whose tokenizer the rows were made with."""
    url = f"{artifact.store.url.rpartition('/')[0]}/verifier"
    named = "verifier" in artifact.manifest.inputs
    beside = input_of(artifact, "verifier") if named else artifacts.find(open_store(url))
    if beside is None:
        raise UpstreamMissing(
            f"{url}/{MANIFEST_NAME}",
            wanted="the verifier artefact, for its tokenizer",
            found="no manifest",
            remedy="bring it back to where the run wrote it",
        )
    if beside.manifest.tokenizer != artifact.manifest.tokenizer:
        raise ManifestInvalid(
            f"{beside.store.url}: tokenizer",
            wanted="the one that the rows were made with",
            found="another",
            remedy="name the artefact in the run that it belongs to",
        )
    return load_verifier_artifact(beside, scratch, trust_remote_code=trusted)


def _shards(artifact: Artifact) -> list[FileEntry]:
    return [entry for entry in artifact.manifest.files if entry.samples]


def _rows(artifact: Artifact, entry: FileEntry) -> Iterator[TokenRow]:
    """The rows of a shard: token shards are read whole, of hidden states only the tokens."""
    if artifact.manifest.artifact != "extract":
        yield from decode_rows(artifact.read(entry.path), entry.path, unanswered=True)
        return
    reader = ShardReader(artifact.store, entry.path)
    for ref in reader.refs(header_sha256=entry.header_sha256 or None):
        yield read_tokens(artifact.store, ref)


def _first(artifact: Artifact, rows: int) -> Iterator[TokenRow]:
    left = rows
    for entry in _shards(artifact):
        for one in _rows(artifact, entry):
            if not left:
                return
            left -= 1
            yield one


def _named(artifact: Artifact, name: str) -> list[TokenRow]:
    for entry in _shards(artifact):
        for one in _rows(artifact, entry):
            if one.row == name:
                return [one]
    raise ConfigError(
        "--row",
        wanted="the name of a row, such as 000000012.0",
        found=f"{name}, which {artifact.store.url} does not have",
        remedy="take one that `eagle3 show` prints",
    )


def _show_row(row: TokenRow, verifier: LoadedVerifier, console: Console) -> None:
    ids, mask = row.input_ids.tolist(), row.loss_mask.tolist()
    parts = stretches(verifier.load_tokenizer(), ids, mask)
    text = _coloured(parts) if console.is_terminal else Text(bracketed(parts))
    title = f"\nrow {visible(row.row)}: {len(ids)} tokens, {sum(mask)} supervised"
    console.print(Text(title, style="bold"), soft_wrap=True)
    console.print(text, soft_wrap=True)


def _coloured(parts: list[Stretch]) -> Text:
    return Text.assemble(*((part.text, _STYLES[part.supervised, part.special]) for part in parts))


def _show_rejected(artifact: Artifact, console: Console, rows: int) -> None:
    """The rejected rows that prepare recorded, reason by reason."""
    sources = artifact.manifest.sources
    found = sorted(read_rejected(artifact), key=lambda one: one.reason)
    counts: dict[str, int] = {}
    for one in found:
        counts[one.reason] = counts.get(one.reason, 0) + 1
        if counts[one.reason] > rows:
            continue
        url = sources[one.source].url if one.source < len(sources) else "?"
        detail = f" ({one.detail})" if one.detail else ""
        title = visible(f"{one.reason}{detail}")
        console.print(Text(f"\n{title}", style="bold red"), soft_wrap=True)
        console.print(Text(visible(f"{url}:{one.line}"), style="cyan"), soft_wrap=True)
        if one.text:
            console.print(Text(visible(one.text)), soft_wrap=True)
    if not found:
        console.print(Text("no rejected row is recorded here"))
