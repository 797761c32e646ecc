"""`eagle3`: a run on this machine or in a cluster, one stage of it, its gate, its configuration."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from typer.exceptions import TyperException

from eagle3 import __version__
from eagle3.cluster import Cluster, open_cluster
from eagle3.config import RunConfig, load_config
from eagle3.config_text import render, template
from eagle3.errors import ConfigError, Eagle3Error
from eagle3.stages import STAGE_NAMES, stage_named
from jobs import gate as gates
from jobs import operate
from jobs.installed import InstalledRun, read_cluster
from jobs.local import chosen_stages, run_stages
from jobs.process import guarded, load_run
from jobs.runner import order

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
_RUN_HELP = "the run's name, as `kubectl get configmaps -l app.kubernetes.io/name=eagle3` shows it"
RunName = Annotated[str, typer.Argument(help=_RUN_HELP)]
RunOption = Annotated[str, typer.Option("--run", help=_RUN_HELP)]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="by default the kubeconfig's")
]
Context = Annotated[str | None, typer.Option("--context", help="of the kubeconfig")]
LastStage = Annotated[str | None, typer.Option("--until", metavar="STAGE", help="as --from")]


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
            _refuse_no_stage(option, name)
    resolved = _overridden(load_config(config), verifier, data)
    url = _store_url(config, store)
    return run_stages(resolved, url, chosen_stages(resolved, first, last), _tell)


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


def status(run: RunName, namespace: Namespace = None, context: Context = None) -> int:
    """Show how a run stands, and what is in its way."""
    cluster, found = _in_cluster(run, namespace, context)
    operate.show(found, operate.status(found, cluster), Console())
    return 0


def submit(
    run: RunName,
    namespace: Namespace = None,
    context: Context = None,
    poll_seconds: Annotated[float, typer.Option(min=0.1, help="between two looks")] = 10.0,
) -> int:
    """Order a run's stages from here, as its runner does."""
    cluster, found = _in_cluster(run, namespace, context)
    return guarded("submit", lambda: order(found, cluster, _tell, poll_seconds))


def scale(
    stage: Annotated[str, typer.Argument(help="regenerate or extract")],
    run: RunOption,
    workers: Annotated[int, typer.Option(min=1, max=1000, help="pods that share its work")],
    namespace: Namespace = None,
    context: Context = None,
) -> int:
    """Give a stage that is running more workers, or fewer."""
    _refuse_no_stage("stage", stage)
    cluster, found = _in_cluster(run, namespace, context)
    _tell(operate.scale(found, cluster, stage, workers))
    return 0


def retry(
    stage: Annotated[str, typer.Argument(help="the stage that failed")],
    run: RunOption,
    namespace: Namespace = None,
    context: Context = None,
) -> int:
    """Let a stage that failed, and its runner, start again."""
    _refuse_no_stage("stage", stage)
    cluster, found = _in_cluster(run, namespace, context)
    _tell(operate.retry(found, cluster, stage))
    _tell(operate.restart_runner(found, cluster))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. What a person got wrong becomes one sentence."""
    given = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        code = _application()(given, prog_name="eagle3", standalone_mode=False)
    except TyperException as error:
        found = error.format_message().rstrip(".")
        wrong = ConfigError(
            "arguments", wanted="those that --help lists", found=found, remedy="correct the command"
        )
        return _refused(wrong)
    except Eagle3Error as error:
        return _refused(error)
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
    application.command()(run)
    for name in STAGE_NAMES:
        application.command(name, help=f"Run the stage {name}.")(_one_stage(name))
    application.command()(gate)
    application.command()(config)
    for command in (status, submit, scale, retry):
        application.command(rich_help_panel="In a cluster")(command)
    return application


def _one_stage(name: str) -> Callable[..., int]:
    def command(
        config: ConfigFile, store: StoreUrl = None, verifier: Verifier = None, data: Data = None
    ) -> int:
        resolved = _overridden(load_config(config), verifier, data)
        return run_stages(resolved, _store_url(config, store), [stage_named(name)], _tell)

    return command


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


def _overridden(config: RunConfig, verifier: str | None, data: list[str] | None) -> RunConfig:
    """The configuration with what the command line says over what the file says."""
    if verifier:
        section = msgspec.structs.replace(config.verifier, source=verifier)
        config = msgspec.structs.replace(config, verifier=section)
    if data:
        rows = msgspec.structs.replace(config.prepare, data=tuple(data))
        config = msgspec.structs.replace(config, prepare=rows)
    return config


def _in_cluster(
    run: str, namespace: str | None, context: str | None
) -> tuple[Cluster, InstalledRun]:
    cluster = open_cluster(namespace, context)
    return cluster, read_cluster(cluster, run)


def _store_url(config: Path, store: str | None) -> str:
    return load_run(argparse.Namespace(config=config, store=store))[1].url


def _refuse_no_stage(option: str, name: str) -> None:
    if name not in STAGE_NAMES:
        raise ConfigError(
            option, wanted=f"one of {', '.join(STAGE_NAMES)}", found=name, remedy="name a stage"
        )


def _tell(line: str) -> None:
    typer.echo(line)


def _refused(error: Eagle3Error) -> int:
    typer.echo(f"eagle3: {error}", err=True)
    return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
