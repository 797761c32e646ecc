"""Faults of clusters and of operating that no other file's tests answer for, each by its row.

Those that need an API server, a kubelet or images have their tests in tests/cluster/.
"""

from __future__ import annotations

import ast
import json
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kubernetes import client
from speculators import train
from torch.distributed.launcher.api import LaunchConfig

from eagle3.cluster import Cluster, Object
from eagle3.draft import launch as launching
from eagle3.errors import ServiceUnavailable
from jobs.installed import InstalledRun, read_files
from jobs.runner import order
from tests.fault_table import ROOT
from tests.upstreams import CONFIG, VERIFIER, commit

PICKLES = {"pickle", "dill", "cloudpickle", "joblib"}


def installed(folder: Path) -> InstalledRun:
    """A run of the stage prepare alone, in files as the runner's pod has them."""
    labels = {"app.kubernetes.io/instance": "drafts", "eagle3/run": "one"}
    store = {"name": "EAGLE3_STORE", "value": f"file://{folder}/store"}
    pod = {"containers": [{"name": "stage", "env": [store]}]}
    metadata = {"name": "drafts-one-prepare", "labels": labels}
    body = {"metadata": metadata, "spec": {"template": {"spec": pod}}}
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "jobs.json").write_text(json.dumps({"prepare": body}))
    return read_files(folder / "run.yaml", folder / "jobs.json")


class Forgetful(Cluster):
    """An API server that for a while answers nothing, and never tells that a Job has ended."""

    def __init__(self, run: InstalledRun) -> None:
        super().__init__(client.ApiClient(client.Configuration()), "drafts")
        self.run, self.job_made, self.silent = run, False, 0

    def _call(self, method: str, path: str, **given: Any) -> Object:
        if path.endswith(("/pods", "/events")) or "configmaps" in path:
            if method == "GET" and path.endswith(("/pods", "/events")):
                return {"items": []}
            if method == "GET":
                raise FileNotFoundError(path)
        if method == "POST" and path.endswith("/jobs"):
            self.job_made, self.silent = True, 3
        elif self.silent:
            self.silent -= 1
            if not self.silent:
                # Done while nobody could hear of it.
                commit(self.run.store, "verifier")
                commit(self.run.store, "prepare", verifier=VERIFIER)
            raise ServiceUnavailable("api", wanted="an answer", found="410 Gone", remedy="wait")
        if not self.job_made:
            raise FileNotFoundError(path)
        standing = dict(self.run.bodies["prepare"]["metadata"], uid="1", annotations={})
        return {"metadata": standing, "status": {"active": 1}}


def test_b80_an_end_that_nobody_was_told_of_is_found(tmp_path: Path) -> None:
    run, said = installed(tmp_path), []
    order(run, Forgetful(run), said.append, poll_seconds=0.01)
    assert "410 Gone" in said[0]
    assert said[-1].startswith("prepare: committed as")


def test_b86_two_trainings_on_one_machine_take_no_port_of_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[LaunchConfig] = []

    def noted(config: LaunchConfig, entry: str) -> Any:
        asked.append(config)
        assert entry == sys.executable
        return lambda *_: None

    monkeypatch.setattr(launching, "elastic_launch", noted)
    assert [launching.launch(2, []), launching.launch(2, [])] == [0, 0]
    assert {config.rdzv_endpoint for config in asked} == {"localhost:0"}
    assert asked[0].run_id != asked[1].run_id


def loads_of_torch(folder: Path) -> Iterator[tuple[str, bool]]:
    """Every `torch.load` below a folder, and whether it takes tensors alone."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("torch.load"):
                safe = [one for one in node.keywords if one.arg == "weights_only"]
                weights_only = bool(safe) and ast.unparse(safe[0].value) == "True"
                yield f"{path}:{node.lineno}", weights_only


def uses_of_pickle(path: Path) -> Iterator[str]:
    """What a file has of the modules that unpickle, but for the error that a refusal raises."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module in PICKLES:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from ({one.name for one in node.names} & PICKLES) - {"pickle"}
        elif isinstance(node, ast.Attribute) and node.attr != "UnpicklingError":
            of = node.value
            if isinstance(of, ast.Name) and of.id == "pickle":
                yield f"pickle.{node.attr}"


def test_b89_nothing_of_a_bucket_is_unpickled(tmp_path: Path) -> None:
    unsafe, used = [], []
    for folder in (ROOT / "eagle3", ROOT / "jobs"):
        unsafe += [where for where, safe in loads_of_torch(folder) if not safe]
        for path in folder.rglob("*.py"):
            used += [f"{path}: {name}" for name in uses_of_pickle(path)]
    assert not unsafe, "give torch.load weights_only=True"
    assert not used, "safetensors and JSON hold what is stored"

    class Malice:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"counts": Malice()}, tmp_path / "counts.pt")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "counts.pt", weights_only=True)
    assert not (tmp_path / "ran").exists()


def test_b89_what_upstream_loads_of_a_checkpoint_is_tensors_alone() -> None:
    found = list(loads_of_torch(Path(train.__file__).parent))
    assert len(found) >= 4
    assert [where for where, safe in found if not safe] == []
