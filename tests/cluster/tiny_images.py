"""Images of one static program each: the pause container, and the probe that tests ask with."""

from __future__ import annotations

import io
import json
import platform
import tarfile
from hashlib import sha256
from pathlib import Path

from tests.cluster.binaries import PROGRAMS, program

PROBE = "localhost/probe:1"
USER = 10001
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def archive(name: str) -> Path:
    """The OCI archive with the program `name`, written beside the program the first time."""
    (folder,) = (programs.folder for programs in PROGRAMS if programs.name == "tiny-images")
    path = folder / f"{name}.tar"
    if not path.exists():
        part = path.with_suffix(".part")
        part.write_bytes(_archive(name, Path(program(name, of="tiny-images")).read_bytes()))
        part.rename(path)
    return path


def _archive(name: str, content: bytes) -> bytes:
    layer = _tar({name: content})
    config = {
        "architecture": ARCHITECTURES[platform.machine()],
        "os": "linux",
        "config": {"Entrypoint": [f"/{name}"], "User": str(USER)},
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
    }
    kind = "application/vnd.oci.image"
    config_text = _json(config)
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": f"{kind}.manifest.v1+json",
            "config": _descriptor(f"{kind}.config.v1+json", config_text),
            "layers": [_descriptor(f"{kind}.layer.v1.tar", layer)],
        }
    )
    index = {
        "schemaVersion": 2,
        "mediaType": f"{kind}.index.v1+json",
        "manifests": [_descriptor(f"{kind}.manifest.v1+json", manifest)],
    }
    blobs = {f"blobs/sha256/{_digest(blob)[7:]}": blob for blob in (layer, config_text, manifest)}
    blobs["oci-layout"] = _json({"imageLayoutVersion": "1.0.0"})
    blobs["index.json"] = _json(index)
    return _tar(blobs)


def _tar(files: dict[str, bytes]) -> bytes:
    """An archive that is the same for the same files: no times, no owners."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _descriptor(kind: str, content: bytes) -> dict[str, object]:
    return {"mediaType": kind, "digest": _digest(content), "size": len(content)}


def _digest(content: bytes) -> str:
    return f"sha256:{sha256(content).hexdigest()}"


def _json(value: object) -> bytes:
    return json.dumps(value).encode()
