"""`eagle3 lineage`: from an artefact back to the conversations, as a tree on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from eagle3.errors import Eagle3Error
from eagle3.lineage import Link, artifact_or_last, trace
from eagle3.manifest import Manifest, SourceFile

_DIGEST = 12
_MOST_SOURCES = 20
_WIDEST = 4096


def show(url: str, console: Console) -> int:
    """Print what an artefact, or the last one of a run, was made from.

    Returns 0, or the exit code of the first broken link: 66 where an artefact is missing, 65
    where another content stands in its place. Raises as `artifact_or_last`.
    """
    top = trace(artifact_or_last(url))
    # A URL is for copying: it is neither cut nor broken into lines.
    console.width = _WIDEST
    console.print(tree(top))
    broken = list(top.errors())
    for error in broken:
        console.print(Text(str(error), style="red"))
    return broken[0].exit_code if broken else 0


def tree(link: Link) -> Tree:
    """A link and all below it; the conversations' files are the leaves."""
    found = Tree(_label(link))
    for below in link.below:
        found.children.append(tree(below))
    if link.artifact is not None and not link.repeated:
        sources = link.artifact.manifest.sources
        for source in sources[:_MOST_SOURCES]:
            found.add(_source(source))
        if len(sources) > _MOST_SOURCES:
            found.add(Text(f"and {_more(sources[_MOST_SOURCES:])}"))
    return found


def _label(link: Link) -> Text:
    label = Text()
    if link.name:
        label.append(f"{link.name}: ", style="dim")
    label.append(link.ref.artifact, style="bold")
    label.append(f" {link.ref.digest[:_DIGEST]}  {link.ref.url}")
    if link.error is not None:
        label.append(f"  BROKEN: {_broken(link.error)}", style="bold red")
    elif link.repeated:
        label.append("  as above", style="dim")
    elif link.artifact is not None:
        if link.artifact.store.url != link.ref.url:
            label.append(f"  found at {link.artifact.store.url}")
        label.append(f"  {_told(link.artifact.manifest)}")
    return label


def _told(manifest: Manifest) -> str:
    parts = []
    if manifest.total_samples:
        parts.append(f"{manifest.total_samples:,} rows of {manifest.total_tokens:,} tokens")
    if manifest.rejected:
        parts.append(f"{sum(manifest.rejected.values()):,} rejected")
    if manifest.artifact == "verifier" and manifest.verifier is not None:
        commit = f" at {manifest.verifier.commit}" if manifest.verifier.commit else ""
        parts.append(f"fingerprint {manifest.verifier.fingerprint[:_DIGEST]}{commit}")
    parts.append(manifest.created_at or "at an unknown time")
    return ", ".join(parts)


def _broken(error: Eagle3Error) -> str:
    return f"found {error.found}"


def _source(source: SourceFile) -> Text:
    return Text(f"{source.url}  {source.bytes:,} bytes, sha256 {source.sha256}")


def _more(sources: Sequence[SourceFile]) -> str:
    return f"{len(sources):,} more files of {sum(one.bytes for one in sources):,} bytes"
