"""A backend's own exceptions, turned into errors that say what to do.

botocore and s3fs raise a dozen kinds for "no", "away" and "not so"; this module is the one place
that knows them.
"""

from __future__ import annotations

import contextlib
import errno
import re
import sys
import time
from collections.abc import Callable, Iterator

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    NoCredentialsError,
    ParamValidationError,
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
# By status, of a server that speaks HTTP and nothing else.
_NOT_FOR_US, _GONE = (401, 403), (404, 410)
# Of two conditional requests at once S3 may refuse both, and wants to be asked again.
_OF_A_CONFLICT = frozenset({"ConditionalRequestConflict", "OperationAborted"})
_CONFLICT_PAUSES = (0.2, 1.0, 3.0)
# A redirect's address is often signed in its query, and errors are told in logs.
_QUERY = re.compile(r"(https?://[^\s?'\"]+)\?[^\s'\"]*")
_NO_PATH = (errno.ELOOP, errno.ENAMETOOLONG)
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
    except (*_KNOWN, *_of_other_clients()) as error:
        found = (meaning for kinds, meaning in _MEANINGS if isinstance(error, kinds))
        raise next(found, _by_status)(where, error) from error


def _by_status(where: str, error: BaseException) -> Eagle3Error:
    """What a server means that speaks HTTP and nothing else."""
    if getattr(error, "status", None) in _NOT_FOR_US:
        return _refused(where, error)
    return _no_answer(where, error)


def _no_path(where: str, error: BaseException) -> Eagle3Error:
    return ConfigError(
        where,
        wanted="a folder where a prefix is named, a file where an object is",
        found=first_line(error),
        remedy="correct the path",
    )


def _no_name(where: str, error: BaseException) -> Eagle3Error:
    return ConfigError(
        where,
        wanted="a bucket and a path that S3 takes",
        found=first_line(error),
        remedy="correct the URL",
    )


def _no_url(where: str, error: BaseException) -> Eagle3Error:
    """botocore's word for an endpoint that it cannot use, or another client's for its URL."""
    if where.startswith(("s3://", "s3a://")):
        return EnvironmentMisconfigured(
            where,
            wanted="an endpoint such as https://host:port in AWS_ENDPOINT_URL",
            found=first_line(error),
            remedy="correct the variable",
        )
    return ConfigError(
        where,
        wanted="a URL that the client of its scheme can use",
        found=first_line(error),
        remedy="correct the URL",
    )


def _by_number(where: str, error: BaseException) -> Eagle3Error:
    number = error.errno if isinstance(error, OSError) else None
    if number in _NO_PATH:
        return _no_path(where, error)
    if number not in _NO_ROOM:
        return _no_answer(where, error)
    # A full disk may be emptied, and the next try of a pod may stand on another node's.
    kind = EnvironmentMisconfigured if number == errno.EROFS else TemporaryFailure
    return kind(
        where,
        wanted="room to write",
        found=first_line(error),
        remedy="free space there or name another store",
    )


def _no_answer(where: str, error: BaseException) -> Eagle3Error:
    if where.startswith("hf://"):
        return ServiceUnavailable(
            where,
            wanted="an answer from the hub",
            found=first_line(error),
            remedy="let this machine reach it, or name a copy of the files",
        )
    named = " (AWS_ENDPOINT_URL) and the bucket" if where.startswith("s3") else ""
    return ServiceUnavailable(
        where,
        wanted="an answer from the object store",
        found=first_line(error),
        remedy=f"check the endpoint{named}, and try again",
    )


def _of_other_clients() -> tuple[type[Exception], ...]:
    """The roots of the faults of the hub's client and of the one for https: many are no OSErrors.

    Looked for among what is loaded: the gate's image has no client of the hub's.
    """
    roots = (("httpx2", "HTTPError"), ("aiohttp", "ClientError"))
    return tuple(getattr(sys.modules[name], root) for name, root in roots if name in sys.modules)


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


# The first that fits counts.
_MEANINGS: tuple[
    tuple[tuple[type[Exception], ...], Callable[[str, BaseException], Eagle3Error]], ...
] = (
    ((NotADirectoryError, IsADirectoryError), _no_path),
    ((NoCredentialsError, CredentialRetrievalError), _without_credentials),
    ((PermissionError,), _refused),
    ((ParamValidationError,), _no_name),
    ((ValueError,), _no_url),
    ((OSError,), _by_number),
    ((BotoCoreError, ClientError, ResponseParserError), _no_answer),
)
_KNOWN = tuple(kind for kinds, _ in _MEANINGS for kind in kinds)


def _refuse_if_away(where: str, cause: BaseException | None) -> None:
    """A server that cannot be reached is told as a missing file by some backends.

    And so is, of S3, a 404 that does not say what is missing: of a proxy whose store is away.
    """
    if (status := getattr(cause, "status", None)) in _NOT_FOR_US:
        assert cause is not None
        raise _refused(where, cause) from cause
    if isinstance(cause, ClientError):
        away = not _code(cause).startswith("NoSuch")
    elif isinstance(status, int):
        away = status not in _GONE
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


def create_again_on_conflict(create: Callable[[], None]) -> None:
    """Create an object, asking again where S3 could not tell who of two was first."""
    for pause in _CONFLICT_PAUSES:
        try:
            return create()
        except OSError as error:
            if _code_of(error) not in _OF_A_CONFLICT:
                raise
            time.sleep(pause)
    return create()


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
    """An exception's kind and the first line of its text, two where the first only leads on."""
    text = _QUERY.sub(r"\1", str(error))
    lines = [line for line in text.splitlines() if line.strip()]
    if lines and lines[0].endswith(":"):
        lines = [" ".join(line.strip() for line in lines[:2])]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


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
