"""The programs of the cluster, built or unpacked once into the cache, by their versions.

A folder of the cache is whole or not there: it is made under another name and renamed.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.places import HERE, MODULES, cache, cache_home, logs

KUBERNETES = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-proxy",
    "kube-scheduler",
    "kubelet",
)


class NotBuilt(Exception):
    """A program could not be built; the message says which, and where the output is."""


@dataclass(frozen=True, kw_only=True)
class GoPrograms:
    """Programs of one Go module, which a module of ours under go/ requires by version."""

    name: str
    module: str
    packages: dict[str, str]

    @property
    def version(self) -> str:
        """As go.mod has it; images of our own have none and go by their sources."""
        text = (MODULES / self.name / "go.mod").read_text()
        if required := re.search(rf"^require {re.escape(self.module)} (\S+)$", text, re.MULTILINE):
            return required[1]
        return _digest(*sorted((MODULES / self.name).rglob("*.go")))

    @property
    def folder(self) -> Path:
        """Where the programs lie once built."""
        return cache() / f"{self.name}-{self.version}"

    def build(self) -> None:
        """Build all programs into the folder; without C, so that they run anywhere."""
        log = logs() / f"build-{self.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": ""}
        with _whole(self.folder) as part, log.open("w") as output:
            for program, package in self.packages.items():
                command = ["go", "build", "-trimpath", "-buildvcs=false", "-mod=readonly"]
                command += ["-ldflags", self._linked(), "-o", str(part / program), package]
                at = MODULES / self.name
                done = subprocess.run(
                    command, cwd=at, env=environment, stdout=output, stderr=output, check=False
                )
                if done.returncode:
                    raise NotBuilt(f"{program} could not be built; what Go says is in {log}")

    def _linked(self) -> str:
        flags = "-s -w"
        if self.name == "kubernetes":
            # Unversioned programs fail each other's checks of compatibility.
            major, minor = self.version.lstrip("v").split(".")[:2]
            facts = {"gitVersion": self.version, "gitMajor": major, "gitMinor": minor}
            for name, value in facts.items():
                flags += f" -X k8s.io/component-base/version.{name}={value}"
        return flags


@dataclass(frozen=True, kw_only=True)
class Clients:
    """kubectl and helm out of a package that carries them, named in NAME.txt with its hash."""

    name: str

    @property
    def requirements(self) -> Path:
        """The one package, by version and hash."""
        return HERE / f"{self.name}.txt"

    @property
    def folder(self) -> Path:
        """Where the programs lie once unpacked."""
        return cache() / f"{self.name}-{_digest(self.requirements)}"

    def build(self) -> None:
        """Install the package beside, and take the two programs out of it."""
        uv = shutil.which("uv") or str(cache_home() / "eagle3" / "uv" / "bin" / "uv")
        with _whole(self.folder) as part:
            package = part / "package"
            command = [uv, "pip", "install", "-q", "--no-deps", "--no-build", "--require-hashes"]
            command += ["--python", sys.executable, "--target", str(package)]
            done = subprocess.run([*command, "-r", str(self.requirements)], check=False)
            if done.returncode:
                raise NotBuilt(f"the package in {self.requirements.name} could not be installed")
            (archive,) = package.glob("aws_cdk/*/_jsii/*.tgz")
            with tarfile.open(archive) as layers:
                layers.extract("package/lib/layer.zip", part, filter="data")
            with zipfile.ZipFile(part / "package/lib/layer.zip") as layer:
                for program in ("helm", "kubectl"):
                    (part / program).write_bytes(layer.read(f"{program}/{program}"))
                    (part / program).chmod(0o755)
            shutil.rmtree(package)


PROGRAMS: tuple[GoPrograms | Clients, ...] = (
    Clients(name="clients"),
    Clients(name="clients-helm3"),
    GoPrograms(
        name="tiny-images",
        module="",
        packages={"pause": "./pause", "probe": "./probe"},
    ),
    GoPrograms(
        name="kubernetes",
        module="k8s.io/kubernetes",
        packages={name: f"k8s.io/kubernetes/cmd/{name}" for name in KUBERNETES},
    ),
    GoPrograms(
        name="etcd",
        module="go.etcd.io/etcd/server/v3",
        packages={"etcd": "go.etcd.io/etcd/server/v3"},
    ),
    GoPrograms(
        name="coredns",
        module="github.com/coredns/coredns",
        packages={"coredns": "github.com/coredns/coredns"},
    ),
)


def absent() -> list[GoPrograms | Clients]:
    """What is not built yet."""
    return [programs for programs in PROGRAMS if not programs.folder.exists()]


def program(name: str, *, of: str = "") -> str:
    """The path of a built program, or else of one on the PATH.

    `of` names the group where two have one of that name, and then only a built one serves.
    """
    for programs in PROGRAMS:
        path = programs.folder / name
        if of in ("", programs.name) and path.exists():
            return str(path)
    if not of and (found := shutil.which(name)):
        return found
    raise NotBuilt(f"{name} is not built; run `make testbed`")


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    yield part
    part.rename(folder)


def _digest(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
