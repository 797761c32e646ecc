"""Chunks of rows: memory grows neither with the rows' number nor with their length."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from eagle3.conversations import open_sources, pool


def write(path: Path, texts: list[str]) -> Path:
    if path.suffix == ".parquet":
        rows = [{"prompt": text} for text in texts]
        table = pyarrow.Table.from_pylist(rows)
        # Different texts, uncompressed, as large as they look.
        pyarrow.parquet.write_table(table, path, compression="none", use_dictionary=False)
    else:
        path.write_text("".join(f'{{"prompt": "{text}"}}\n' for text in texts))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_chunk_of_long_rows_holds_a_few(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, [f"{at:07d}" * 100_000 for at in range(30)])
    sizes = [len(rows) for _, _, rows in pool._chunks(open_sources([str(path)]), 100)]
    assert sum(sizes) == 30
    assert max(sizes) <= 3


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_chunk_of_short_rows_holds_many(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, ["short"] * 150)
    sizes = [len(rows) for _, _, rows in pool._chunks(open_sources([str(path)]), 140)]
    assert sizes == [64, 64, 12]


@pytest.mark.parametrize(
    ("size", "most"),
    [(1000, 4 * 3 + 1), (pool._CHUNK_BYTES, 4 * 3 + 1), (20 * pool._CHUNK_BYTES, 3 + 1)],
)
def test_what_is_under_way_is_bounded_in_chunks_and_in_bytes(size: int, most: int) -> None:
    begun: list[Future[Any]] = []

    def begin() -> Any:
        for _ in range(40):
            begun.append(Future())
            yield begun[-1], size

    given: list[Future[Any]] = []
    ahead = 0
    for future in pool._in_order(begin(), 3):
        ahead = max(ahead, len(begun) - len(given))
        given.append(future)
    assert given == begun
    assert len(begun) == 40
    assert ahead == most
