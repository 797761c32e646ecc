"""The images, built and run as a pod runs them: any user, no rights, nothing to write but a volume.

They are run by runc alone, without a cluster, since what is asked here needs none.
"""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from eagle3.stages import STAGE_NAMES, STAGES
from tests.cluster import figures
from tests.cluster.images import (
    STANDS_ON,
    Builder,
    BuiltImage,
    ImagesUnavailable,
    build_images,
    record,
)

pytestmark = [pytest.mark.cluster, pytest.mark.images, pytest.mark.timeout(3600)]

SMALL_MEGABYTES = 150
# Python's own start and the store's libraries, on a machine that does other things besides.
START_SECONDS = 5
MODULES = [("gate", "gate"), ("gate", "runner"), *((one.image, one.name) for one in STAGES)]


@dataclass(frozen=True)
class Ran:
    code: int
    output: str
    seconds: float


class Runtime:
    """Containers of the images by runc, each on a mounted image and a volume in memory."""

    def __init__(self, folder: Path, images: dict[str, BuiltImage]) -> None:
        self.folder, self.images, self.builder = folder, images, Builder()
        self.containers: dict[str, str] = {}

    def run(self, image: str, *arguments: str, entry: list[str] | None = None) -> Ran:
        """Run an image's entry point, or another, with arguments, as some user in group 0."""
        reference = self.images[image].reference
        config = self.builder.config(reference)
        bundle = self.folder / f"{image}-{time.monotonic_ns()}"
        bundle.mkdir()
        command = [*(config["Entrypoint"] if entry is None else entry), *arguments]
        spec = specification(self._root(image), config, command)
        (bundle / "config.json").write_text(json.dumps(spec))
        started = time.monotonic()
        done = subprocess.run(
            ["runc", "--root", self.folder / "runc", "run", "--bundle", bundle, bundle.name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        seconds = time.monotonic() - started
        return Ran(done.returncode, done.stdout + done.stderr, seconds)

    def _root(self, image: str) -> str:
        if image not in self.containers:
            reference = self.images[image].reference
            container = self.builder.buildah("from", "--pull-never", reference).strip()
            self.builder.buildah("mount", container)
            self.containers[image] = container
        return self.builder.buildah("mount", self.containers[image]).strip()

    def close(self) -> None:
        for container in self.containers.values():
            self.builder.buildah("umount", container)
        self.builder.close()


def specification(root: str, config: dict[str, Any], command: list[str]) -> dict[str, Any]:
    """What *restricted* leaves of a container, as runc takes it."""
    user = {"uid": random.randint(20_000, 2**31 - 2), "gid": 0}
    plain = ["nosuid", "nodev"]
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]},
        {
            "destination": "/dev/shm",
            "type": "tmpfs",
            "source": "shm",
            "options": [*plain, "mode=1777"],
        },
        {
            "destination": "/scratch",
            "type": "tmpfs",
            "source": "scratch",
            "options": [*plain, "mode=1777"],
        },
    ]
    return {
        "ociVersion": "1.0.2",
        "process": {
            "terminal": False,
            "user": user,
            "args": command,
            "env": config["Env"],
            "cwd": config["WorkingDir"],
            "capabilities": {},
            "noNewPrivileges": True,
        },
        "root": {"path": root, "readonly": True},
        "mounts": mounts,
        "linux": {"namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "ipc"}]},
    }


@pytest.fixture(scope="module")
def images() -> dict[str, BuiltImage]:
    try:
        built = build_images()
    except ImagesUnavailable as reason:
        pytest.skip(f"{reason}.")
    record(built)
    return built


@pytest.fixture(scope="module")
def runtime(
    tmp_path_factory: pytest.TempPathFactory, images: dict[str, BuiltImage]
) -> Iterator[Runtime]:
    found = Runtime(tmp_path_factory.mktemp("runtime"), images)
    yield found
    found.close()


@pytest.mark.parametrize(("image", "module"), MODULES, ids=lambda one: one)
def test_every_stage_starts_as_any_user_on_a_root_that_is_only_read(runtime, image, module):
    ran = runtime.run(image, f"jobs.{module}", "--help")
    assert ran.code == 0, ran.output
    assert f"python -m jobs.{module}" in ran.output


def test_every_stage_has_its_image(images):
    assert list(images) == ["stack", *STANDS_ON]
    assert {module for _, module in MODULES} == {"gate", "runner", *STAGE_NAMES}


@pytest.mark.parametrize("image", STANDS_ON)
def test_nothing_but_the_volume_can_be_written(runtime, image):
    code = (
        "import os, pathlib\n"
        "home = pathlib.Path.home()\n"
        "(home / 'kept').write_text('x')\n"
        "for path in ('/', '/tmp', '/opt/eagle3/src', os.path.dirname(os.__file__)):\n"
        "    assert not os.access(path, os.W_OK), path\n"
        "assert os.getuid() >= 20000 and os.getgid() == 0\n"
        "print(home)"
    )
    ran = runtime.run(image, "-c", code, entry=["python"])
    assert (ran.code, ran.output) == (0, "/scratch\n")


def test_the_gate_is_small_and_starts_at_once(images, runtime):
    found = runtime.run("gate", "-c", "import torch", entry=["python"])
    assert "No module named 'torch'" in found.output
    seconds = min(runtime.run("gate", "jobs.gate", "--help").seconds for _ in range(3))
    figures.record(gate_start_seconds=round(seconds, 2))
    assert images["gate"].megabytes < SMALL_MEGABYTES
    assert seconds < START_SECONDS


@pytest.mark.parametrize("image", STANDS_ON)
def test_a_compiler_is_only_where_kernels_are_made(runtime, image):
    code = "import shutil; print(any(map(shutil.which, ('cc', 'gcc', 'clang', 'c++'))))"
    assert (
        runtime.run(image, "-c", code, entry=["python"]).output
        == f"{image in ('extract', 'train')}\n"
    )


@pytest.mark.parametrize("image", ["base", "extract", "train"])
def test_the_stack_is_the_base_s_and_not_another(runtime, image):
    code = "import torch; print(torch.__file__, torch.__version__)"
    ran = runtime.run(image, "-c", code, entry=["python"])
    assert ran.code == 0, ran.output
    assert ran.output.startswith("/opt/python/lib/"), ran.output


@pytest.mark.parametrize("image", STANDS_ON)
def test_an_image_says_what_it_is(runtime, images, image):
    labels = runtime.builder.config(images[image].reference)["Labels"]
    names = {f"org.opencontainers.image.{one}" for one in ("title", "version", "revision")}
    assert names <= labels.keys()
    assert labels["org.opencontainers.image.title"] == f"eagle3-{image}"


@pytest.mark.parametrize("image", ["base", "extract", "train"])
def test_an_archive_holds_its_own_layers_alone(images, image):
    mine, stack = images[image], images["stack"]
    assert list(mine.layers)[: len(stack.layers)] == list(stack.layers)
    own = sum(mine.layers.values()) - sum(stack.layers.values())
    assert own < mine.archive.stat().st_size < own + 10**6
