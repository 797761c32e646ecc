"""Where a table goes."""

from __future__ import annotations

import os

from rich.console import Console

# Columns where nobody says how wide a line may be: no reason is that long.
_UNBOUNDED = 4000
# Columns below which tables are cut to nothing; a narrower terminal folds their lines itself.
_LEAST = 60


def table_console() -> Console:
    """Where a table goes: a terminal has a width, and in a pipe a sentence stays on one line, so
    that `grep` finds it."""
    console = Console()
    known = console.is_terminal or "COLUMNS" in os.environ
    return Console(width=max(console.width, _LEAST) if known else _UNBOUNDED)
