"""Runs stages again and again, and kills them with SIGKILL at chosen writes into their store.

`python -m tests.kill_driver` imports every stage once and then reads orders from standard input,
one JSON line each: the stage, its engine (`real` or `fake`), its configuration, a folder for
what it leaves on the disk, and cases `[store, path, moment]`. Each case runs in a forked child,
one after the other. A child kills itself when it writes the object that ends with `path` (a
pattern of fnmatch): `before` it is there, `within` (half of it lies in a temporary file), or
`after`. With an empty path it must live and end with 0. The answer is one line: what went
otherwise, or nothing. What the stages print goes to standard error.
"""

import fnmatch
import importlib
import io
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from eagle3.store import Store, local
from jobs import evaluate, export, extract, prepare, regenerate, train, vocab
from jobs.process import Story, run_stage
from tests.evaluable import Scripted
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
    ("vocab", "real"): vocab.story,
    ("train", "real"): train.story,
    ("export", "real"): export.story,
    ("evaluate", "fake"): lambda run: evaluate.story(run, Scripted),
}
ENGINE_MODULES = ("eagle3.vllm_capture.states", "eagle3.vllm_capture.answers")
# Every way into a store, and which of its arguments is the path.
WRITES = {"create_bytes": 0, "write_bytes": 0, "create_file": 1, "put_file": 1}


def arm(path: str, moment: str) -> None:
    """From now on, writing the object that ends with `path` is this process's last act."""

    def fatal(write: Callable[..., None], path_at: int) -> Callable[..., None]:
        def write_or_die(self: Store, *arguments: Any) -> None:
            dies = fnmatch.fnmatch(str(arguments[path_at]), f"*{path}")
            if dies and moment == "before":
                die()
            if dies and moment == "within":
                local._publish = publish_half
            write(self, *arguments)
            if dies:
                die()

        return write_or_die

    for name, path_at in WRITES.items():
        setattr(Store, name, fatal(getattr(Store, name), path_at))


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


def run_child(story: Story, stage: str, config: str, case: Sequence[str]) -> str:
    """One case in a forked child; what it did where that is not what the case wants."""
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
    return "" if ended == wanted else f"{store} {path} {moment}: ended with {ended}, not {wanted}"


def obey(order: dict[str, Any]) -> str:
    """Run the cases of an order up to the first that goes otherwise, and say how."""
    tempfile.tempdir = order["scratch"]
    story = STORIES[order["stage"], order["engine"]]
    said = (run_child(story, order["stage"], order["config"], case) for case in order["cases"])
    return next(filter(None, said), "")


def main() -> None:
    """See the module."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    for module in ENGINE_MODULES:
        importlib.import_module(module)
    for line in sys.stdin:
        print(obey(json.loads(line)), file=answers, flush=True)


if __name__ == "__main__":
    main()
