"""The demonstration's inputs: `python -m jobs.demo_inputs [--out DIR]`.

Writes `DIR/verifier/` and `DIR/conversations.jsonl` out of installed packages, and leaves alone
what is there already.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from eagle3.demo_inputs import write_inputs
from jobs.process import guarded

DEFAULT_OUT = Path("runs/inputs")


def main(argv: Sequence[str] | None = None) -> int:
    """Write what is missing; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jobs.demo_inputs", description=__doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help=f"default: {DEFAULT_OUT}")
    found = parser.parse_args(argv)
    return guarded("demo_inputs", lambda: _write(found.out))


def _write(out: Path) -> None:
    started = time.monotonic()
    print(f"demo_inputs: a verifier and chats out of packages, into {out}", flush=True)
    written = write_inputs(out)
    told = f"wrote {' and '.join(written)}" if written else "all there already"
    print(f"demo_inputs: {told} in {out}, {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
