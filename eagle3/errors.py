"""Everything that can go wrong, as one tree.

    Eagle3Error
    ├── ConfigError              64  a field of the run's configuration is wrong
    ├── DataInvalid              65  the data itself is wrong; doing it again gives the same
    │   ├── ManifestInvalid          a manifest, or an artefact that differs from its manifest
    │   ├── StillNeeded              what committed artefacts rest on and somebody wants to delete
    │   ├── IdentityConflict         the prefix holds work of other inputs or settings
    │   ├── ConversationsInvalid     rows that cannot become training rows
    │   ├── ShardInvalid             a shard that is not what its header or manifest says
    │   ├── MappingInvalid           t2d or d2t break one of the invariants I1 to I5
    │   ├── VerifierInvalid          config, tokenizer or one of the three tensors
    │   ├── CaptureInvalid           hidden states that the engine cannot have meant
    │   ├── DraftInvalid             a checkpoint or an export that would not serve
    │   ├── AcceptanceInvalid        an evaluation that proves nothing, or an output that changed
    │   └── StageFailed              a stage's Job that Kubernetes has given up
    ├── UpstreamMissing          66  the artefact that a stage reads is not committed
    ├── ServiceUnavailable       69  a store or an engine is away; trying again can help
    ├── TemporaryFailure         75  trying again can help
    │   └── CredentialsUnusable      none are given, or they are not valid any more
    ├── PermissionRefused        77  a store says no
    ├── EnvironmentMisconfigured 78  this machine or container lacks something
    └── Stopped                 143  SIGTERM came; what is finished is kept

An error reads as one sentence: the field, what was wanted, what was found, what to do.
The facts are attributes, so that a program can read them too.
"""

from __future__ import annotations

from typing import ClassVar


class Eagle3Error(Exception):
    """The root of the tree; never raised itself.

    Args:
        field: where the fault is: `train.total_seq_len`, a path in a store, a tensor's name.
        wanted: what should have been there, as it follows "must be" or "wanted".
        found: what was there.
        remedy: what the person does next, as an imperative clause.
    """

    exit_code: ClassVar[int]
    retry_can_help: ClassVar[bool] = False

    def __init__(self, field: str, *, wanted: object, found: object, remedy: str) -> None:
        self.field = field
        self.wanted = str(wanted)
        self.found = str(found)
        self.remedy = remedy
        super().__init__(field)

    def __str__(self) -> str:
        return f"{self.field}: wanted {self.wanted}, found {self.found}; {self.remedy}."

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.field, self.wanted, self.found, self.remedy))

    def as_record(self) -> dict[str, object]:
        """The same facts as a flat JSON object, for the termination message."""
        return {
            "error": type(self).__name__,
            "exit_code": self.exit_code,
            "retry_can_help": self.retry_can_help,
            "field": self.field,
            "wanted": self.wanted,
            "found": self.found,
            "remedy": self.remedy,
        }


def _rebuild(
    kind: type[Eagle3Error], field: str, wanted: str, found: str, remedy: str
) -> Eagle3Error:
    return kind(field, wanted=wanted, found=found, remedy=remedy)


class ConfigError(Eagle3Error):
    """A field of the run's configuration, or an argument of a command, is wrong."""

    exit_code = 64


class DataInvalid(Eagle3Error):
    """The data is wrong; the same run on the same data would fail the same way."""

    exit_code = 65


class ManifestInvalid(DataInvalid):
    """A manifest cannot be read, or the objects beside it are not those it names."""


class StillNeeded(DataInvalid):
    """An artefact that committed artefacts were made from was to be deleted."""


class IdentityConflict(DataInvalid):
    """The prefix holds work of other inputs or of settings that change the result."""


class ConversationsInvalid(DataInvalid):
    """Too many rows cannot be used, or a whole file is of no known shape."""


class ShardInvalid(DataInvalid):
    """A shard's bytes are not what its header or its manifest says."""


class MappingInvalid(DataInvalid):
    """t2d or d2t break one of the invariants I1 to I5 of `eagle3.vocab`."""


class VerifierInvalid(DataInvalid):
    """A verifier's config, tokenizer or tensors are not what its family promises."""


class CaptureInvalid(DataInvalid):
    """Hidden states fail a check, or do not reproduce the engine's own log-probabilities."""


class DraftInvalid(DataInvalid):
    """A checkpoint or an exported draft lacks what serving needs."""


class AcceptanceInvalid(DataInvalid):
    """An evaluation that would prove nothing, or a draft that changed the verifier's output."""


class StageFailed(DataInvalid):
    """A stage's Job was tried as often as it may be, and Kubernetes has given it up."""


class UpstreamMissing(Eagle3Error):
    """A stage's input is not committed: there is no manifest at its prefix."""

    exit_code = 66


class ServiceUnavailable(Eagle3Error):
    """A store or an engine does not answer."""

    exit_code = 69
    retry_can_help = True


class TemporaryFailure(Eagle3Error):
    """Something failed that may well succeed when tried again."""

    exit_code = 75
    retry_can_help = True


class CredentialsUnusable(TemporaryFailure):
    """There are no credentials or old ones; a process that starts anew may be given others."""


class PermissionRefused(Eagle3Error):
    """A store refuses these credentials."""

    exit_code = 77


class EnvironmentMisconfigured(Eagle3Error):
    """A package, a variable, a device or space that this machine must have is not there."""

    exit_code = 78


class Stopped(Eagle3Error):
    """SIGTERM asked the stage to stop; what it had finished is kept."""

    exit_code = 143
    retry_can_help = True

    def __init__(
        self,
        field: str,
        *,
        wanted: object = "to finish",
        found: object = "SIGTERM",
        remedy: str = "run it again to continue from what is finished",
    ) -> None:
        super().__init__(field, wanted=wanted, found=found, remedy=remedy)
