"""The gate: what an init container runs before a stage may hold any GPU.

`python -m jobs.gate --stage NAME --config FILE` checks every upstream artefact of the stage, and
that the run's store can be written. It ends at once: 0 when the stage may start, else the exit
code that says why not. It never waits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from eagle3.errors import ConfigError
from eagle3.stages import STAGE_NAMES, stage_named
from jobs.arguments import arguments, load_run
from jobs.process import gate_inputs, guarded


def main(argv: Sequence[str] | None = None) -> int:
    """Gate the inputs of the stage that the arguments name and return the exit code."""
    return guarded("gate", lambda: _gate(arguments("gate", argv)))


def _gate(found: argparse.Namespace) -> None:
    if found.stage not in STAGE_NAMES:
        raise ConfigError(
            "--stage", wanted=" or ".join(STAGE_NAMES), found=found.stage, remedy="name a stage"
        )
    config, store = load_run(found)
    inputs = gate_inputs(config, store, stage_named(found.stage))
    # A stage whose credentials are refused is tried again in a new pod, which reads a Secret anew:
    # where they are still refused, this pod's gate has to be the one that finds it.
    store.probe()
    for name, artifact in inputs.items():
        manifest = artifact.manifest
        print(
            f"gate: {found.stage}.{name} is {manifest.artifact} {artifact.digest[:12]}, "
            f"{len(manifest.files)} objects, {manifest.total_samples} samples",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
