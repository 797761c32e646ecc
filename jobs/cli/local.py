"""The commands of a run on this machine: all stages, one of them, its gate, its configuration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from eagle3.config import load_config
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
    overridden,
    refuse_no_stage,
    store_url,
    tell,
)
from jobs.local import chosen_stages, run_stages


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
    resolved = overridden(load_config(config), verifier, data)
    url = store_url(resolved, store)
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
    text = template() if config is None else render(overridden(load_config(config), verifier, data))
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
        resolved = overridden(load_config(config), verifier, data)
        return run_stages(resolved, store_url(resolved, store), [stage_named(name)], tell)

    return command
