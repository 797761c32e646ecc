"""The commands of a run on this machine: all stages, one of them, its gate, its configuration."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from eagle3.config import RunConfig, load_config
from eagle3.config_text import render, template
from eagle3.errors import ConfigError
from eagle3.stages import stage_named
from jobs import gate as gates
from jobs.cli.options import (
    ConfigFile,
    Data,
    FirstStage,
    LastStage,
    MaybeConfigFile,
    StoreUrl,
    Verifier,
    refuse_no_stage,
    tell,
)
from jobs.local import chosen_stages, run_stages
from jobs.process import load_run


def run(
    config: ConfigFile,
    store: StoreUrl = None,
    first: FirstStage = None,
    last: LastStage = None,
    verifier: Verifier = None,
    data: Data = None,
) -> int:
    """Go through all stages, or go on where a run was."""
    for option, name in (("--from", first), ("--until", last)):
        if name is not None:
            refuse_no_stage(option, name)
    resolved = _overridden(load_config(config), verifier, data)
    url = _store_url(config, store)
    return run_stages(resolved, url, chosen_stages(resolved, first, last), tell)


def config(
    config: MaybeConfigFile = None,
    defaults: Annotated[bool, typer.Option("--defaults", help="a template instead")] = False,
    verifier: Verifier = None,
    data: Data = None,
) -> int:
    """Print every field with its value, meaning and unit."""
    if defaults == (config is not None):
        raise ConfigError(
            "config",
            wanted="either --config FILE or --defaults",
            found="both" if defaults else "neither",
            remedy="give one",
        )
    text = (
        template() if config is None else render(_overridden(load_config(config), verifier, data))
    )
    typer.echo(text, nl=False)
    return 0


def gate(
    config: ConfigFile,
    stage: Annotated[str, typer.Option("--stage", help="the stage whose inputs are gated")],
    store: StoreUrl = None,
) -> int:
    """Check what a stage reads, and do no more."""
    argv = ["--config", str(config), "--stage", stage]
    return gates.main([*argv, "--store", store] if store else argv)


def one_stage(name: str) -> Callable[..., int]:
    """The command that runs the stage of this name."""

    def command(
        config: ConfigFile, store: StoreUrl = None, verifier: Verifier = None, data: Data = None
    ) -> int:
        resolved = _overridden(load_config(config), verifier, data)
        return run_stages(resolved, _store_url(config, store), [stage_named(name)], tell)

    return command


def _overridden(config: RunConfig, verifier: str | None, data: list[str] | None) -> RunConfig:
    """The configuration with what the command line says over what the file says."""
    if verifier:
        section = msgspec.structs.replace(config.verifier, source=verifier)
        config = msgspec.structs.replace(config, verifier=section)
    if data:
        rows = msgspec.structs.replace(config.prepare, data=tuple(data))
        config = msgspec.structs.replace(config, prepare=rows)
    return config


def _store_url(config: Path, store: str | None) -> str:
    return load_run(argparse.Namespace(config=config, store=store))[1].url
