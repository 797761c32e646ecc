"""The commands about artefacts, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

import typer
from rich.console import Console

from jobs import lineage as lineages

ArtifactUrl = Annotated[str, typer.Argument(help="the prefix of an artefact, or of a run")]


def lineage(url: ArtifactUrl) -> int:
    """Show what an artefact was made from, back to the conversations."""
    return lineages.show(url, Console())


COMMANDS: Mapping[str, Callable[..., int]] = {"lineage": lineage}
"""Name of a command -> its function."""
