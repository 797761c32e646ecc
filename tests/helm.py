"""charts/eagle3 as Helm 3 and Helm 4 render it, for the tests of the chart."""

import functools
import json
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import binaries, machine, testbed
from tests.cluster.binaries import Clients, NotBuilt
from tests.conftest import ROOT

CHART = ROOT / "charts" / "eagle3"
CPU, SMALL, KIMI = "values-cpu.yaml", "values-small-gpu.yaml", "values-kimi-k2.5-8xblackwell.yaml"
PROFILES = (CPU, SMALL, KIMI)

Object = dict[str, Any]

# Every value that may be set, set: what it becomes is looked for in the Jobs.
EVERYTHING: dict[str, Any] = {
    "images": {"train": {"digest": f"sha256:{'0' * 64}"}},
    "imagePullPolicy": "Always",
    "imagePullSecrets": [{"name": "registry"}],
    "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/drafts"}},
    "env": {"NCCL_DEBUG": "INFO", "HF_HOME": "/cache/huggingface"},
    "extraEnv": [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "AWS_REGION", "value": "eu-central-1"},
    ],
    "extraVolumes": [{"name": "cache", "persistentVolumeClaim": {"claimName": "cache"}}],
    "extraVolumeMounts": [{"name": "cache", "mountPath": "/cache", "readOnly": False}],
    "weights": {"claim": "verifier"},
    "config": {"verifier": {"source": "/models/kimi-k2.5"}},
    "tolerations": [{"key": "drafts", "operator": "Exists", "effect": "NoSchedule"}],
    "priorityClassName": "batch",
    "runtimeClassName": "nvidia",
    "podLabels": {"azure.workload.identity/use": "true"},
    "podAnnotations": {"karpenter.sh/do-not-disrupt": "true"},
    "podSecurityContext": {
        "runAsUser": 1000680000,
        "runAsGroup": 0,
        "fsGroup": None,
        "supplementalGroups": [2000],
    },
    "queueName": "drafts",
    "ttlSeconds": 3600,
    "stages": {
        "extract": {
            "workers": 2,
            "nodeSelector": {"zone": "a"},
            "env": {"NCCL_DEBUG": "WARN", "VLLM_USE_V2_MODEL_RUNNER": "0"},
        }
    },
    "runner": {"nodeSelector": {"kubernetes.io/arch": "amd64"}},
    "networkPolicy": {"extraEgress": [{"ports": [{"protocol": "TCP", "port": 9000}]}]},
}


class Refused(Exception):
    """Helm refused the values; the message is what it says."""


@dataclass(frozen=True)
class Release:
    """The objects of a rendered release."""

    objects: tuple[Object, ...]
    text: str

    def of_kind(self, kind: str) -> list[Object]:
        """The objects of a kind."""
        return [one for one in self.objects if one["kind"] == kind]

    def named(self, kind: str, name: str) -> Object:
        """The one object of a kind and name."""
        (found,) = (one for one in self.of_kind(kind) if one["metadata"]["name"] == name)
        return found

    @property
    def run(self) -> Object:
        """The ConfigMap of the run."""
        (found,) = (one for one in self.of_kind("ConfigMap") if "run.yaml" in one["data"])
        return found

    @property
    def jobs(self) -> dict[str, Object]:
        """Stage -> Job, as the runner creates them."""
        found: dict[str, Object] = json.loads(self.run["data"]["jobs.json"])
        return found

    def pods(self) -> Iterator[tuple[str, Object]]:
        """(whose, pod spec) of the runner, of the test and of every stage."""
        for stage, job in self.jobs.items():
            yield stage, job["spec"]["template"]["spec"]
        for job in self.of_kind("Job"):
            yield job["metadata"]["name"], job["spec"]["template"]["spec"]
        for pod in self.of_kind("Pod"):
            yield pod["metadata"]["name"], pod["spec"]


@dataclass(frozen=True)
class Helm:
    """One Helm."""

    path: str

    def __call__(self, *arguments: str) -> str:
        """What it prints. Raises Refused."""
        done = subprocess.run([self.path, *arguments], capture_output=True, text=True)
        if done.returncode:
            raise Refused(done.stderr or done.stdout)
        return done.stdout

    @functools.cache  # noqa: B019 - one for each version, as long as the tests run
    def release(self, profile: str, *sets: str, name: str = "e3") -> Release:
        """A profile, rendered with --set arguments. Raises Refused."""
        values = [f"--set={one}" for one in sets]
        text = self("template", name, str(CHART), f"--values={CHART / profile}", *values)
        return Release(tuple(one for one in yaml.safe_load_all(text) if one), text)

    def release_of(self, profile: str, values: Object, *, name: str = "e3") -> Release:
        """A profile with further values, rendered. Raises Refused."""
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            # As JSON: PyYAML does not quote a text such as 1e5, a number to Helm.
            json.dump(values, file)
            file.flush()
            text = self(
                "template",
                name,
                str(CHART),
                f"--values={CHART / profile}",
                f"--values={file.name}",
            )
        return Release(tuple(one for one in yaml.safe_load_all(text) if one), text)


def client(of: str, program: str) -> str:
    """The path of helm or kubectl, brought into the cache where it is not there yet.

    Skips the test, with the reason, where it cannot be brought; fails where that is required.
    """
    clients = next(one for one in binaries.PROGRAMS if one.name == of)
    assert isinstance(clients, Clients)
    if not clients.folder.exists():
        with testbed.lock():
            try:
                if not clients.folder.exists():
                    clients.build()
            except (NotBuilt, OSError) as error:
                if machine.insisted() in ("required", "expected"):
                    raise
                pytest.skip(f"Helm and kubectl are not here: {error}")
    return str(Path(clients.folder) / program)


if __name__ == "__main__":
    print(client("clients", "helm"))
