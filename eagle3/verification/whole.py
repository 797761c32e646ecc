"""One artefact verified to a depth, with what was looked at and what it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal, get_args

from eagle3.artifact import Artifact
from eagle3.errors import DataInvalid, Eagle3Error, EnvironmentMisconfigured
from eagle3.manifest import FileEntry
from eagle3.store import Store
from eagle3.verification.contents import Contents, Sources
from eagle3.verification.outside import Outside, look_at

Depth = Literal["gate", "full"]
DEPTHS: tuple[Depth, ...] = get_args(Depth)
# Objects read at a time. Of hidden states each holds one row in memory, of others the object.
_READERS = 4
# Kind -> the module of its contents' checks. Chosen by name, since some need engines' libraries.
_MODULES = {
    "verifier": "tensors",
    "prepare": "rows",
    "regenerate": "rows",
    "extract": "states",
    "vocab": "tensors",
    "train": "drafts",
    "export": "drafts",
    "evaluate": "figures",
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What verifying one artefact came to.

    Attributes:
        kind: a word of `eagle3.stages.ARTIFACT_KINDS`, or empty where no manifest tells.
        objects, bytes: what its manifest names.
        findings: what is wrong, in the order in which it was found; none when all is well.
        notes: what could not be looked at, and is no fault.
    """

    url: str
    kind: str
    depth: Depth
    objects: int
    bytes: int
    seconds: float
    findings: tuple[Eagle3Error, ...]
    notes: tuple[str, ...] = ()


def verify(
    store: Store,
    depth: Depth,
    *,
    scratch: Path,
    trust_remote_code: bool = False,
    advance: Callable[[int, int], None] = lambda _done, _total: None,
) -> Verdict:
    """Verify the artefact at a prefix.

    Args:
        scratch: a local folder for what must be a file to be read.
        trust_remote_code: as `verifier.trust_remote_code`, for the tokenizer of a verifier.
        advance: told how many bytes have been verified in full, and of how many.

    Raises nothing for what is wrong with the artefact, which the verdict tells, and what its
    store raises when it does not answer.
    """
    started = time.monotonic()
    seen = look_at(store)
    findings, notes = list(seen.findings), list(seen.notes)
    if depth == "full" and seen.artifact is not None:
        findings += seen.strangers()
        sources = Sources(scratch=scratch, trust_remote_code=trust_remote_code)
        contents = _contents(seen.artifact, seen, sources)
        findings += _inside(contents, seen, advance, whole=not findings)
        notes += contents.notes
    manifest = seen.artifact.manifest if seen.artifact else None
    return Verdict(
        url=store.url,
        kind=manifest.artifact if manifest else "",
        depth=depth,
        objects=len(manifest.files) if manifest else 0,
        bytes=sum(entry.bytes for entry in manifest.files) if manifest else 0,
        seconds=time.monotonic() - started,
        findings=tuple(findings),
        notes=tuple(notes),
    )


def _contents(artifact: Artifact, seen: Outside, sources: Sources) -> Contents:
    kind = artifact.manifest.artifact
    try:
        module = import_module(f"eagle3.verification.{_MODULES[kind]}")
    except ModuleNotFoundError as error:
        raise EnvironmentMisconfigured(
            f"verify {kind}",
            wanted="the libraries of the stage that wrote it",
            found=str(error),
            remedy="verify it in that stage's image, or to --depth gate",
        ) from error
    made: Contents = module.CONTENTS[kind](artifact, seen.inputs, sources)
    return made


def _inside(
    contents: Contents, seen: Outside, advance: Callable[[int, int], None], *, whole: bool
) -> list[Eagle3Error]:
    """What reading every object finds; they are held together only where each alone is sound."""
    assert seen.artifact is not None
    there = {info.path for info in seen.listing}
    entries = [entry for entry in seen.artifact.manifest.files if entry.path in there]
    done, total = 0, sum(entry.bytes for entry in entries)
    found: list[Eagle3Error] = []

    def check(entry: FileEntry) -> Eagle3Error | None:
        return _refused(lambda: contents.check_object(entry))

    with ThreadPoolExecutor(_READERS) as readers:
        for entry, error in zip(entries, readers.map(check, entries), strict=True):
            found += [error] if error is not None else []
            advance(done := done + entry.bytes, total)
    if whole and not found:
        found = _whole(contents)
    # What another size told already is told once.
    known = {error.field for error in seen.findings}
    return [error for error in found if error.field not in known]


def _whole(contents: Contents) -> list[Eagle3Error]:
    found: list[Eagle3Error] = []
    try:
        found += [e for check in contents.whole() if (e := _refused(check)) is not None]
    except DataInvalid as error:
        # What the checks themselves need could not be read.
        found.append(error)
    return found


def _refused(check: Callable[[], None]) -> Eagle3Error | None:
    try:
        check()
    except DataInvalid as error:
        return error
    return None
