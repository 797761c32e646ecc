"""A backend's own exceptions, turned into errors that say what to do.

botocore and s3fs raise a dozen kinds for "no", "away" and "not so"; this module is the one place
that knows them.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    NoCredentialsError,
)
from botocore.parsers import ResponseParserError

from eagle3.errors import (
    ConfigError,
    CredentialsUnusable,
    Eagle3Error,
    EnvironmentMisconfigured,
    PermissionRefused,
    ServiceUnavailable,
    TemporaryFailure,
)

_OF_A_CLOCK = frozenset({"RequestTimeTooSkewed", "RequestExpired"})
_OF_AN_OLD_TOKEN = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
# What gives a role's credentials, and what it is called where it refuses one.
_OF_A_ROLE = "AssumeRole"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


@contextlib.contextmanager
def translated(where: str, *, writing: bool = False) -> Iterator[None]:
    """Turn what a backend raises inside the block into errors of ours.

    FileExistsError passes, and so does FileNotFoundError unless `writing`: a write that finds
    no place means that the bucket itself is not there. Of S3 only an object that it names as
    missing is FileNotFoundError: a 404 without its word is somebody else's.
    """
    try:
        yield
    except FileExistsError:
        raise
    except FileNotFoundError as error:
        _refuse_if_away(where, error.__cause__)
        if not writing and _code_of(error) != "NoSuchBucket":
            raise
        raise ConfigError(
            where,
            wanted="a bucket, or a folder that can be made",
            found=first_line(error),
            remedy="create the bucket or folder, or correct the URL",
        ) from error
    except (NotADirectoryError, IsADirectoryError) as error:
        raise ConfigError(
            where,
            wanted="a folder where a prefix is named, a file where an object is",
            found=first_line(error),
            remedy="correct the path",
        ) from error
    except (NoCredentialsError, CredentialRetrievalError) as error:
        raise _without_credentials(where, error) from error
    except PermissionError as error:
        raise _refused(where, error) from error
    except ValueError as error:
        # botocore's word for a URL that it cannot use; nothing else here raises it.
        raise EnvironmentMisconfigured(
            where,
            wanted="an endpoint such as https://host:port in AWS_ENDPOINT_URL",
            found=first_line(error),
            remedy="correct the variable",
        ) from error
    except (BotoCoreError, ClientError, ResponseParserError, OSError) as error:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            # A full disk may be emptied, and the next try of a pod may stand on another node's.
            kind = EnvironmentMisconfigured if error.errno == errno.EROFS else TemporaryFailure
            raise kind(
                where,
                wanted="room to write",
                found=first_line(error),
                remedy="free space there or name another store",
            ) from error
        raise ServiceUnavailable(
            where,
            wanted="an answer from the object store",
            found=first_line(error),
            remedy="check the endpoint (AWS_ENDPOINT_URL) and the bucket, and try again",
        ) from error


def _refused(where: str, error: BaseException) -> Eagle3Error:
    """What a store's "no" means: it looks the same for a wrong key, a wrong clock, an old token."""
    code, found = _code_of(error), first_line(error)
    if _asked_for(error).startswith(_OF_A_ROLE):
        return _without_credentials(where, error)
    if code in _OF_A_CLOCK:
        return EnvironmentMisconfigured(
            where,
            wanted="a clock that agrees with the store's to a few minutes",
            found=found,
            remedy="set this machine's clock",
        )
    if code in _OF_AN_OLD_TOKEN:
        return CredentialsUnusable(
            where,
            wanted="credentials that are still valid",
            found=found,
            remedy="run it again, which goes on; give it credentials that renew themselves",
        )
    return PermissionRefused(
        where,
        wanted="credentials that may use it",
        found=found,
        remedy="check the key, its rights on this prefix, and this machine's clock",
    )


def _without_credentials(where: str, error: BaseException) -> Eagle3Error:
    """Whoever hands out a machine's or a pod's identity may not be ready, or be asked too often."""
    return CredentialsUnusable(
        where,
        wanted="credentials, from the environment or from the machine's or pod's identity",
        found=first_line(error),
        remedy="try again; where there should be a key or a role, see that it is named rightly",
    )


def _refuse_if_away(where: str, cause: BaseException | None) -> None:
    """A server that cannot be reached is told as a missing file by some backends.

    And so is, of S3, a 404 that does not say what is missing: of a proxy whose store is away.
    """
    if isinstance(cause, ClientError):
        away = not _code(cause).startswith("NoSuch")
    else:
        away = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
    if cause is not None and away:
        raise ServiceUnavailable(
            where,
            wanted="an answer from the server",
            found=first_line(cause),
            remedy="check the address, and whether a proxy answers in its place; try again",
        ) from cause


@contextlib.contextmanager
def refused_precondition_is_exists(path: str) -> Iterator[None]:
    """Other servers than AWS answer "it is there already" (412) as OSError(EINVAL).

    And an upload that is gone was finished by a request whose answer was lost, if it was not
    given up: the object that stands there tells.
    """
    try:
        yield
    except OSError as error:
        if (error.errno == errno.EINVAL and "ondition" in str(error)) or _is_upload_gone(error):
            raise FileExistsError(path) from error
        raise


def _is_upload_gone(error: OSError) -> bool:
    return _code_of(error) == "NoSuchUpload"


def _code_of(error: BaseException) -> str:
    """S3's own word for a refusal, which s3fs translates; empty where there is none."""
    cause = error.__cause__
    return _code(cause) if isinstance(cause, ClientError) else ""


def _code(error: ClientError) -> str:
    return str(error.response["Error"].get("Code"))


def _asked_for(error: BaseException) -> str:
    """The operation of AWS that was refused; empty where there is none."""
    cause = error.__cause__
    return str(cause.operation_name) if isinstance(cause, ClientError) else ""


def is_range_past_end(error: OSError) -> bool:
    """Whether S3 refused a range that begins at or after the object's end (416)."""
    return error.errno == errno.EINVAL and "range" in str(error)


def first_line(error: BaseException) -> str:
    """An exception's kind and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def size_told(size: int | None, where: str) -> int:
    """An object's size. Raises EnvironmentMisconfigured where the server tells none."""
    if size is None:
        raise EnvironmentMisconfigured(
            where,
            wanted="its size, which ranged reads need",
            found="none in the server's answer",
            remedy="name a copy in a store that tells it",
        )
    return int(size)


def all_of(data: bytes, size: int, where: str) -> bytes:
    """The bytes of a range. Raises EnvironmentMisconfigured where they are more, or fewer."""
    if len(data) != size:
        raise EnvironmentMisconfigured(
            where,
            wanted=f"the {size} bytes that were asked for",
            found=f"{len(data)} bytes",
            remedy="name a copy in a store that gives ranges, and that nobody is writing",
        )
    return data
