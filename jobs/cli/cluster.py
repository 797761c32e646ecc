"""The commands that look at a run in a cluster, and change how it goes."""

from __future__ import annotations

from typing import Annotated

import typer

from eagle3.cluster import Cluster, open_cluster
from jobs import operate
from jobs.cli.options import Context, Namespace, RunName, RunOption, refuse_no_stage, tell
from jobs.cli.tables import table_console
from jobs.installed import InstalledRun, read_cluster
from jobs.operate.seen import RUNNER
from jobs.process import guarded
from jobs.runner import order


def status(run: RunName, namespace: Namespace = None, context: Context = None) -> int:
    """Show how a run stands, and what is in its way."""
    cluster, found = _in_cluster(run, namespace, context)
    operate.show(found, operate.status(found, cluster), table_console())
    return 0


def submit(
    run: RunName,
    namespace: Namespace = None,
    context: Context = None,
    poll_seconds: Annotated[float, typer.Option(min=0.1, help="between two looks")] = 10.0,
) -> int:
    """Order a run's stages from here, as its runner does."""
    cluster, found = _in_cluster(run, namespace, context)
    return guarded("submit", lambda: order(found, cluster, tell, poll_seconds))


def scale(
    stage: Annotated[str, typer.Argument(help="regenerate or extract")],
    run: RunOption,
    workers: Annotated[int, typer.Option(min=1, max=1000, help="pods that share its work")],
    namespace: Namespace = None,
    context: Context = None,
) -> int:
    """Give a stage that is running more workers, or fewer."""
    refuse_no_stage("stage", stage)
    cluster, found = _in_cluster(run, namespace, context)
    tell(operate.scale(found, cluster, stage, workers))
    return 0


def retry(
    stage: Annotated[str, typer.Argument(help="the stage that failed")],
    run: RunOption,
    namespace: Namespace = None,
    context: Context = None,
) -> int:
    """Let a stage that failed, and its runner, start again."""
    refuse_no_stage("stage", stage)
    cluster, found = _in_cluster(run, namespace, context)
    tell(operate.retry(found, cluster, stage))
    tell(operate.restart_runner(found, cluster))
    return 0


def cancel(run: RunName, namespace: Namespace = None, context: Context = None) -> int:
    """Stop a run: its runner and what is at work. What is finished stays."""
    cluster, found = _in_cluster(run, namespace, context)
    operate.cancel(found, cluster, tell)
    return 0


def logs(
    stage: Annotated[str, typer.Argument(help="a stage, or runner")],
    run: RunOption,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="until its Job ends")] = False,
    namespace: Namespace = None,
    context: Context = None,
) -> int:
    """Show what a stage's pods write, all of its workers."""
    if stage != RUNNER:
        refuse_no_stage("stage", stage)
    cluster, found = _in_cluster(run, namespace, context)
    try:
        operate.logs(found, cluster, stage, tell, follow=follow)
    except KeyboardInterrupt:
        # The usual end of following.
        return 130
    return 0


def _in_cluster(
    run: str, namespace: str | None, context: str | None
) -> tuple[Cluster, InstalledRun]:
    cluster = open_cluster(namespace, context)
    return cluster, read_cluster(cluster, run)


COMMANDS = (status, submit, logs, scale, retry, cancel)
