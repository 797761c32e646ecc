"""`eagle3`: a run on this machine or in a cluster, one stage of it, its gate, its artefacts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.exceptions import TyperException

from eagle3 import __version__
from eagle3.errors import ConfigError, Eagle3Error
from eagle3.stages import STAGE_NAMES
from jobs.cli import artifacts, cluster, local
from jobs.standard_output import output_fault, spell_unknown_letters


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. What a person got wrong becomes one sentence."""
    given = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    spell_unknown_letters()
    try:
        code = _application()(given, prog_name="eagle3", standalone_mode=False)
        sys.stdout.flush()
    except TyperException as error:
        found = error.format_message().rstrip(".")
        wrong = ConfigError(
            "arguments", wanted="those that --help lists", found=found, remedy="correct the command"
        )
        return _refused(wrong)
    except Eagle3Error as error:
        return _refused(error)
    except OSError:
        if (fault := output_fault()) is None:
            raise
        return _refused(fault)
    return int(code or 0)


def _application() -> typer.Typer:
    application = typer.Typer(
        name="eagle3",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    application.callback()(_root)
    application.command()(local.run)
    for name in STAGE_NAMES:
        application.command(name, help=f"Run the stage {name}.")(local.one_stage(name))
    application.command()(local.gate)
    application.command()(local.config)
    for name, command in artifacts.COMMANDS.items():
        application.command(name, rich_help_panel="Artefacts")(command)
    for command in cluster.COMMANDS:
        application.command(rich_help_panel="In a cluster")(command)
    return application


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"eagle3 {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="print the version and end"
        ),
    ] = False,
) -> None:
    """Train EAGLE-3 draft models, and refuse wrong data on the way."""


def _refused(error: Eagle3Error) -> int:
    typer.echo(f"eagle3: {error}", err=True)
    return error.exit_code
