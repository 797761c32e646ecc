"""Files of conversations by ranges: all bytes that were asked for, or a refusal."""

import gzip
import io
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from eagle3.conversations import Source, open_sources
from eagle3.conversations.ranged import RangedFile
from eagle3.errors import ConfigError, ConversationsInvalid, EnvironmentMisconfigured
from eagle3.store import Store, faults

RANDOM = random.Random(5)
# Of this many bytes, packed or not, that no form of file is read in one range.
WORDS = [RANDOM.randbytes(32).hex() for _ in range(400_000)]
LINES = "".join(f'{{"prompt": "{word}"}}\n' for word in WORDS).encode()
FIRST = 4  # bytes, by which the form of a file is told

Read = Callable[[Store, str, int, int], bytes]
real: Read = Store.read_range


def whole(store: Store, path: str, start: int, end: int) -> bytes:
    """As a server that knows no ranges answers."""
    return real(store, path, 0, store.size(path))


def nothing_later(store: Store, path: str, start: int, end: int) -> bytes:
    return b"" if start else real(store, path, start, end)


def less_later(store: Store, path: str, start: int, end: int) -> bytes:
    return real(store, path, start, end - 1 if end - start > FIRST else end)


def table() -> bytes:
    made = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"prompt": WORDS}), made)
    return made.getvalue()


FORMS: dict[str, Callable[[], bytes]] = {
    "a.jsonl": lambda: LINES,
    "a.gz": lambda: gzip.compress(LINES, 0),
    "a.zst": lambda: pyarrow.compress(LINES, codec="zstd", asbytes=True),
    "a.parquet": table,
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("answer", [whole, nothing_later, less_later])
def test_an_answer_of_other_bytes_than_were_asked_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, answer: Read
) -> None:
    (tmp_path / name).write_bytes(FORMS[name]())
    monkeypatch.setattr(Store, "read_range", answer)
    with pytest.raises(ConversationsInvalid, match=f"{name}: wanted the .* bytes from byte"):
        Source(str(tmp_path / name)).measure()


def test_a_file_of_which_a_part_was_read_has_not_ended(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(LINES)
    file = RangedFile(Store(str(tmp_path)), "a", len(LINES), None)
    file.read(9)
    with pytest.raises(ConversationsInvalid, match=f"{len(LINES)} bytes, found an end after 9"):
        file.check_ended()
    file.readall()
    file.check_ended()


def test_a_hash_is_of_all_bytes_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(LINES)
    monkeypatch.setattr(Store, "read_range", less_later)
    with pytest.raises(EnvironmentMisconfigured, match="bytes that were asked for"):
        Store(str(tmp_path)).sha256("a")


def test_a_size_that_no_server_tells_is_refused() -> None:
    with pytest.raises(EnvironmentMisconfigured, match="http://h/a: wanted its size"):
        faults.size_told(None, "http://h/a")


@pytest.mark.parametrize("url", ["https://u:secret@h/a.jsonl", "https://h/a.jsonl?sig=secret"])
def test_credentials_in_the_name_of_a_file_are_refused_and_not_told(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_sources([url])
    assert "without credentials" in str(caught.value)
    assert "secret" not in str(caught.value)
