"""The evaluation as a table on the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from eagle3.acceptance import Figures
from eagle3.report import content

# The label, the figure and its interval are never cut, however narrow the terminal.
_WHOLE = 3


def show(figures: Figures, console: Console) -> None:
    """Print acceptance, speed and whether the output stayed the verifier's own."""
    warning = content.speed_warning(figures)
    console.print(
        Group(
            Text(content.headline(figures), style="bold"),
            Text(content.lead(figures)),
            _table(content.acceptance_table(figures)),
            _table(content.speed_table(figures)),
            *([Text(f"{warning}\n", style="bold")] if warning else []),
            Text(content.lossless_text(figures)),
        )
    )


def _table(source: content.Table) -> Table:
    table = Table(title=source["caption"], title_justify="left", box=box.SIMPLE_HEAD)
    for place, name in enumerate(source["columns"]):
        table.add_column(name, justify="right" if place else "left", no_wrap=place < _WHOLE)
    for row in source["rows"]:
        table.add_row(*row)
    return table
