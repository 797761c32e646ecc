"""Standard output: letters that it does not know, and what it means when it takes no more."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys

from eagle3.errors import TemporaryFailure


def spell_unknown_letters() -> None:
    """Let names be written where the locale lacks their letters, as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def output_fault() -> TemporaryFailure | None:
    """What is wrong with standard output, for whoever caught an OSError; None where nothing is."""
    try:
        # A long text that failed is not held: only another one tells.
        print(flush=True)
    except OSError as error:
        gone = error.errno == errno.EPIPE
        # What it still holds would fail once more as Python ends.
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        return TemporaryFailure(
            "standard output",
            wanted="somebody who reads it" if gone else "room for it",
            found=error.strerror,
            remedy="send it elsewhere and run it again, which goes on",
        )
    return None
