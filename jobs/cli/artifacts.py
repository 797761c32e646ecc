"""The commands about artefacts, wherever they lie."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from eagle3.config import load_config
from eagle3.store import open_store
from jobs import delete as deletions
from jobs import lineage as lineages
from jobs import plan as plans
from jobs import verify as verifications
from jobs.cli.options import ConfigFile, Data, StoreUrl, Verifier, overridden, store_url
from jobs.cli.tables import table_console
from jobs.local import StageProcesses, config_file

ArtifactUrl = Annotated[str, typer.Argument(help="the prefix of an artefact, or of a run")]


def lineage(url: ArtifactUrl) -> int:
    """Show the tree from an artefact back to the conversations."""
    return lineages.show(url, table_console())


def delete(
    url: ArtifactUrl,
    also: Annotated[
        list[str] | None,
        typer.Option("--also", help="further runs that may rest on it, or folders of runs"),
    ] = None,
    stopped: Annotated[
        bool, typer.Option("--stopped", help="no process works on it any more: you have looked")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only show what would go")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="delete it")] = False,
) -> int:
    """Delete what no artefact rests on."""
    return deletions.delete(
        url, table_console(), also=also or (), stopped=stopped, yes=yes, dry_run=dry_run
    )


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
    return verifications.run(url, depth, table_console(), trust_remote_code=trust_remote_code)


def import_(
    source: Annotated[str, typer.Argument(help="a folder of version 1, at a path or any URL")],
    config: ConfigFile,
    store: StoreUrl = None,
) -> int:
    """Take over hidden states of version 1 into a new run."""
    # In a process of its own, like a stage: what it needs is slow to import.
    resolved = load_config(config)
    opened = open_store(store_url(resolved, store))
    with config_file(resolved) as file, StageProcesses(file, opened) as processes:
        return processes.run("importing", "--source", source)


def plan(
    config: ConfigFile,
    store: StoreUrl = None,
    verifier: Verifier = None,
    data: Data = None,
    nodes: Annotated[int, typer.Option(min=1, help="that share regenerate and extract")] = 1,
    rates: Annotated[
        list[Path] | None,
        typer.Option("--rates", help="JSON with tokens a second by stage, repeatable"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for a program")] = False,
) -> int:
    """Say what a run will take, before any GPU is asked for."""
    resolved = overridden(load_config(config), verifier, data)
    url = store or os.environ.get("EAGLE3_STORE") or resolved.store
    made = plans.make_plan(
        resolved, open_store(url) if url else None, nodes=nodes, rates=rates or ()
    )
    if as_json:
        typer.echo(plans.as_json(made))
    else:
        plans.show(made, table_console())
    return 0


def show(
    url: Annotated[str, typer.Argument(help="the prefix of prepare, regenerate or extract")],
    rows: Annotated[
        int, typer.Option(min=1, help="how many at most; of rejected ones, for each reason")
    ] = 3,
    rejected: Annotated[
        bool, typer.Option("--rejected", help="rows that prepare rejected, and why")
    ] = False,
    row: Annotated[
        str | None, typer.Option(help="the row of this name, such as 000000012.0")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="run the verifier's own tokenizer code")
    ] = False,
) -> int:
    """Show token rows as they will be trained, or rejected ones."""
    # Tokenizers are slow to import, which no other command should wait for.
    showing = importlib.import_module("jobs.show")
    code: int = showing.run(
        url,
        table_console(),
        rows=rows,
        rejected=rejected,
        row=row,
        trust_remote_code=trust_remote_code,
    )
    return code


COMMANDS: Mapping[str, Callable[..., int]] = {
    "lineage": lineage,
    "delete": delete,
    "verify": verify,
    "show": show,
    "import": import_,
    "plan": plan,
}
"""Name of a command -> its function."""
