"""Listing a prefix of S3, a thousand objects a request, and several requests at a time.

A listing goes on where the page before it ended, so its pages come one after the other. Whoever
knows some of the names can split it: each part begins after one of them and ends at the next.
s3fs's own listing makes a record of every object with all that S3 says of it, and most of its time
goes into reading when each was last modified: botocore reads a date in sixty microseconds, Python
the usual form in one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

# Beyond a few parts the answers are read no faster than one process can take them in.
_AT_A_TIME = 4


def sizes(client: Any, root: str, splits: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
    """(path below the prefix, bytes) of every object, in no order.

    Args:
        client: s3fs's file system.
        root: bucket and prefix, without a slash at the end.
        splits: some of the paths, ascending; none of them need be there.

    Raises what s3fs raises.
    """
    client.connect()
    factory = client.session.get_component("response_parser_factory")
    factory.set_parser_defaults(timestamp_parser=moment)
    ends = [*splits, None]
    starts = [None, *splits]
    with ThreadPoolExecutor(_AT_A_TIME) as readers:
        parts = readers.map(lambda start, end: _part(client, root, start, end), starts, ends)
        for part in parts:
            yield from part


def moment(value: Any) -> datetime:
    """A point in time in any of the forms that AWS writes it in. Raises ValueError."""
    if isinstance(value, int | float):
        return datetime.fromtimestamp(value, UTC)
    try:
        return datetime.fromisoformat(value)
    except ValueError:
        return parsedate_to_datetime(value)


def _part(client: Any, root: str, start: str | None, end: str | None) -> list[tuple[str, int]]:
    """What lies after `start` (exclusive) up to `end` (inclusive)."""
    bucket, key, _ = client.split_path(root)
    prefix = f"{key}/" if key else ""
    where: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix}
    if start is not None:
        where["StartAfter"] = prefix + start
    found: list[tuple[str, int]] = []
    while True:
        page = client.call_s3("list_objects_v2", **where)
        for one in page.get("Contents", ()):
            path = one["Key"][len(prefix) :]
            if end is not None and path > end:
                return found
            # The mark of a folder, which some tools leave, is no object.
            if path and not path.endswith("/"):
                found.append((path, one["Size"]))
        if not page.get("IsTruncated"):
            return found
        where["ContinuationToken"] = page["NextContinuationToken"]
