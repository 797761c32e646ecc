"""The processes of the cluster, each recorded before anything else happens.

A process id alone may name another process by the time it is read, so that each is recorded with
the moment it started; only a process that has both is ever signalled.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process of the cluster; `started` is in clock ticks since the machine's start."""

    name: str
    pid: int
    started: int

    @classmethod
    def of(cls, pid: int, *, name: str) -> Process:
        """The process that has this id now."""
        return cls(name=name, pid=pid, started=_started(pid))

    def alive(self) -> bool:
        """Whether it still runs. One that has ended is reaped where it is a child of ours."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, os.WNOHANG)
        return self.started >= 0 and _started(self.pid) == self.started

    def signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Processes:
    """The record of what was started, in one file that outlives whoever started it."""

    def __init__(self, record: Path, logs: Path) -> None:
        self._record, self._logs = record, logs

    def start(self, name: str, command: Sequence[str], *, namespace: str = "") -> Process:
        """Start a process that outlives its starter, in a network namespace if one is named.

        Its output goes to `name`.log. The id stays the command's, since nsenter becomes it.
        `ip netns exec` would mount another /sys, in which the kubelet finds no cgroups.
        """
        arguments = list(command)
        if namespace:
            arguments[:0] = ["/usr/bin/nsenter", f"--net=/run/netns/{namespace}"]
        self._logs.mkdir(parents=True, exist_ok=True)
        log = os.fspath(self.log(name))
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ]
        pid = os.posix_spawn(arguments[0], arguments, os.environ, file_actions=actions, setsid=True)
        process = Process.of(pid, name=name)
        with self._record.open("a") as record:
            record.write(json.dumps(asdict(process)) + "\n")
        return process

    def log(self, name: str) -> Path:
        """The file with the output of a process."""
        return self._logs / f"{name}.log"

    def recorded(self) -> list[Process]:
        """Every process that was started, in order; a line cut short by a crash is left out."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for line in self._record.read_text().splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    found.append(Process(**json.loads(line)))
        return found

    def current(self) -> list[Process]:
        """Of each name the one that was started last: what ought to run now."""
        return list({process.name: process for process in self.recorded()}.values())

    def ended(self) -> list[str]:
        """The names of those that ought to run and do not."""
        return [process.name for process in self.current() if not process.alive()]

    def named(self, *beginnings: str) -> list[Process]:
        """The processes whose names begin with one of these."""
        return [process for process in self.recorded() if process.name.startswith(beginnings)]


def stop(processes: Iterable[Process], *, patience: float) -> None:
    """End processes by TERM, and by KILL those that still run after `patience` seconds."""
    running = list(processes)
    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 10.0)):
        for process in running:
            process.signal(number)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            running = [process for process in running if process.alive()]
            if not running:
                return
            time.sleep(POLL_SECONDS)


def kill_where(wanted: Iterable[int]) -> None:
    """Kill processes by id at once, and wait until they are gone."""
    stop([Process.of(pid, name="") for pid in wanted], patience=0.0)


def _started(pid: int) -> int:
    """When a process started; -1 when there is none or it only waits to be reaped."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    # The name stands in parentheses and may hold anything, a parenthesis too.
    fields = text.rpartition(")")[2].split()
    return -1 if fields[0] in "ZX" else int(fields[19])
