"""What must hold inside one manifest, whoever wrote it."""

from __future__ import annotations

from collections import Counter

from eagle3.errors import ManifestInvalid
from eagle3.manifest.fields import (
    FINAL_HIDDEN_STATE,
    LAYER_ID_CONVENTION,
    MANIFEST_NAME,
    STATES_DTYPE,
    Manifest,
)
from eagle3.stages import ARTIFACT_KINDS


def check(manifest: Manifest, where: str) -> None:
    """What must hold inside one manifest, whatever its kind. Raises ManifestInvalid."""
    if manifest.artifact not in ARTIFACT_KINDS:
        raise ManifestInvalid(
            f"{where}: artifact",
            wanted=" or ".join(ARTIFACT_KINDS),
            found=repr(manifest.artifact)[:80],
            remedy="use the version of eagle3 that wrote it",
        )
    rejected = sum(manifest.rejected.values())
    sums = {
        "rows_in": (manifest.rows_kept + rejected, manifest.rows_in),
        "total_samples": (sum(f.samples for f in manifest.files), manifest.total_samples),
        "total_tokens": (sum(f.tokens for f in manifest.files), manifest.total_tokens),
    }
    for field, (wanted, found) in sums.items():
        if wanted != found:
            raise ManifestInvalid(
                f"{where}: {field}",
                wanted=f"{wanted}, the sum of its parts",
                found=found,
                remedy="run the stage that wrote it again",
            )
    paths = [entry.path for entry in manifest.files]
    doubled = sorted(path for path, count in Counter(paths).items() if count > 1)
    unsafe = [repr(path) for path in paths if not is_below(path)]
    if doubled or unsafe or MANIFEST_NAME in paths:
        raise ManifestInvalid(
            f"{where}: files",
            wanted="each object once, below the prefix",
            found=(doubled + unsafe or [MANIFEST_NAME])[0],
            remedy="run the stage that wrote it again",
        )


def is_below(path: str) -> bool:
    """Whether a path names an object below a prefix, in the one way that an object is named."""
    return path.isprintable() and not {"", ".", ".."} & set(path.split("/"))


def check_states(manifest: Manifest, where: str) -> None:
    """What must hold for hidden states, so that a consumer reads what was captured.

    Raises ManifestInvalid naming the field.
    """
    facts, ids = manifest.verifier, manifest.layer_ids or ()
    wanted = {
        "layer_id_convention": (LAYER_ID_CONVENTION, manifest.layer_id_convention),
        "final_hidden_state": (FINAL_HIDDEN_STATE, manifest.final_hidden_state),
        "dtype": (STATES_DTYPE, manifest.dtype),
        "num_layers_captured": (len(ids), manifest.num_layers_captured),
        "layer_ids": (sorted(set(ids)), list(ids)),
    }
    unproven = [f.path for f in manifest.files if f.samples and not f.header_sha256]
    if unproven:
        wanted[f"files: {unproven[0]}: header_sha256"] = ("that of the shard's header", "none")
    if facts is not None:
        wanted["hidden_size"] = (facts.hidden_size, manifest.hidden_size)
        wanted["layer_ids: the last"] = (facts.num_hidden_layers, ids[-1] if ids else None)
    for field, (right, found) in wanted.items():
        if right != found:
            raise ManifestInvalid(
                f"{where}: {field}",
                wanted=right,
                found=found,
                remedy="extract the hidden states again",
            )
