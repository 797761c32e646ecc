"""A run on this machine: each stage its own process, the same that a container runs.

A stage process gets the configuration, decides itself whether its work is done, and says why it
stops. What is left to do here: start it, hand it the signals that reach us, and wait.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from eagle3 import artifact as artifacts
from eagle3.config import RunConfig
from eagle3.errors import ConfigError, Stopped
from eagle3.lineage import walk
from eagle3.stages import STAGES, Stage
from eagle3.store import Store, open_store
from eagle3.summary import summary

SUMMARY_NAME = "summary.json"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What vLLM and its extensions have to say before anything of ours can ask them not to.
_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_ROOT = Path(__file__).resolve().parent.parent


class StageProcesses:
    """Runs stage processes one after another, as a context manager that owns the signals.

    The first Ctrl-C, SIGTERM or SIGHUP is handed on as SIGTERM, at which a stage keeps what it
    has finished and ends with 143; the second one kills. Stages lead a process group of their
    own, so that the terminal's Ctrl-C reaches them only through here.

    Args:
        config: the configuration's file.
        store: the run's prefix.
    """

    def __init__(self, config: Path, store: Store) -> None:
        self._config, self._store = config, store
        self._child: subprocess.Popen[bytes] | None = None
        self._asked = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StageProcesses:
        self._before = {name: signal.signal(name, self._ask_to_stop) for name in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for name, handler in self._before.items():
            signal.signal(name, handler)

    def run(self, stage: str, *more: str) -> int:
        """Run one stage to its end and return its exit code; 128 + n when signal n killed it.

        Args: more: arguments beside --config and --store.

        Raises Stopped when a signal came before it was started.
        """
        if self._asked:
            raise Stopped(stage)
        command = [sys.executable, "-m", f"jobs.{stage}"]
        command += ["--config", str(self._config), "--store", self._store.url, *more]
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env={**_QUIET, **os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            process_group=0,
        )
        if self._asked:
            self._child.terminate()
        code = self._child.wait()
        self._child = None
        if code < 0:
            print(f"{stage}: killed by signal {-code}; run it again to continue", file=sys.stderr)
            return 128 - code
        return code

    def _ask_to_stop(self, *_: object) -> None:
        self._asked += 1
        if self._child is None:
            return
        if self._asked == 1:
            print("eagle3: stopping; what is finished is kept; once more kills", file=sys.stderr)
            self._child.terminate()
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)


@contextlib.contextmanager
def config_file(config: RunConfig) -> Iterator[Path]:
    """The resolved configuration as a file for the stage processes, removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="eagle3-") as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False))
        yield path


def chosen_stages(config: RunConfig, first: str | None, last: str | None) -> Sequence[Stage]:
    """The stages from `first` to `last`, both included, without those that the run leaves out."""
    names = [stage.name for stage in STAGES]
    begin = names.index(first) if first else 0
    end = names.index(last) if last else len(names) - 1
    if begin > end:
        raise ConfigError(
            "--from",
            wanted=f"a stage that does not come after --until {last}",
            found=first,
            remedy="exchange them",
        )
    return [stage for stage in STAGES[begin : end + 1] if _wanted(config, stage)]


def run_stages(
    config: RunConfig, url: str, stages: Sequence[Stage], tell: Callable[[str], None]
) -> int:
    """Run stages in order and return 0, or the exit code of the first that fails.

    After `evaluate` the run's summary is written beside the artefacts and told as one JSON line.
    """
    store = open_store(url)
    seconds: dict[str, float] = {}
    with config_file(config) as path, StageProcesses(path, store) as processes:
        for stage in stages:
            standing = artifacts.find(store.child(stage.writes[-1]))
            if standing is not None:
                tell(f"{stage.name}: committed already as {standing.digest[:12]}, checking")
            started = time.monotonic()
            code = processes.run(stage.name)
            if code:
                return code
            if standing is None:
                seconds[stage.name] = round(time.monotonic() - started, 1)
    if stages and stages[-1].name == "evaluate":
        tell(write_summary(store, seconds))
    return 0


def write_summary(store: Store, seconds: dict[str, float]) -> str:
    """Write `summary.json` into the run's store and return it as one line.

    Args:
        seconds: stage -> wall clock of its whole process, for those that did their work just now;
            of the others their manifest's own figure is taken, which leaves out the start.

    What the run was made from may lie in other runs: it is found by its lineage. Raises
    UpstreamMissing, ManifestInvalid where that is no longer whole.
    """
    evaluated = artifacts.find(store.child("evaluate"))
    manifests = {
        artifact.manifest.artifact: artifact.manifest
        for artifact in walk([evaluated] if evaluated else [])
    }
    record = summary(manifests)
    record["seconds_by_stage"] = {**record["seconds_by_stage"], **seconds}
    record["seconds_total"] = round(sum(record["seconds_by_stage"].values()), 1)
    line = msgspec.json.encode(record)
    store.write_bytes(SUMMARY_NAME, msgspec.json.format(line, indent=2) + b"\n")
    return line.decode()


def _wanted(config: RunConfig, stage: Stage) -> bool:
    return not stage.optional or bool(getattr(config, stage.name).enabled)
