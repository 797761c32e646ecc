"""A release of the chart on the test cluster: real images, a tiny verifier, chats in a bucket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from eagle3.demo_inputs import CONVERSATIONS_NAME, VERIFIER_NAME, write_inputs
from eagle3.store import Store, open_store
from tests.cluster import waiting
from tests.cluster.cluster import Cluster, CommandFailed, Namespace
from tests.helm import CHART, CPU
from tests.s3_server import BUCKET, S3Server
from tests.tiny_run import write_conversations
from tests.tiny_verifiers import make_qwen3

ROOT = CHART.parents[1]
SECRET = "eagle3-s3"
IMAGES = ("gate", "base", "extract", "train")
# A stage of a tiny run: what its processes take, and what an engine keeps for its cache.
_MEMORY = {"prepare": "2Gi", "vocab": "2Gi"}
_ENGINE = {"dtype": "float32", "max_num_seqs": 8}


@contextmanager
def environment(s3: S3Server) -> Iterator[None]:
    """The variables by which this process finds the cluster's store, for as long as needed."""
    before = {name: os.environ.get(name) for name in s3.environment}
    os.environ.update(s3.environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def upload_inputs(folder: Path) -> Mapping[str, Any]:
    """A tiny verifier and thirty chats, in the bucket; returns the run's configuration."""
    verifier = make_qwen3(folder / "verifier")
    data = write_conversations(folder / "chats.jsonl", 30)
    inputs = open_store(f"s3://{BUCKET}/inputs")
    for path in sorted(verifier.iterdir()):
        inputs.put_file(path, f"verifier/{path.name}")
    inputs.put_file(data, "chats.jsonl")
    return {
        "verifier": {"source": f"{inputs.url}/verifier", "serving_name": "tests/tiny"},
        "prepare": {
            "data": [f"{inputs.url}/chats.jsonl"],
            "max_seq_len": 256,
            "max_conversations": None,
            "heldout_share": 0.2,
            "max_heldout": 64,
            "shard_rows": 16,
        },
        "regenerate": {
            "max_new_tokens": 16,
            "max_turns": 2,
            "unit_rows": 8,
            "engine": _ENGINE,
        },
        "extract": {"unit_rows": 4, "engine": _ENGINE},
        "vocab": {"draft_vocab_size": 128},
        "train": {
            "total_seq_len": 512,
            "epochs": 1,
            "max_steps": 2,
            "learning_rate": 1e-3,
            "validation_share": 0.1,
        },
        "evaluate": {
            "num_prompts": 4,
            "max_new_tokens": 16,
            "concurrency": 4,
            "speed_prompts": 1,
            "lossless_prompts": 4,
            "engine": _ENGINE,
        },
    }


def upload_demo(folder: Path) -> Mapping[str, Any]:
    """The demonstration's verifier and chats, in the bucket; returns what names them."""
    write_inputs(folder)
    bucket = open_store(f"s3://{BUCKET}/smollm")
    for path in sorted((folder / VERIFIER_NAME).iterdir()):
        bucket.put_file(path, f"verifier/{path.name}")
    bucket.put_file(folder / CONVERSATIONS_NAME, "chats.jsonl")
    return {
        "verifier": {"source": f"{bucket.url}/verifier"},
        "prepare": {"data": [f"{bucket.url}/chats.jsonl"]},
    }


def values_of(s3: S3Server, config: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Values over those of the profile for CPUs."""
    engines = ("regenerate", "extract", "train", "export", "evaluate")
    values: dict[str, Any] = {
        "store": f"s3://{BUCKET}/runs",
        "images": {
            name: {"repository": f"localhost/eagle3-{name}", "tag": "test"} for name in IMAGES
        },
        "imagePullPolicy": "Never",
        "config": dict(config),
        "runner": {"pollSeconds": 2},
        "stages": {
            **{stage: {"cpu": "50m", "memory": _MEMORY[stage]} for stage in _MEMORY},
            # One thread: the nodes share their processors with each other and with the tests.
            **{stage: {"cpu": "900m", "memory": "6Gi"} for stage in engines},
        },
    }
    return merged(values, more)


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Two trees of values, the second on top, as Helm merges them."""
    found = dict(under)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = merged(found[key], value) if both else value
    return found


@dataclass(frozen=True, kw_only=True)
class Release:
    """A release in a namespace, and the values that it was installed with."""

    namespace: Namespace
    name: str
    folder: Path
    values: Mapping[str, Any] = field(default_factory=dict)

    def helm(self, verb: str, *arguments: str, major: int = 4, **more: Any) -> str:
        """`helm install` or `upgrade` with the profile for CPUs and our values."""
        path = self.folder / "values.yaml"
        path.write_text(yaml.safe_dump(merged(self.values, more)))
        command = [verb, self.name, str(CHART), f"--values={CHART / CPU}", f"--values={path}"]
        return self.namespace.helm(*command, *arguments, major=major)

    def run_name(self) -> str:
        """The name of the newest run: that of its ConfigMap."""
        selector = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component=run"
        found = self.namespace.get("configmaps", f"--selector={selector}")
        return max(
            (one["metadata"] for one in found), key=lambda metadata: metadata["creationTimestamp"]
        )["name"]

    def store(self, run: str) -> Store:
        """The store of a run."""
        return open_store(f"{self.values['store']}/{run.removeprefix(f'{self.name}-')}")

    def eagle3(self, *arguments: str) -> str:
        """What `eagle3 ... --namespace` prints, as from a laptop with this kubeconfig."""
        done = subprocess.run(
            [sys.executable, "-m", "jobs.cli", *arguments, f"--namespace={self.namespace.name}"],
            cwd=ROOT,
            env={**os.environ, "KUBECONFIG": str(self.namespace.cluster.kubeconfig)},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def jobs(self) -> dict[str, Any]:
        """Stage -> Job of every run, the runner's too."""
        found = self.namespace.get("jobs")
        return {one["metadata"]["labels"]["eagle3/stage"]: one for one in found}

    def wait(self, stage: str, *, seconds: float = 900) -> None:
        """Wait until a stage's Job has ended; an assertion where it failed."""

        def ended() -> bool:
            assert self.ended(stage) != "Failed", self.story_of(stage)
            return self.ended(stage) == "Complete"

        waiting.until(ended, f"{stage} completes", seconds=seconds)

    def ended(self, stage: str) -> str:
        """Complete or Failed, once a stage's Job is; else an empty text."""
        job = self.jobs().get(stage)
        for condition in (job or {}).get("status", {}).get("conditions", []):
            if condition["status"] == "True" and condition["type"] in ("Complete", "Failed"):
                return str(condition["type"])
        return ""

    def story_of(self, stage: str) -> str:
        """What is known of a stage that went wrong, for a failing test."""
        told = []
        for command in (
            ("get", "jobs,pods", "-o=wide"),
            ("logs", f"--selector=eagle3/stage={stage}", "--all-containers", "--tail=60"),
            ("get", "events", "--field-selector=type=Warning"),
        ):
            try:
                told.append(self.namespace.kubectl(*command))
            except CommandFailed as error:
                told.append(str(error))
        return "\n".join(told)


def give_credentials(namespace: Namespace, s3: S3Server) -> None:
    """The Secret that the chart is told of."""
    literals = [f"--from-literal={name}={value}" for name, value in s3.environment.items()]
    namespace.kubectl("create", "secret", "generic", SECRET, *literals)


def load_images(cluster: Cluster, images: Mapping[str, Any]) -> None:
    """Put every image onto every node, unless it is there already; earlier ones go."""
    for image in images.values():
        cluster.import_image(image.archive, image.reference)
    for node in cluster.nodes:
        node.forget_images({image.reference for image in images.values()})


def pods_of(namespace: Namespace) -> list[Any]:
    """Every pod of the namespace."""
    found: list[Any] = namespace.get("pods")
    return found


def last_words(pod: Mapping[str, Any], container: str) -> dict[str, Any]:
    """The JSON that a container left as its termination message."""
    statuses = pod["status"]
    for status in [*statuses.get("initContainerStatuses", []), *statuses["containerStatuses"]]:
        if status["name"] == container:
            ended = status["state"].get("terminated", {})
            return dict(json.loads(ended.get("message") or "{}"))
    return {}
