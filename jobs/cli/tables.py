"""Where a table goes."""

from __future__ import annotations

import os
import sys

from rich.console import Console

# Columns where nobody says how wide a line may be: no reason is that long.
_UNBOUNDED = 4000
# Columns below which tables are cut to nothing; a narrower terminal folds their lines itself.
_LEAST = 60


def table_console() -> Console:
    """Where a table goes: a terminal has a width, and in a pipe a sentence stays on one line, so
    that `grep` finds it."""
    known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    width = max(Console().width, _LEAST) if known else _UNBOUNDED
    # What Kubernetes or a template says may hold brackets, and none of them is a colour.
    return Console(width=width, markup=False)
