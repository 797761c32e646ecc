"""The commands about artefacts, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import typer
from rich.console import Console

from jobs import delete as deletions
from jobs import lineage as lineages
from jobs import verify as verifications

ArtifactUrl = Annotated[str, typer.Argument(help="the prefix of an artefact, or of a run")]


def lineage(url: ArtifactUrl) -> int:
    """Show what an artefact was made from, back to the conversations."""
    return lineages.show(url, Console())


def delete(
    url: ArtifactUrl,
    also: Annotated[
        list[str] | None,
        typer.Option("--also", help="further runs that may rest on it, or folders of runs"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only show what would go")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="delete it")] = False,
) -> int:
    """Delete what no artefact rests on."""
    return deletions.delete(url, Console(), also=also or (), yes=yes, dry_run=dry_run)


def verify(
    url: ArtifactUrl,
    depth: Annotated[
        str, typer.Option("--depth", help="gate: manifests and one listing; full: every byte")
    ] = "full",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="run the verifier's own tokenizer code")
    ] = False,
) -> int:
    """Check that what is committed is whole."""
    return verifications.run(url, depth, Console(), trust_remote_code=trust_remote_code)


COMMANDS: Mapping[str, Callable[..., int]] = {
    "lineage": lineage,
    "delete": delete,
    "verify": verify,
}
"""Name of a command -> its function."""
