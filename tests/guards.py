"""Shows of every guard that a test notices when it is gone: `make guards`.

For each guard of `faults.toml` a copy of the project loses it, and the tests of its row are run
there, those that take long only where no other fails. One of them must fail, and pass again in the
whole copy. Prints a line for each guard and writes `runs/guards.json`; ends with 1 where a guard
was not missed. Tests that need a cluster or images are left out.

    python -m tests.guards [ID ...]
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from tests.fault_table import ROOT, FaultTest, Guard, fault_tests, read_table

REPORT = ROOT / "runs" / "guards.json"
_LEFT_OUT = (".venv", ".git", "runs", ".hypothesis", "__pycache__", ".*_cache")
# What takes long, or more than this machine; a row's other tests are taken where it has any.
_HEAVY = frozenset({"engine", "slow"})
_ELSEWHERE = frozenset({"cluster", "images", "gpu"})
_SECONDS = 600
_OPTIONS = (
    "-x",
    "-q",
    "--tb=no",
    "--timeout=150",
    "-pno:cacheprovider",
    # Its own plugins are among what is loaded already.
    "-Wignore::pytest.PytestAssertRewriteWarning",
)
_PROJECT = frozenset({"eagle3", "jobs", "tests"})
# Loaded once, before any fork: for the light tests, then for the heavy ones too.
_SLOW_TO_LOAD = {
    False: ("torch", "transformers", "pyarrow.parquet", "s3fs", "speculators.train.cli"),
    True: ("vllm",),
}
_FAILED = 1
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", re.MULTILINE)


def main(argv: Sequence[str]) -> int:
    """Try the guards of these rows, or of all, and return the exit code."""
    table, tests = read_table(), fault_tests()
    chosen = [(fault, guard) for fault in argv or table for guard in table[fault].guard]
    found: dict[tuple[str, Guard], Verdict] = {}
    with tempfile.TemporaryDirectory(prefix="eagle3-guards-") as folder:
        copy = Path(folder) / "project"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        (copy / ".venv").symlink_to((ROOT / ".venv").resolve())
        for heavy in (False, True):
            for name in _SLOW_TO_LOAD[heavy]:
                importlib.import_module(name)
            for fault, guard in chosen:
                nodes = nodes_of(fault, tests, heavy=heavy)
                standing = found.get((fault, guard))
                if nodes and (standing is None or standing.verdict == "green"):
                    verdict = found[fault, guard] = tried(copy, fault, guard, nodes)
                    print(f"{fault:5}{verdict.verdict:8}{verdict.seconds:6.1f} s  {guard.at}")
                    sys.stdout.flush()
                    write_report(found.values(), whole=not argv)
        refuse_others(copy, found)
        write_report(found.values(), whole=not argv)
    missed = [one for one in found.values() if one.verdict != "red"]
    print(f"guards: {len(found)} taken away, {len(found) - len(missed)} missed by a test")
    return 1 if missed or len(found) < len(chosen) else 0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What came of taking a guard away.

    Attributes:
        verdict: red where a test failed that passes otherwise, green where all passed, broken
            where they could not be run.
        test: the one that failed; `said` is its last word.
    """

    id: str
    guard: str
    text: str
    verdict: str
    seconds: float
    test: str
    said: str


def nodes_of(fault: str, tests: Sequence[FaultTest], *, heavy: bool) -> list[str]:
    """The tests of a row that can run on this machine: those that take long, or the others."""
    own = [test for test in tests if fault in test.faults and not test.marks & _ELSEWHERE]
    return [test.node for test in own if bool(test.marks & _HEAVY) == heavy]


def tried(copy: Path, fault: str, guard: Guard, nodes: Sequence[str]) -> Verdict:
    """Take a guard away in the copy and run these tests."""
    started = time.monotonic()
    with taken_away(copy, guard):
        code, said = run(copy, nodes)
    failure = _FAILURE.search(said)
    return Verdict(
        id=fault,
        guard=guard.at,
        text=guard.text,
        verdict="red" if code == _FAILED and failure else "broken" if code else "green",
        seconds=round(time.monotonic() - started, 1),
        test=failure[1] if failure else "",
        said=(failure[2] or "")[:300] if failure else said[-300:] if code else "",
    )


def refuse_others(copy: Path, found: dict[tuple[str, Guard], Verdict]) -> None:
    """Where a test fails with its guard in place too, it has shown nothing."""
    nodes = sorted({one.test for one in found.values() if one.verdict == "red"})
    _, said = run(copy, nodes, "--maxfail=1000") if nodes else (0, "")
    failing = {match[1] for match in _FAILURE.finditer(said)}
    for key, one in found.items():
        if one.test in failing:
            found[key] = msgspec.structs.replace(one, verdict="broken")
            print(f"{one.id}: {one.test} fails although nothing was taken away", file=sys.stderr)


@contextmanager
def taken_away(copy: Path, guard: Guard) -> Iterator[None]:
    """The copy without this guard, for a while."""
    path = copy / guard.file
    whole = path.read_text(encoding="utf-8")
    assert whole.count(guard.text) == 1, f"{guard.at}: its text stands once in the file"
    times = path.stat()
    path.write_text(whole.replace(guard.text, guard.without), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(whole, encoding="utf-8")
        os.utime(path, (times.st_atime, times.st_mtime))


def run(copy: Path, nodes: Sequence[str], *options: str) -> tuple[int, str]:
    """pytest on these tests, to the first failure by default: its exit code and what it printed.

    In a fork of this process, which has loaded what other forks needed, and none of the project.
    """
    said, loaded = copy.parent / "said.txt", copy.parent / "loaded.txt"
    load(loaded)
    child = os.fork()
    if child == 0:
        os.setsid()
        _become_pytest(copy, [*options, *nodes], said, loaded)
    deadline = time.monotonic() + _SECONDS
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status), said.read_text(errors="replace")
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return _FAILED, f"FAILED {nodes[0]} - no end after {_SECONDS} s"
        time.sleep(0.05)


def load(names: Path) -> None:
    """Load what the fork before this one has loaded, so that the next ones need not."""
    if names.exists():
        for name in names.read_text().split():
            if name not in sys.modules:
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)


def _become_pytest(copy: Path, arguments: Sequence[str], said: Path, loaded: Path) -> NoReturn:
    """Run the copy's tests in this process and end it, whatever happens."""
    code = 2
    try:
        with said.open("w") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        os.chdir(copy)
        os.environ["PYTHONPATH"] = sys.path[0] = str(copy)
        for name in [name for name in sys.modules if name.partition(".")[0] in _PROJECT]:
            del sys.modules[name]
        before = set(sys.modules)
        code = int(pytest.main([*_OPTIONS, *arguments]))
        names = [name for name in sys.modules if name not in before]
        own = [name for name in names if name.partition(".")[0] not in {"__main__", *_PROJECT}]
        loaded.write_text("\n".join(own))
        sys.stdout.flush()
    finally:
        os._exit(code)


def write_report(found: Iterable[Verdict], *, whole: bool) -> None:
    """Write the report; a part of the rows replaces those of an earlier one."""
    new = {(one.id, one.guard, one.text): one for one in found}
    if not whole and REPORT.exists():
        standing = msgspec.json.decode(REPORT.read_bytes(), type=list[Verdict])
        new = {(one.id, one.guard, one.text): one for one in standing} | new
    REPORT.parent.mkdir(exist_ok=True)
    rows = msgspec.json.encode([new[key] for key in sorted(new)])
    REPORT.write_bytes(msgspec.json.format(rows, indent=2) + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
