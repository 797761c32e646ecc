"""The gate of a hundred thousand objects against the bare listing of them: `make bench-gate`.

A manifest of so many objects lies on a real S3 server of this machine. Two processes take turns,
the first alternating, so that a slow minute falls on both: one lists the prefix with s3fs alone,
the other gates the artefact as an init container does: manifest, seal, index, sums, every object
with its size. Written to runs/bench/gate.json.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import urlsplit

import s3fs
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from eagle3 import artifact as artifacts
from eagle3.manifest import FileEntry, Manifest
from eagle3.store import open_store
from eagle3.upstream import gate
from tests.s3_server import BUCKET, S3Server, s3_server
from tests.upstreams import HIDDEN_STATES, TOKENIZER, VERIFIER

RESULT = Path("runs/bench/gate.json")
NUM_OBJECTS = 100_000
NUM_BLOCKS = 5
PREFIX = "run/extract"
_WRITERS = 32
_MEMORY = "/dev/shm"
HEAVY = ("torch", "transformers", "vllm", "speculators")
# As an empty process that imports the gate says it, so that nothing else is in it.
_IMPORTS = (
    "import sys, time; started = time.perf_counter(); import jobs.gate;"
    " seconds = time.perf_counter() - started;"
    f" print(seconds, *sorted(set({HEAVY!r}) & set(sys.modules)))"
)


def main() -> int:
    """Run the benchmark, print its result and write it."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gate", description=__doc__)
    parser.add_argument("--objects", type=int, default=NUM_OBJECTS)
    count = parser.parse_args().objects
    # In memory where that is to be had, since a disk would make each small object slow.
    place = _MEMORY if Path(_MEMORY).is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as folder, s3_server(Path(folder)) as server:
        os.environ.update(server.environment)
        entries = make_objects(server, count)
        commit(entries)
        with worker(list_bare) as bare, worker(gate_it) as ours:
            blocks = [take_turns(number, bare, ours) for number in range(NUM_BLOCKS + 1)]
            peaks = [ask(connection, "peak_mb") for connection in (bare, ours)]
    # The first block opens the connections of both.
    result = {"objects": count, **summarise(blocks[1:]), **dict(zip(PEAKS, peaks, strict=True))}
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0


PEAKS = ("listing_peak_mb", "peak_mb")


def make_objects(server: S3Server, count: int) -> tuple[FileEntry, ...]:
    """Objects without content under the prefix, and what a manifest says of them.

    A listing tells of them what it tells of any, and a server keeps no data for them.
    """
    entries = tuple(
        FileEntry(
            path=f"hidden-{number:06d}.safetensors",
            bytes=0,
            sha256=f"{number:064x}",
            samples=1,
            tokens=1,
            header_sha256=f"{number:064x}",
        )
        for number in range(count)
    )
    with ThreadPoolExecutor(_WRITERS) as writers:
        for done in writers.map(
            lambda first: put(server, entries[first::_WRITERS]), range(_WRITERS)
        ):
            assert done, "every writer ends"
    return entries


def put(server: S3Server, entries: Iterable[FileEntry]) -> bool:
    """Put nothing under each path over one connection, since a client of its own is slow."""
    where = urlsplit(server.endpoint)
    signer = S3SigV4Auth(Credentials(server.key, server.secret), "s3", "us-east-1")
    connection = http.client.HTTPConnection(where.hostname or "", where.port or 80)
    for entry in entries:
        path = f"/{BUCKET}/{PREFIX}/{entry.path}"
        request = AWSRequest("PUT", f"{server.endpoint}{path}", data=b"")
        signer.add_auth(request)
        connection.request("PUT", path, body=b"", headers=dict(request.headers.items()))
        response = connection.getresponse()
        response.read()
        assert response.status == 200, response.status
    return True


def commit(entries: tuple[FileEntry, ...]) -> None:
    """Commit an artefact of hidden states that holds them."""
    sums = dict.fromkeys(("rows_in", "rows_kept", "total_samples", "total_tokens"), len(entries))
    facts = {"verifier": VERIFIER, "tokenizer": TOKENIZER}
    manifest = Manifest(
        artifact="extract", identity="i", files=entries, **sums, **facts, **HIDDEN_STATES
    )
    artifacts.commit(open_store(f"s3://{BUCKET}/{PREFIX}"), manifest)


@contextmanager
def worker(job: Callable[[], int]) -> Iterator[Connection]:
    """A process that does one thing whenever it is asked."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, job))
    process.start()
    there.close()
    yield here
    here.send(None)
    process.join()


def serve(connection: Connection, job: Callable[[], int]) -> None:
    """Answer `go` with the seconds that the job took, and `peak_mb` with this process's peak."""
    while (message := connection.recv()) is not None:
        if message == "peak_mb":
            connection.send(round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1))
            continue
        started = time.monotonic()
        found = job()
        connection.send(time.monotonic() - started)
        assert found, "something was found"


def list_bare() -> int:
    """The bare listing: s3fs with its defaults but for the cache, which would answer the second."""
    client = s3fs.S3FileSystem(use_listings_cache=False)
    return len(client.find(f"{BUCKET}/{PREFIX}", detail=True))


def gate_it() -> int:
    """The gate of one input."""
    return len(gate(f"s3://{BUCKET}/{PREFIX}", ("extract",)).manifest.files)


def ask(connection: Connection, what: str) -> float:
    """What a worker answers."""
    connection.send(what)
    return float(connection.recv())


def take_turns(number: int, bare: Connection, ours: Connection) -> dict[str, float]:
    """Both once, one after the other."""
    turns = [("listing", bare), ("gate", ours)]
    return {
        name: ask(connection, "go")
        for name, connection in (turns if number % 2 else reversed(turns))
    }


def summarise(blocks: Sequence[dict[str, float]]) -> dict[str, object]:
    """The ratio of the medians with the blocks that it comes from, and the start of the gate."""
    listing, gating = ([block[name] for block in blocks] for name in ("listing", "gate"))
    told = [imported() for _ in range(3)]
    return {
        "gate_over_listing": statistics.median(gating) / statistics.median(listing),
        "gate_over_listing_by_block": [g / one for g, one in zip(gating, listing, strict=True)],
        "seconds": statistics.median(gating),
        "listing_seconds": statistics.median(listing),
        "import_seconds": min(float(words[0]) for words in told),
        "imported_heavy": sorted({word for words in told for word in words[1:]}),
        "threads": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "blocks": list(blocks),
    }


def imported() -> list[str]:
    """The seconds that importing the gate took, and which heavy libraries came with it."""
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


if __name__ == "__main__":
    sys.exit(main())
