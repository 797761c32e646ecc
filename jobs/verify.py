"""`eagle3 verify`: an artefact, or all of a run's, as a table and a sentence for each fault."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from eagle3.errors import ConfigError
from eagle3.verification import DEPTHS, Depth, Verdict, artifacts_at, verify

_MOST_FINDINGS = 20


def run(url: str, depth: str, console: Console, *, trust_remote_code: bool = False) -> int:
    """Verify what lies at a URL and print what was found.

    Returns 0 where all is well, 65 where something is wrong, 66 where nothing is wrong but that
    an artefact is not committed. Raises UpstreamMissing where there is nothing to verify, and
    what a store raises that does not answer.
    """
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="eagle3-verify-") as scratch:
        for number, store in enumerate(artifacts_at(url)):
            with _bar(f"verify {store.url.rpartition('/')[2]}") as advance:
                verdict = verify(
                    store,
                    _depth(depth),
                    scratch=Path(scratch) / str(number),
                    trust_remote_code=trust_remote_code,
                    advance=advance,
                )
            verdicts.append(verdict)
    console.print(_table(verdicts))
    for verdict in verdicts:
        _tell(verdict, console)
    codes = {error.exit_code for verdict in verdicts for error in verdict.findings}
    return min(codes, default=0)


def _depth(word: str) -> Depth:
    for depth in DEPTHS:
        if word == depth:
            return depth
    raise ConfigError("--depth", wanted=" or ".join(DEPTHS), found=word, remedy="name a depth")


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes on a terminal; elsewhere nothing, since the table tells it all."""
    terminal = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=terminal, transient=True, disable=not terminal.is_terminal
    ) as bars:
        task = bars.add_task(title, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _table(verdicts: list[Verdict]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("artefact", no_wrap=True)
    table.add_column("depth", no_wrap=True)
    for name in ("objects", "bytes", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for verdict in verdicts:
        faults = len(verdict.findings)
        told = Text("whole", style="green")
        if faults:
            told = Text(f"{faults} fault{'s' if faults > 1 else ''}", style="red")
        table.add_row(
            verdict.kind or verdict.url.rpartition("/")[2],
            verdict.depth,
            f"{verdict.objects:,}",
            decimal(verdict.bytes),
            f"{verdict.seconds:.1f}",
            told,
        )
    return table


def _tell(verdict: Verdict, console: Console) -> None:
    for error in verdict.findings[:_MOST_FINDINGS]:
        console.print(Text(str(error), style="red"), soft_wrap=True)
    if (more := len(verdict.findings) - _MOST_FINDINGS) > 0:
        console.print(Text(f"{verdict.url}: and {more} more", style="red"), soft_wrap=True)
    for note in verdict.notes:
        console.print(Text(note, style="dim"), soft_wrap=True)
