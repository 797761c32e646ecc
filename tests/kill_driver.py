"""Runs a stage again and again, and kills it with SIGKILL at chosen writes into its store.

`python -m tests.kill_driver STAGE ENGINE CONFIG CASES`: ENGINE is `real` or `fake`; CASES is a
JSON list of `[store, path, moment]`, each run in a child of its own, one after the other. A child
kills itself when it creates the object that ends with `path`: `before` it is there, `within`
(half of it lies in a temporary file), or `after`. With an empty path it must live and end with 0.
The children are forked, so that the heavy imports happen once.
"""

import importlib
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from eagle3.store import Store, local
from jobs import extract, prepare, regenerate
from jobs.process import Story, run_stage
from tests.tiny_run import start_fake_capture, start_fake_generator

MOMENTS = ("before", "within", "after")
STORIES: dict[tuple[str, str], Story] = {
    ("prepare", "real"): prepare.story,
    ("extract", "real"): lambda run: extract.story(run, lambda *a: extract.start_vllm(run, *a)),
    ("extract", "fake"): lambda run: extract.story(run, start_fake_capture),
    ("regenerate", "real"): lambda run: regenerate.story(
        run, lambda *a: regenerate.start_vllm(run, *a)
    ),
    ("regenerate", "fake"): lambda run: regenerate.story(run, start_fake_generator),
}
ENGINE_MODULES = ("eagle3.vllm_capture.states", "eagle3.vllm_capture.answers")


def arm(path: str, moment: str) -> None:
    """From now on, creating the object that ends with `path` is this process's last act."""

    def fatal(create: Callable[..., None], path_at: int) -> Callable[..., None]:
        def create_or_die(self: Store, *arguments: Any) -> None:
            dies = str(arguments[path_at]).endswith(path)
            if dies and moment == "before":
                die()
            if dies and moment == "within":
                local._publish = publish_half
            create(self, *arguments)
            if dies:
                die()

        return create_or_die

    Store.create_bytes = fatal(Store.create_bytes, 0)  # type: ignore[method-assign]
    Store.create_file = fatal(Store.create_file, 1)  # type: ignore[method-assign]


def die() -> None:
    """As `kill -9` does it: nothing of Python's runs after this."""
    os.kill(os.getpid(), signal.SIGKILL)


def publish_half(target: Path, fill: Callable[[BinaryIO], None], *, exclusive: bool) -> None:
    """In place of `local._publish`: half the bytes into its temporary file, and the end."""
    whole = io.BytesIO()
    fill(whole)
    half = whole.getvalue()[: whole.tell() // 2]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.with_name(f"{local._PARTIAL}killed").write_bytes(half)
    die()


def run_child(story: Story, stage: str, config: str, case: Sequence[str]) -> None:
    """One case in a forked child; says what it did where that is not what the case wants."""
    store, path, moment = case
    child = os.fork()
    if not child:
        if path:
            arm(path, moment)
        code = run_stage(stage, story, ["--config", config, "--store", store])
        sys.stdout.flush()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    ended = os.waitstatus_to_exitcode(status)
    wanted = -signal.SIGKILL if path else 0
    assert ended == wanted, f"{store} {path} {moment}: ended with {ended}, not {wanted}"


def main() -> None:
    """See the module."""
    stage, engine, config, cases = sys.argv[1:]
    if engine == "real":
        for module in ENGINE_MODULES:
            importlib.import_module(module)
    for case in json.loads(cases):
        run_child(STORIES[stage, engine], stage, config, case)


if __name__ == "__main__":
    main()
