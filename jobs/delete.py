"""`eagle3 delete`: an artefact or a whole run that nothing rests on, shown before it goes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from eagle3.errors import ConfigError
from eagle3.removal import Removal, plan_removal, remove

_MOST_LEFT = 5


def delete(
    url: str,
    console: Console,
    *,
    also: Sequence[str] = (),
    stopped: bool = False,
    yes: bool = False,
    dry_run: bool = False,
) -> int:
    """Show what would go, and delete it where `yes` was said. Returns 0.

    Raises as `plan_removal`, and ConfigError where both a dry run and the deed are asked for.
    """
    if yes and dry_run:
        raise ConfigError(
            "--yes", wanted="either --dry-run or --yes", found="both", remedy="give one"
        )
    removal = plan_removal(url, also, stopped=stopped)
    console.print(_table(removal))
    _tell_left(removal, console)
    told = f"{removal.num_objects:,} objects of {removal.bytes:,} bytes"
    if not removal.num_objects:
        console.print("nothing lies there any more")
    elif not yes:
        console.print(f"nothing was deleted: --yes deletes these {told}")
    else:
        _delete(removal)
        console.print(f"deleted {told} in {removal.run.url}", soft_wrap=True)
    return 0


def _delete(removal: Removal) -> None:
    with Progress(console=Console(file=sys.stderr)) as bars:
        bar = bars.add_task("delete", total=removal.num_objects)
        remove(removal, lambda count: bars.advance(bar, count))


def _table(removal: Removal) -> Table:
    table = Table(box=None)
    table.add_column("would go", no_wrap=True)
    table.add_column("manifest")
    for name in ("objects", "bytes"):
        table.add_column(name, justify="right")
    for target in removal.targets:
        found = [info.bytes for info in removal.objects if info.path.split("/")[0] == target.kind]
        # Nothing is known of a manifest that is there and cannot be read.
        state = "committed" if target.digest else "damaged" if target.committed else "none"
        table.add_row(target.kind, state, f"{len(found):,}", f"{sum(found):,}")
    if removal.work:
        sizes = [info.bytes for info in removal.work]
        table.add_row("work and progress", "", f"{len(sizes):,}", f"{sum(sizes):,}")
    return table


def _tell_left(removal: Removal, console: Console) -> None:
    """What lies in the run's prefix and no stage wrote stays where it is."""
    if not removal.left:
        return
    names = ", ".join(info.path for info in removal.left[:_MOST_LEFT])
    more = len(removal.left) - _MOST_LEFT
    rest = f" and {more:,} more" if more > 0 else ""
    console.print(Text(f"stays, for no stage wrote it: {names}{rest}"), soft_wrap=True)
