"""What later stages need of the verifier, committed as the run's artefact `verifier/`."""

from __future__ import annotations

from eagle3 import artifact as artifacts
from eagle3.artifact import Artifact
from eagle3.manifest import Manifest, identity_of
from eagle3.verifier import Verifier
from jobs.process import StageRun


def commit_verifier(run: StageRun, verifier: Verifier) -> Artifact:
    """Commit what later stages need of the verifier, unless it stands already."""
    fingerprints = {
        "verifier": verifier.facts().fingerprint,
        "tokenizer": verifier.tokenizer_facts().fingerprint,
    }
    identity = identity_of(fingerprints, {"stop_ids": list(verifier.stop_ids)})
    if standing := run.committed(identity, "verifier"):
        return standing
    store = run.output("verifier")
    with run.scratch() as folder:
        names = verifier.save_artifact_files(folder)
        files = tuple(artifacts.put(store, name, folder / name) for name in names)
    manifest = Manifest(
        artifact="verifier",
        identity=identity,
        files=files,
        verifier=verifier.facts(),
        tokenizer=verifier.tokenizer_facts(),
    )
    return run.commit(manifest, "verifier")
