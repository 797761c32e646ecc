"""What the command's arguments are: their types, their help, and the checks that they share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from eagle3.config import RunConfig
from eagle3.errors import ConfigError
from eagle3.stages import STAGE_NAMES
from jobs.arguments import run_store

ConfigFile = Annotated[Path, typer.Option("--config", help="the run's YAML file")]
MaybeConfigFile = Annotated[Path | None, typer.Option("--config", help="the run's YAML file")]
StoreUrl = Annotated[
    str | None, typer.Option("--store", help="the run's prefix, any fsspec URL; over the file's")
]
Verifier = Annotated[
    str | None,
    typer.Option("--verifier", help="folder, hub id or fsspec URL; over the file's"),
]
Data = Annotated[
    list[str] | None,
    typer.Option("--data", help="JSONL or Parquet at any fsspec URL, repeatable; over the file's"),
]
FirstStage = Annotated[
    str | None, typer.Option("--from", metavar="STAGE", help=", ".join(STAGE_NAMES))
]
RUN_HELP = "the run's name, as `kubectl get configmaps -l app.kubernetes.io/name=eagle3` shows it"
RunName = Annotated[str, typer.Argument(help=RUN_HELP)]
RunOption = Annotated[str, typer.Option("--run", help=RUN_HELP)]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="by default the kubeconfig's")
]
Context = Annotated[str | None, typer.Option("--context", help="of the kubeconfig")]
LastStage = Annotated[str | None, typer.Option("--until", metavar="STAGE", help="as --from")]


def refuse_no_stage(option: str, name: str) -> None:
    """Raises ConfigError where a name is no stage's."""
    if name not in STAGE_NAMES:
        raise ConfigError(
            option, wanted=f"one of {', '.join(STAGE_NAMES)}", found=name, remedy="name a stage"
        )


def overridden(config: RunConfig, verifier: str | None, data: list[str] | None) -> RunConfig:
    """The configuration with what the command line says over what the file says."""
    if verifier:
        section = msgspec.structs.replace(config.verifier, source=verifier)
        config = msgspec.structs.replace(config, verifier=section)
    if data:
        rows = msgspec.structs.replace(config.prepare, data=tuple(data))
        config = msgspec.structs.replace(config, prepare=rows)
    return config


def store_url(config: RunConfig, store: str | None) -> str:
    """The run's prefix, from --store, the environment or the file. Raises ConfigError."""
    return run_store(config, store).url


def tell(line: str) -> None:
    """A line for the person who gave the command."""
    typer.echo(line)
