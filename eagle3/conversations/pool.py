"""Converting many rows, in this process or in several, always in the order of the files.

Rows go to the workers in chunks and come back in order. Chunks are bounded in rows and in bytes,
and so is what is under way, so that memory grows neither with the input nor with the length of its
rows, and the result does not depend on the workers.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from eagle3.config import PrepareConfig, VerifierConfig
from eagle3.conversations.convert import Converter, FormOfFile, HeldOut, Kept
from eagle3.conversations.messages import Rejected
from eagle3.conversations.reading import RawRow, Source
from eagle3.conversations.rendering import Renderer
from eagle3.errors import TemporaryFailure
from eagle3.verifier import open_verifier

AnyOutcome = Kept | HeldOut | Rejected
Placed = tuple[int, str, AnyOutcome]
"""(index of the source, file and line, outcome)."""

_CHUNK_ROWS = 64
_CHUNK_BYTES = 2 * 2**20
# Of each worker. A row's ids take several times the bytes of its text.
_CHUNKS_AHEAD = 4
_BYTES_AHEAD = 4 * _CHUNK_BYTES
_Chunk = tuple[int, FormOfFile, list[RawRow]]
_Future = Future[list[Placed]]

_converter: Converter | None = None


def outcomes(converter: Converter, sources: Sequence[Source], num_rows: int) -> Iterator[Placed]:
    """The outcome of each of the first `num_rows` rows, in this process."""
    for chunk in _chunks(sources, num_rows):
        yield from _converted(converter, chunk)


def parallel_outcomes(
    verifier: VerifierConfig,
    config: PrepareConfig,
    sources: Sequence[Source],
    num_rows: int,
    *,
    unanswered: bool = False,
) -> Iterator[Placed]:
    """The same from `config.num_workers` spawned processes, each with a tokenizer of its own.

    Raises TemporaryFailure when a worker dies, as by running out of memory.
    """
    pool = ProcessPoolExecutor(
        config.num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(verifier, config, unanswered),
    )
    begun = (
        (pool.submit(_convert_in_worker, chunk), sum(row.size for row in chunk[2]))
        for chunk in _chunks(sources, num_rows)
    )
    try:
        for done in _in_order(begun, config.num_workers):
            yield from done.result()
    except BrokenProcessPool as error:
        raise TemporaryFailure(
            "prepare.num_workers",
            wanted=f"{config.num_workers} workers that live",
            found=error,
            remedy="try again, with fewer workers where memory is short",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(begun: Iterable[tuple[_Future, int]], num_workers: int) -> Iterator[_Future]:
    """What has been begun, in that order, and never more of it begun than may be under way.

    Args: begun: begins the next chunk when it is asked for one; with the chunk's bytes.
    """
    waiting: deque[tuple[_Future, int]] = deque()
    under_way = 0
    for future, size in begun:
        waiting.append((future, size))
        under_way += size
        # A worker holds the chunk that it is at in any case.
        while len(waiting) > _CHUNKS_AHEAD * num_workers or (
            len(waiting) > num_workers and under_way > _BYTES_AHEAD * num_workers
        ):
            first, done = waiting.popleft()
            under_way -= done
            yield first
    while waiting:
        yield waiting.popleft()[0]


def _chunks(sources: Sequence[Source], num_rows: int) -> Iterator[_Chunk]:
    left = num_rows
    for index, source in enumerate(sources):
        form = FormOfFile(source.url)
        for chunk in _cut(source.rows(left)):
            left -= len(chunk)
            form.learn(chunk)
            yield index, form, chunk


def _cut(rows: Iterable[RawRow]) -> Iterator[list[RawRow]]:
    chunk: list[RawRow] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += row.size
        if len(chunk) == _CHUNK_ROWS or size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _converted(converter: Converter, chunk: _Chunk) -> Iterator[Placed]:
    index, form, rows = chunk
    for raw, outcome in zip(rows, converter.convert_all(rows, form), strict=True):
        yield index, f"{form.url}:{raw.place}", outcome


def _start_worker(verifier: VerifierConfig, config: PrepareConfig, unanswered: bool) -> None:
    # A pool hands on what its initializer makes in no other way.
    global _converter
    opened = open_verifier(verifier)
    renderer = Renderer(opened.load_tokenizer(), opened.stop_ids, today=config.template_date)
    _converter = Converter(renderer, config, unanswered=unanswered)


def _convert_in_worker(chunk: _Chunk) -> list[Placed]:
    assert _converter is not None, "the pool starts every worker by _start_worker"
    return list(_converted(_converter, chunk))
