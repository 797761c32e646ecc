"""Faults of preparing that no other file's tests answer for, each by its row of the table."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.fault_table import ROOT


def _calls() -> Iterator[tuple[str, ast.Call]]:
    for folder in ("eagle3", "jobs"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_b19_no_process_of_ours_is_ever_forked() -> None:
    forked = []
    for where, call in _calls():
        name = ast.unparse(call.func)
        if name in ("os.fork", "os.forkpty", "multiprocessing.Pool", "multiprocessing.Process"):
            forked.append(where)
        if name.endswith("get_context") and ast.unparse(call.args[0]) != "'spawn'":
            forked.append(where)
        if name.endswith("ProcessPoolExecutor"):
            own = [one for one in call.keywords if one.arg == "mp_context"]
            forked += [] if own else [where]
    assert not forked, "give it multiprocessing.get_context('spawn'): threads do not survive a fork"
