"""What an API server's refusals mean, told as errors of ours."""

from __future__ import annotations

import json

from eagle3.errors import (
    ConfigError,
    Eagle3Error,
    PermissionRefused,
    ServiceUnavailable,
    TemporaryFailure,
    UpstreamMissing,
)

_AWAY = (ServiceUnavailable, "an answer from the Kubernetes API server", "try again later")
_UNFIT = (ConfigError, "an object that the API server takes", "correct the values")
_NO_ROLE = (PermissionRefused, "a role that may do this", "see the chart's Role")
_BY_STATUS: dict[int, tuple[type[Eagle3Error], str, str]] = {
    400: _UNFIT,
    401: (PermissionRefused, "credentials that the API server knows", "log in again"),
    403: _NO_ROLE,
    422: _UNFIT,
}
_POLICY = (
    ConfigError,
    "what the cluster's policies admit",
    "correct the values, or ask for an exception",
)
_QUOTA = (TemporaryFailure, "room in the namespace's quota", "raise it, or wait")
# What a 403 says -> what it means; the first that fits, since a role's refusal may quote a reason.
_FORBIDDEN: tuple[tuple[str, tuple[type[Eagle3Error], str, str]], ...] = (
    ('forbidden: User "', _NO_ROLE),
    ("exceeded quota", _QUOTA),
    ("status unknown for quota", _QUOTA),
    ("being terminated", (ConfigError, "a namespace that stays", "wait until it is gone")),
    ("denied the request", _POLICY),
    ("denied request", _POLICY),
    ("failed quota", _POLICY),
    ("admission", _POLICY),
)


def gone(path: str, namespace: str) -> UpstreamMissing:
    """The error of an object that was to be there."""
    return UpstreamMissing(
        thing_at(path),
        wanted=f"one in the namespace {namespace}",
        found="none",
        remedy="see `kubectl get jobs,pods,configmaps`",
    )


def no_answer(where: str, error: Exception) -> ServiceUnavailable:
    """The error of a request that came to nothing."""
    return ServiceUnavailable(
        where,
        wanted="an answer from the Kubernetes API server",
        found=first_line(str(error)) or type(error).__name__,
        remedy="check that the cluster can be reached; nothing was changed",
    )


def refusal(where: str, status: int, found: str) -> Exception:
    """What a status that is no success means, with the API server's own words for it.

    FileNotFoundError is 404, FileExistsError 409; the others are errors of ours.
    """
    if status == 404:
        return FileNotFoundError(where)
    if status == 409:
        return FileExistsError(where)
    kind, wanted, remedy = _meaning(status, found)
    return kind(where, wanted=wanted, found=f"{status}, {found}", remedy=remedy)


def _meaning(status: int, found: str) -> tuple[type[Eagle3Error], str, str]:
    if status == 403:
        # Of one status, four matters: only the words tell a role that lacks from what a policy, a
        # quota or a namespace that goes away refuses to everybody.
        for said, meaning in _FORBIDDEN:
            if said in found:
                return meaning
    return _BY_STATUS.get(status, _AWAY)


def message_of(body: bytes, reason: str | None) -> str:
    """What the API server says in words, on one line."""
    try:
        said = json.loads(body)["message"]
    except (json.JSONDecodeError, KeyError, TypeError):
        said = body.decode(errors="replace")
    return first_line(str(said)) or str(reason)


def first_line(text: str) -> str:
    """The first line of a text, as far as a sentence can hold it."""
    return text.strip().splitlines()[0][:500] if text.strip() else ""


def thing_at(path: str) -> str:
    """A path as a person names the thing: `jobs/NAME`."""
    return path.partition("{namespace}/")[2]
