"""Whether an object of S3 is there, so asked that no other's "not found" is taken for the store's.

Whatever stands before a store, an ingress without its backend say, answers 404 too. The store's own
names its reason in a body, and the answer to a HEAD has none.
"""

from __future__ import annotations

import errno
from typing import Any, NoReturn


def size(client: Any, path: str) -> int:
    """The object's size in bytes.

    Args: client: s3fs's file system.

    Raises what s3fs raises: FileNotFoundError with the reason of a GET as its cause, OSError where
    the store's two answers differ.
    """
    bucket, key, _ = client.split_path(path)
    try:
        return int(client.call_s3("head_object", Bucket=bucket, Key=key)["ContentLength"])
    except FileNotFoundError:
        prove_missing(client, path)


def prove_missing(client: Any, path: str) -> NoReturn:
    """Ask once more by a GET for an object that was not found by a HEAD. Raises as `size`."""
    client.cat_file(path, start=0, end=1)
    raise OSError(errno.EAGAIN, f"{path} was not there for one request and there for the next")
