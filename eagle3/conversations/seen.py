"""Which conversations have come before, on disk past a few megabytes: memory does not grow."""

from __future__ import annotations

import sqlite3

from eagle3.errors import EnvironmentMisconfigured

_CACHE_KIBIBYTES = 16 * 1024


class Seen:
    """A set of digests in a temporary file, which goes with this process."""

    def __init__(self) -> None:
        self._base = sqlite3.connect("")
        self._base.execute(f"PRAGMA cache_size = -{_CACHE_KIBIBYTES}")
        self._base.execute("PRAGMA journal_mode = OFF")
        self._base.execute("CREATE TABLE seen (digest BLOB PRIMARY KEY) WITHOUT ROWID")

    def add(self, digest: bytes) -> bool:
        """Add a digest; returns whether it is new. Raises EnvironmentMisconfigured."""
        try:
            added = self._base.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,))
        except sqlite3.OperationalError as error:
            raise EnvironmentMisconfigured(
                "TMPDIR",
                wanted="room for the digests of the conversations so far, 40 bytes each",
                found=error,
                remedy="free space, or set TMPDIR to a larger disk",
            ) from error
        return added.rowcount == 1

    def close(self) -> None:
        """Drop the file."""
        self._base.close()
