"""What a person does to a run in a cluster, and what is seen of it.

The API server here is a shelf of objects behind an HTTP port: it keeps what is put there, and
writes logs. What a real one does with Jobs is in `tests/cluster/`.
"""

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
from eagle3.errors import ServiceUnavailable, StageFailed, UpstreamMissing
from eagle3.progress import Progress
from jobs import operate
from jobs.installed import InstalledRun, read_files
from jobs.runner import Runner, order
from tests.upstreams import CONFIG, HIDDEN_STATES, VERIFIER, commit

STAGES = ("prepare", "extract", "vocab")
RUN = "drafts-one"


class Shelf:
    """Objects by path, as an API server keeps them, and what it is asked to do.

    Attributes:
        jobs: name -> Job.
        pods: Job -> its pods.
        lines: (pod, container) -> what it wrote.
        asked: every request that changes something.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, Object] = {}
        self.pods: dict[str, list[Object]] = {}
        self.lines: dict[tuple[str, str], list[str]] = {}
        self.asked: list[tuple[str, str, Any]] = []

    def answer(self, method: str, url: str, body: Any) -> tuple[int, Any]:
        parts = urlsplit(url)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        kind, _, rest = parts.path.partition("/namespaces/drafts/")[2].partition("/")
        if method != "GET":
            self.asked.append((method, f"{kind}/{rest}".rstrip("/"), body))
        if kind == "pods" and rest:
            return 200, self.lines.get((rest.removesuffix("/log"), query["container"]), [])
        if kind == "pods":
            return 200, {"items": self.pods.get(query["labelSelector"].partition("=")[2], [])}
        if kind == "events":
            return (200, {"items": []}) if method == "GET" else (201, body)
        if method == "POST":
            self.jobs[body["metadata"]["name"]] = made(body)
            return 201, self.jobs[body["metadata"]["name"]]
        if kind != "jobs" or rest not in self.jobs:
            return 404, {"message": "not found"}
        if method == "PATCH":
            merge(self.jobs[rest], body)
            # The controller stops the pods of a suspended Job.
            self.pods.pop(rest, None) if body.get("spec", {}).get("suspend") else None
        return 200, self.jobs.pop(rest) if method == "DELETE" else self.jobs[rest]


def merge(under: Any, over: Any) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(under.get(key), dict):
            merge(under[key], value)
        else:
            under[key] = value


def made(body: Object) -> Object:
    body["metadata"].setdefault("uid", f"uid of {body['metadata']['name']}")
    body.setdefault("status", {"active": 1})
    return body


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def cluster(shelf: Shelf) -> Iterator[Cluster]:
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


@pytest.fixture
def run(tmp_path: Path) -> InstalledRun:
    return write_run(tmp_path)


@pytest.fixture
def said() -> list[str]:
    return []


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


def rows_of(run: InstalledRun, cluster: Cluster) -> dict[str, operate.StageStatus]:
    return {row.stage: row for row in operate.status(run, cluster)}


class TestStatus:
    def test_a_runner_that_cannot_begin_is_told_of(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf
    ) -> None:
        waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
        put(shelf, "runner", pod("r", "Pending", **waiting))
        row = rows_of(run, cluster)["runner"]
        assert row.state == "pending"
        assert "ImagePullBackOff: not found" in row.what

    def test_a_runner_that_failed_is_told_of_while_a_stage_goes_on(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf
    ) -> None:
        put(shelf, "extract", pod("e"))
        put(shelf, "runner", pod("r", "Failed", terminated={"exitCode": 3}), **failed())
        rows = rows_of(run, cluster)
        assert rows["extract"].state == "running"
        assert rows["runner"].state == "failed"
        assert "exit code 3" in rows["runner"].what
        assert f"no stage begins any more; `eagle3 retry STAGE --run {RUN}`" in rows["runner"].what

    def test_a_run_without_a_runner_says_so(self, run: InstalledRun, cluster: Cluster) -> None:
        row = rows_of(run, cluster)["runner"]
        assert row.state == "none"
        assert f"`eagle3 submit {RUN}`" in row.what

    def test_a_runner_s_silence_is_none(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf
    ) -> None:
        old = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
        put(shelf, "runner", pod("r", **old))
        assert rows_of(run, cluster)["runner"].what == ""

    def test_restarts_and_progress_stand_side_by_side(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf
    ) -> None:
        killed = pod("a", "Failed", terminated={"exitCode": 137, "reason": "OOMKilled"})
        put(shelf, "extract", killed, pod("b"), status={"failed": 5, "active": 1})
        with Progress(run.store, "extract", "capture", total=4, unit="rows") as progress:
            progress.advance(2, resumed=True)
        row = rows_of(run, cluster)["extract"]
        assert (row.state, row.pods, row.restarts) == ("running", "1 of 1 on n1", 5)
        first, second = row.what.splitlines()
        assert first == "capture 2 of 4 rows (50%)"
        assert second.startswith("5 pods failed so far, the last: pod a: container stage was kill")

    def test_a_store_out_of_reach_is_asked_once_and_not_for_long(
        self, tmp_path: Path, cluster: Cluster, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with silent_port() as port:
            run = write_run_elsewhere(tmp_path, f"http://127.0.0.1:{port}", monkeypatch)
            put(shelf, "extract", pod("e"))
            began = time.monotonic()
            rows = rows_of(run, cluster)
        assert time.monotonic() - began < 25
        assert rows["extract"].state == "running"
        assert rows["prepare"].state == "unknown"
        assert "the store cannot be used from here" in rows["prepare"].what


class TestCancel:
    def test_it_stops_the_runner_first_and_then_what_is_at_work(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf, said: list[str]
    ) -> None:
        put(shelf, "runner", pod("r"))
        put(shelf, "prepare", **failed())
        put(shelf, "extract", pod("e"))
        operate.cancel(run, cluster, said.append)
        assert [(method, path) for method, path, _ in shelf.asked] == [
            ("PATCH", f"jobs/{RUN}-runner"),
            ("DELETE", f"jobs/{RUN}-extract"),
        ]
        assert shelf.jobs[f"{RUN}-runner"]["spec"]["suspend"]
        assert shelf.asked[1][2]["propagationPolicy"] == "Foreground", "its pods have saved"
        assert f"`eagle3 retry extract --run {RUN}` or `eagle3 submit {RUN}` goes on" in said[-1]
        row = rows_of(run, cluster)["runner"]
        shelf.jobs[f"{RUN}-runner"]["status"] = suspended()
        row = rows_of(run, cluster)["runner"]
        assert row.state == "suspended"
        assert row.what.startswith("cancelled: no stage begins; `eagle3 retry")

    def test_the_run_goes_on_afterwards_with_what_was_finished(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf, said: list[str]
    ) -> None:
        commit(run.store, "verifier")
        commit(run.store, "prepare", verifier=VERIFIER)
        put(shelf, "runner", pod("r"))
        Runner(run, cluster, said.append).step()
        run.store.write_bytes("work/extract/unit-0", b"finished")
        operate.cancel(run, cluster, said.append)
        assert set(shelf.jobs) == {f"{RUN}-runner"}
        assert rows_of(run, cluster)["extract"].state == "waiting", "and not gone"
        assert run.store.read_bytes("work/extract/unit-0") == b"finished"
        Runner(run, cluster, said.append).step()
        assert f"{RUN}-extract" in shelf.jobs, "submit goes on"
        operate.cancel(run, cluster, said.append)
        operate.retry(run, cluster, "extract")
        assert operate.restart_runner(run, cluster) == "runner: goes on"
        assert not shelf.jobs[f"{RUN}-runner"]["spec"]["suspend"]

    def test_gpus_are_freed_where_the_store_is_out_of_reach(
        self,
        tmp_path: Path,
        cluster: Cluster,
        shelf: Shelf,
        said: list[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        with silent_port() as port:
            nobody = f"http://127.0.0.1:{port}"
        run = write_run_elsewhere(tmp_path, nobody, monkeypatch)
        put(shelf, "extract", pod("e"))
        operate.cancel(run, cluster, said.append)
        assert f"{RUN}-extract" not in shelf.jobs
        assert said[0].endswith("It goes on after `eagle3 retry extract` only.")

    def test_a_run_that_is_not_at_work_is_left_alone(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf, said: list[str]
    ) -> None:
        put(shelf, "prepare", **failed())
        operate.cancel(run, cluster, said.append)
        assert not shelf.asked
        assert len(said) == 1


def suspended() -> dict[str, Any]:
    return {"conditions": [{"type": "Suspended", "status": "True"}]}


class TestLogs:
    def test_the_newest_pod_of_each_worker_is_told(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf, said: list[str]
    ) -> None:
        job = put(shelf, "extract", pod("b", index=1), pod("a"))
        job["spec"]["completions"] = 2
        shelf.lines = {("a", "stage"): ["t1 one", "t2 two words"], ("b", "stage"): ["t1 three"]}
        operate.logs(run, cluster, "extract", said.append)
        assert said == ["[0] one", "[0] two words", "[1] three"]

    def test_a_stage_that_never_began_tells_what_its_gate_wrote(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf, said: list[str]
    ) -> None:
        refused = pod("a", "Failed", waiting={"reason": "PodInitializing"})
        gate = {"name": "gate", "state": {"terminated": {"exitCode": 66}}}
        refused["status"]["initContainerStatuses"] = [gate]
        put(shelf, "extract", refused, **failed())
        shelf.lines = {("a", "gate"): ["t1 run prepare first"]}
        operate.logs(run, cluster, "extract", said.append)
        assert said == ["run prepare first"]

    def test_following_goes_on_over_a_restart_until_the_job_ends(
        self,
        run: InstalledRun,
        cluster: Cluster,
        shelf: Shelf,
        said: list[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("jobs.operate.following._EVERY_SECONDS", 0.05)
        put(shelf, "extract", pod("a"))
        shelf.lines = {("a", "stage"): ["t1 one", "t2 two"], ("b", "stage"): ["t1 again"]}
        following = threading.Thread(
            target=operate.logs,
            args=(run, cluster, "extract", said.append),
            kwargs={"follow": True},
        )
        following.start()
        wait_for(lambda: said == ["one", "two"])
        # The connection broke in the same second, which is told from there on.
        shelf.lines["a", "stage"].append("t3 three")
        wait_for(lambda: said == ["one", "two", "three"])
        killed = pod("a", "Failed", terminated={"exitCode": 137})
        put(shelf, "extract", killed, pod("b", "Succeeded", terminated={"exitCode": 0}))
        wait_for(lambda: said[3:] == ["again"])
        assert following.is_alive()
        put(shelf, "extract", **failed())
        following.join(10)
        assert not following.is_alive()
        assert said == ["one", "two", "three", "again"], "each line once"

    def test_a_stage_without_a_job_is_refused(self, run: InstalledRun, cluster: Cluster) -> None:
        with pytest.raises(UpstreamMissing, match=f"eagle3 status {RUN}"):
            operate.logs(run, cluster, "vocab", print)


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class TestRunner:
    def test_a_failure_does_not_give_up_what_is_at_work(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf, said: list[str]
    ) -> None:
        """vocab fails in minutes while extract runs for days: the run ends after extract."""
        commit(run.store, "verifier")
        commit(run.store, "prepare", verifier=VERIFIER)
        runner = Runner(run, cluster, said.append)
        runner.step()
        broken = pod("v", "Failed", terminated={"exitCode": 3})
        put(shelf, "vocab", broken, **failed())
        for _ in range(2):
            assert not runner.step()
            assert runner.going
        assert isinstance(runner.failure, StageFailed)
        assert sum("exit code 3" in line for line in said) == 1, "told once"
        ordering = threading.Thread(target=ended_by, args=(run, cluster, said))
        ordering.start()
        time.sleep(0.3)
        assert ordering.is_alive(), "extract is at work"
        commit(run.store, "extract", **HIDDEN_STATES)
        ordering.join(20)
        assert said[-1].startswith("StageFailed: vocab: job")

    def test_a_stage_that_is_tried_again_meanwhile_is_no_failure_any_more(
        self, run: InstalledRun, cluster: Cluster, shelf: Shelf, said: list[str]
    ) -> None:
        commit(run.store, "verifier")
        commit(run.store, "prepare", verifier=VERIFIER)
        runner = Runner(run, cluster, said.append)
        runner.step()
        put(shelf, "vocab", **failed())
        runner.step()
        assert runner.failure
        operate.retry(run, cluster, "vocab")
        runner.step()
        assert runner.failure is None
        assert f"{RUN}-vocab" in shelf.jobs

    def test_a_store_that_is_away_in_the_middle_of_a_look_ends_nothing(
        self,
        run: InstalledRun,
        cluster: Cluster,
        shelf: Shelf,
        said: list[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The look that found the failure did not get as far as what is at work."""
        runner = Runner(run, cluster, said.append)
        put(shelf, "prepare", **failed())
        put(shelf, "extract", pod("e"))
        looked = []

        def away(self: Runner, stage: Any, job: Object) -> None:
            looked.append(stage.name)
            if len(looked) == 1:
                raise ServiceUnavailable("store", wanted="it", found="nothing", remedy="wait")
            del shelf.jobs[f"{RUN}-extract"]

        monkeypatch.setattr(Runner, "_show_progress", away)
        del runner
        ended_by(run, cluster, said)
        assert looked == ["extract", "extract"], "asked again before the run was given up"


def ended_by(run: InstalledRun, cluster: Cluster, said: list[str]) -> None:
    try:
        order(run, cluster, said.append, 0.02)
    except (StageFailed, UpstreamMissing) as error:
        said.append(f"{type(error).__name__}: {error}")
