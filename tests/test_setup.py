"""Setting up: what is missing is said in one sentence, and what is there costs nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from itertools import chain
from pathlib import Path

import pytest

from tests.conftest import ROOT

TOOLS = ("awk", "bash", "cat", "chmod", "cut", "df", "dirname", "flock", "grep")
TOOLS += ("id", "ln", "mkdir", "rm", "sha256sum")
LOCK = (ROOT / "requirements.txt").read_text()


class Machine:
    """A machine with few programs: a clone, a cache folder, and a PATH of links and fakes."""

    def __init__(self, folder: Path) -> None:
        self.clone, self.cache, self.bin = (folder / name for name in ("clone", "cache", "bin"))
        (self.clone / ".ci").mkdir(parents=True)
        self.bin.mkdir()
        shutil.copy(ROOT / ".ci" / "setup", self.clone / ".ci" / "setup")
        shutil.copy(ROOT / "requirements.txt", self.clone)
        for tool in TOOLS:
            found = shutil.which(tool)
            assert found, f"this machine has no {tool}"
            (self.bin / tool).symlink_to(found)
        self.fake("ldconfig", "echo libnuma.so.1")
        self.fake("id", "echo 1000")

    def fake(self, name: str, script: str) -> None:
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(f"#!{shutil.which('bash')}\n{script}\n")
        path.chmod(0o755)

    def setup(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.bin / "bash"), ".ci/setup"],
            cwd=self.clone,
            env={"PATH": str(self.bin), "HOME": "/nonexistent", "XDG_CACHE_HOME": str(self.cache)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def refusal(self) -> str:
        """The one sentence with which the set-up ends."""
        done = self.setup()
        assert done.returncode == 78, done
        (line,) = done.stderr.splitlines()
        assert line.startswith("setup: ")
        assert line.endswith(".")
        return line


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_uv_and_python_it_says_what_to_install(machine):
    assert "neither uv nor Python" in machine.refusal()


def test_without_uv_and_a_python_that_can_bring_it_it_says_what_to_install(machine):
    machine.fake("python3", "echo 'No module named venv' >&2; exit 1")
    assert "python3-venv" in machine.refusal()


def test_without_libnuma_and_root_it_names_the_package(machine):
    machine.fake("ldconfig", "echo libm.so.6")
    assert "libnuma1" in machine.refusal()


def test_without_room_it_says_how_much_it_needs(machine):
    machine.fake("df", "echo header; echo /dev/x 100 90 1048576 90% /")
    assert "has 1 GiB free and the environment needs 9" in machine.refusal()


def test_a_uv_that_fails_stops_it_and_leaves_no_finished_environment(machine):
    machine.fake("uv", "echo 'error: no network' >&2; exit 2")
    done = machine.setup()
    assert done.returncode == 78
    assert done.stderr.splitlines()[-1].endswith("install one.")
    assert not list(machine.cache.rglob(".locked"))
    assert not (machine.clone / ".venv").exists()


def test_a_finished_environment_is_made_once_and_linked(machine):
    """uv's part is played by a script that makes what uv would make."""
    machine.fake(
        "uv",
        'case "$1" in venv) for last; do :; done; mkdir -p "$last/bin";'
        ' printf "#!/bin/sh\\n" >"$last/bin/python"; chmod +x "$last/bin/python";; esac',
    )
    first = machine.setup()
    assert (first.returncode, first.stderr) == (0, "")
    target = (machine.clone / ".venv").resolve()
    assert target.parent == machine.cache / "eagle3"
    assert (target / "bin" / "eagle3").exists()
    machine.fake("uv", "exit 1")
    assert machine.setup().stdout == ""
    # Another lock is another environment.
    (machine.clone / "requirements.txt").write_text("other\n")
    assert machine.setup().returncode == 78


def test_the_lock_pins_and_hashes_everything_and_names_no_address():
    assert "://" not in LOCK
    pinned = re.findall(r"^[a-z0-9][\w.-]*(?:\[[\w,-]+\])?==\S+.*\\$", LOCK, flags=re.MULTILINE)
    named = [line for line in LOCK.splitlines() if line and not line.startswith((" ", "#"))]
    assert len(pinned) == len(named) > 100
    for block in re.split(r"\n(?=\S)", LOCK.strip()):
        assert "--hash=sha256:" in block, block.splitlines()[0]


def test_the_lock_holds_what_the_project_pins():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for one in chain(project["dependencies"], *project["optional-dependencies"].values()):
        if "==" in one:
            assert re.search(rf"^{re.escape(one)}\b", LOCK, flags=re.MULTILINE), one
