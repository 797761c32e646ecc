"""`python -m tests.cluster build | expect | up | down`: the cluster by hand."""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.cluster import binaries, figures, machine, testbed
from tests.cluster.places import cache, logs


def build() -> int:
    """Build what is absent, unless KUBECONFIG names a cluster to use; the exit code.

    A machine that cannot have it is told why, and the tests that are skipped say it again. Where it
    could and the build failed, they fail.
    """
    if os.environ.get("KUBECONFIG"):
        return 0
    if reason := machine.foundation():
        print(f"testbed: no cluster here, and its tests are skipped: {reason}.")
        return 0
    absent = binaries.absent()
    if not absent:
        return 0
    names = ", ".join(programs.name for programs in absent)
    print(
        f"testbed: building {names} into {cache()} (about 12 minutes on two cores and 8 GB the"
        " first time, with Go's own caches)",
        flush=True,
    )
    start = time.monotonic()
    try:
        with testbed.lock():
            for programs in binaries.absent():
                programs.build()
    except (binaries.NotBuilt, OSError) as error:
        print(f"testbed: {error}; EAGLE3_CLUSTER=optional skips the cluster's tests.", flush=True)
        return 1
    figures.record(cluster_build_seconds=round(time.monotonic() - start, 1))
    return 0


def expect() -> int:
    """Print the value of EAGLE3_CLUSTER by which tests fail, and are not skipped, without one.

    Nothing where the machine cannot have one; the reason is told on the other stream.
    """
    if reason := machine.expected():
        print(f"testbed: the tests of the cluster are SKIPPED here: {reason}.", file=sys.stderr)
    else:
        print("expected")
    return 0


def up() -> int:
    """Start a cluster, or find the one that runs."""
    cluster, new = testbed.up()
    print(f"testbed: {'up' if new else 'up already'}; logs in {logs()}")
    print(f"export KUBECONFIG={cluster.kubeconfig}")
    for program in ("kubectl", "helm"):
        print(f"alias {program}={binaries.program(program)}")
    if cluster.s3:
        for name, value in cluster.s3.environment.items():
            print(f"export {name}={value}")
    return 0


def down() -> int:
    """Take the cluster down."""
    print("testbed: down" if testbed.down() else "testbed: there was no cluster")
    return 0


def main() -> int:
    """Run one command; the exit code."""
    commands = {"build": build, "expect": expect, "up": up, "down": down}
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("command", choices=commands)
    try:
        return commands[parser.parse_args().command]()
    except testbed.Unavailable as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 78


if __name__ == "__main__":
    sys.exit(main())
