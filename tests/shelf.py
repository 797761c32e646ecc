"""A namespace without a cluster: objects behind an HTTP port, and a run that lives there.

It keeps what is put there, and writes logs. What a real API server does with Jobs is in
`tests/cluster/`.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from kubernetes import client

from eagle3.cluster import Cluster, Object
from jobs.installed import InstalledRun, read_files
from tests.upstreams import CONFIG

STAGES = ("prepare", "extract", "vocab")
RUN = "drafts-one"


class Shelf:
    """Objects by path, as an API server keeps them, and what it is asked to do.

    Attributes:
        jobs: name -> Job.
        pods: Job -> its pods.
        lines: (pod, container) -> what it wrote.
        config_maps: name -> ConfigMap.
        events: those that were told.
        refusals: (method, status, message): the next request of that method is answered so.
        asked: every request that changes something.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, Object] = {}
        self.pods: dict[str, list[Object]] = {}
        self.lines: dict[tuple[str, str], list[str]] = {}
        self.config_maps: dict[str, Object] = {}
        self.events: list[Object] = []
        self.refusals: list[tuple[str, int, str]] = []
        self.asked: list[tuple[str, str, Any]] = []

    def answer(self, method: str, url: str, body: Any) -> tuple[int, Any]:
        parts = urlsplit(url)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        kind, _, rest = parts.path.partition("/namespaces/drafts/")[2].partition("/")
        for refusal in self.refusals:
            if refusal[0] == method:
                self.refusals.remove(refusal)
                return refusal[1], {"message": refusal[2]}
        if method != "GET":
            self.asked.append((method, f"{kind}/{rest}".rstrip("/"), body))
        if kind == "pods" and rest:
            return 200, self.lines.get((rest.removesuffix("/log"), query["container"]), [])
        if kind == "pods":
            return 200, {"items": self.pods.get(query["labelSelector"].partition("=")[2], [])}
        if kind == "events":
            self.events += [body] * (method == "POST")
            return (200, {"items": []}) if method == "GET" else (201, body)
        if method == "POST":
            self.jobs[body["metadata"]["name"]] = made(body)
            return 201, self.jobs[body["metadata"]["name"]]
        things = self.config_maps if kind == "configmaps" else self.jobs
        if rest not in things:
            return 404, {"message": "not found"}
        if method == "PATCH":
            merge(things[rest], body)
            # The controller stops the pods of a suspended Job.
            self.pods.pop(rest, None) if body.get("spec", {}).get("suspend") else None
        return 200, things.pop(rest) if method == "DELETE" else things[rest]


def merge(under: Any, over: Any) -> None:
    for key, value in over.items():
        if value is None:
            under.pop(key, None)
        elif isinstance(value, dict):
            merge(under.setdefault(key, {}), value)
        else:
            under[key] = value


def made(body: Object) -> Object:
    body["metadata"].setdefault("uid", f"uid of {body['metadata']['name']}")
    body.setdefault("status", {"active": 1})
    return body


@contextmanager
def served(shelf: Shelf) -> Iterator[Cluster]:
    """The namespace that a shelf answers for."""

    class Handler(BaseHTTPRequestHandler):
        def do(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, found = shelf.answer(self.command, self.path, json.loads(data or "null"))
            told = "".join(f"{line}\n" for line in found) if isinstance(found, list) else ""
            answer = told.encode() if isinstance(found, list) else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = do_PATCH = do_DELETE = do

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    configuration = client.Configuration(host=f"http://127.0.0.1:{server.server_port}")
    with client.ApiClient(configuration) as api:
        yield Cluster(api, "drafts")
    server.shutdown()
    server.server_close()
    thread.join()


def body_of(stage: str, store: str, **spec: Any) -> Object:
    labels = {"app.kubernetes.io/instance": "drafts", "eagle3/run": "one", "eagle3/stage": stage}
    container = {"name": "stage", "env": [{"name": "EAGLE3_STORE", "value": store}]}
    return {
        "metadata": {"name": f"{RUN}-{stage}", "labels": labels},
        "spec": {"parallelism": 1, "template": {"spec": {"containers": [container]}}, **spec},
    }


def write_run(folder: Path, store: str = "") -> InstalledRun:
    bodies = {stage: body_of(stage, store or f"file://{folder}/store") for stage in STAGES}
    (folder / "run.yaml").write_text(CONFIG)
    (folder / "jobs.json").write_text(json.dumps(bodies))
    return read_files(folder / "run.yaml", folder / "jobs.json")


def write_run_elsewhere(
    folder: Path, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> InstalledRun:
    """A run whose store is at an endpoint of S3."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    return write_run(folder, "s3://bucket/run")


def put(shelf: Shelf, stage: str, *pods: Object, **job: Any) -> Object:
    """A Job of the run on the shelf, at work where nothing else is said."""
    found = made(body_of(stage, "file:///x") | job)
    shelf.jobs[found["metadata"]["name"]] = found
    shelf.pods[found["metadata"]["name"]] = list(pods)
    return found


def failed(reason: str = "BackoffLimitExceeded") -> dict[str, Any]:
    condition = {"type": "Failed", "status": "True", "reason": reason, "message": ""}
    return {"status": {"failed": 1, "conditions": [condition]}}


def pod(name: str, phase: str = "Running", index: int = 0, **state: Any) -> Object:
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {
        "metadata": {
            "name": name,
            "uid": name,
            "creationTimestamp": moment,
            "labels": {"batch.kubernetes.io/job-completion-index": str(index)},
        },
        "spec": {"nodeName": "n1"},
        "status": {
            "phase": phase,
            "containerStatuses": [
                {"name": "stage", "state": state or {"running": {"startedAt": moment}}}
            ],
        },
    }


@contextmanager
def silent_port() -> Iterator[int]:
    """A port that takes connections and answers none of them."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield server.getsockname()[1]


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
