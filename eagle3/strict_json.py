"""JSON that somebody else may have written or damaged: whatever is wrong with it is one exception.

msgspec leaves text that is no UTF-8, and lists within lists by the thousand, as Python's own
exceptions, which no caller thinks of.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def decode(data: bytes | str | msgspec.Raw, kind: type[T]) -> T:
    """A value of a type, `object` for any, as msgspec checks it. Raises msgspec.DecodeError."""
    with _one_kind():
        return msgspec.json.decode(data, type=kind)


def decode_lines(data: bytes | str, kind: type[T]) -> list[T]:
    """The values of JSON lines, line by line. Raises msgspec.DecodeError."""
    with _one_kind():
        return msgspec.json.Decoder(kind).decode_lines(data)


@contextmanager
def _one_kind() -> Iterator[Any]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"no UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise msgspec.DecodeError("lists or objects nested too deep") from error
