"""What an image's build adds to its base: what is missing, from the lock, and never the base's own.

The base, the index and the lock are small and made here; the installer and pip are the real ones.
"""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

# Each starts pip several times.
pytestmark = pytest.mark.slow

PROJECT = """
[project]
dependencies = ["facts==2"]
[project.optional-dependencies]
train = ["eagle3[tensors]", "trainer>=1"]
tensors = ["engine==3"]
"""


def wheel(folder: Path, name: str, version: str, *requires: str) -> Path:
    """An installable distribution that says its own version."""
    info = f"{name}-{version}.dist-info"
    wanted = "".join(f"Requires-Dist: {one}\n" for one in requires)
    files = {
        f"{name}.py": f"version = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{wanted}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        lines.append(f"{path},sha256={digest.decode()},{len(text)}")
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""])
    target = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return target


class Build:
    """The folder that a Dockerfile's build stage works in, on a base of its own."""

    def __init__(self, folder: Path, python: Path) -> None:
        self.folder, self.index, self.base = folder, folder / "index", folder / "base"
        self.index.mkdir()
        # An environment on the shared one, so that a test may install into its base.
        subprocess.run([python, "-m", "venv", "--without-pip", self.base], check=True)
        (packages,) = self.base.glob("lib/python3.*/site-packages")
        (shared,) = python.parent.parent.glob("lib/python3.*/site-packages")
        (packages / "shared.pth").write_text(f"import site; site.addsitedir({str(shared)!r})\n")
        self.lock: list[str] = []
        (folder / "pyproject.toml").write_text(PROJECT)
        (folder / "overrides.txt").write_text("video ; sys_platform == 'never'\n")
        self.locks("facts", "2")
        self.locks("engine", "3")
        self.locks("trainer", "1", "engine>=3", "loader", "video")
        self.locks("loader", "5")

    def locks(self, name: str, version: str, *requires: str) -> None:
        made = wheel(self.index, name, version, *requires)
        digest = hashlib.sha256(made.read_bytes()).hexdigest()
        self.lock.append(f"{name}=={version} \\\n    --hash=sha256:{digest}")

    def has(self, name: str, version: str, *requires: str) -> None:
        """Put a distribution into the base."""
        (packages,) = self.base.glob("lib/python3.*/site-packages")
        with zipfile.ZipFile(wheel(self.folder, name, version, *requires)) as archive:
            archive.extractall(packages)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        (self.folder / "requirements.txt").write_text("\n".join(self.lock) + "\n")
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON"))}
        command = [self.base / "bin" / "python", ROOT / "images" / "install.py"]
        return subprocess.run(
            [*command, self.folder / "made", "--extra", "train", *arguments],
            cwd=self.folder,
            env={**keep, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.index)},
            capture_output=True,
            text=True,
            check=False,
        )

    def added(self) -> set[str]:
        found = (self.folder / "made").glob("lib/python3.*/site-packages/*.dist-info")
        return {path.name.removesuffix(".dist-info") for path in found}

    def seen(self, name: str) -> str:
        """The version that the image's Python imports."""
        code = f"import {name}; print({name}.version)"
        python = self.folder / "made" / "bin" / "python"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
        return done.stdout.strip()


@pytest.fixture(scope="module")
def python_with_pip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pip") / "python"
    done = subprocess.run([sys._base_executable, "-m", "venv", folder], check=False)
    if done.returncode:
        pytest.skip("Python here cannot make an environment with pip; the package is python3-venv.")
    return folder / "bin" / "python"


@pytest.fixture
def build(tmp_path: Path, python_with_pip: Path) -> Build:
    return Build(tmp_path, python_with_pip)


def test_what_is_missing_is_added_with_what_it_asks_for(build):
    build.has("engine", "3+cu130")
    done = build.run("--given", "engine")
    assert done.returncode == 0, done.stderr
    assert build.added() == {"facts-2", "trainer-1", "loader-5"}
    assert build.seen("engine") == "3+cu130"
    assert "install: engine 3+cu130 is the base's (lock: 3)" in done.stdout
    assert "install: loader 5 was added" in done.stdout


def test_what_does_not_fit_is_hidden_and_not_replaced(build):
    build.has("engine", "3")
    build.has("facts", "1")
    done = build.run("--given", "engine")
    assert done.returncode == 0, done.stderr
    assert build.seen("facts") == "2"
    assert list(build.base.glob("lib/*/site-packages/facts-1.dist-info"))


def test_a_given_library_is_never_brought(build):
    done = build.run("--given", "engine")
    assert done.returncode == 65
    assert "engine must come with the base image" in done.stderr
    assert "engine-3" not in build.added()


def test_an_addition_that_the_base_cannot_live_with_is_refused(build):
    build.has("engine", "3", "facts<2")
    done = build.run("--given", "engine")
    assert done.returncode == 65
    assert "engine of the base image asks for facts<2, the lock has 2" in done.stderr


def test_only_what_the_lock_knows_by_its_hash_is_added(build):
    build.has("engine", "3")
    wheel(build.index, "loader", "5", "something-else")
    done = build.run("--given", "engine")
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert "loader-5" not in build.added()
