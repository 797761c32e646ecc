"""An upload in parts under the condition that the object is new, as s3fs makes of a large one.

s3fs does so by itself from two parts on, each of 5 MiB at least; a probe cannot send that much.
"""

from __future__ import annotations

from typing import Any

from botocore.exceptions import BotoCoreError


def create(client: Any, path: str, data: bytes) -> None:
    """Create an object by an upload in one part, of any size.

    Args: client: s3fs's file system.

    Raises what s3fs raises; the upload is given up then, so that its part is not kept.
    """
    bucket, key, _ = client.split_path(path)
    upload = client.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
    where = {"Bucket": bucket, "Key": key, "UploadId": upload["UploadId"]}
    try:
        part = client.call_s3("upload_part", PartNumber=1, Body=data, **where)
        client.call_s3(
            "complete_multipart_upload",
            MultipartUpload={"Parts": [{"PartNumber": 1, "ETag": part["ETag"]}]},
            IfNoneMatch="*",
            **where,
        )
    except (OSError, BotoCoreError):
        client.call_s3("abort_multipart_upload", **where)
        raise
