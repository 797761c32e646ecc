"""Faults of preparing that no other file's tests answer for, each by its row of the table."""

from __future__ import annotations

import ast
import json
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from eagle3.config import PrepareConfig, VerifierConfig
from eagle3.conversations import Source, parallel_outcomes, pool
from tests.fault_table import ROOT
from tests.tiny_verifiers import make_llama


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


@pytest.mark.slow
def test_b19_workers_are_spawned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []

    class Noted(ProcessPoolExecutor):
        def __init__(self, *args: Any, mp_context: Any, **options: Any) -> None:
            used.append(mp_context.get_start_method())
            super().__init__(*args, mp_context=mp_context, **options)

    monkeypatch.setattr(pool, "ProcessPoolExecutor", Noted)
    verifier = make_llama(tmp_path / "verifier", num_layers=2)
    said = [{"role": "user", "content": "a long question " * 200}]
    said.append({"role": "assistant", "content": "an answer"})
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps({"messages": said}) + "\n" for _ in range(80)))
    found = parallel_outcomes(
        VerifierConfig(source=str(verifier)),
        PrepareConfig(data=(str(data),), num_workers=1, max_seq_len=8192),
        [Source(str(data))],
        80,
    )
    assert len(list(found)) == 80
    assert used == ["spawn"]
    assert multiprocessing.active_children() == []
