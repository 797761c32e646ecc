"""A run as the chart installed it: its configuration, its store, and a body for each stage's Job.

The runner finds it in mounted files, a command on a laptop in the run's ConfigMap.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eagle3 import strict_yaml
from eagle3.cluster import RELEASE_LABEL, RUN_LABEL, Cluster, Object
from eagle3.config import RunConfig, parse_config
from eagle3.errors import ConfigError, UpstreamMissing
from eagle3.stages import STAGES, Stage
from eagle3.store import Store, open_store

STORE_VARIABLE = "EAGLE3_STORE"
RUN_FILE, JOBS_FILE = "run.yaml", "jobs.json"
_INSTALL = "install the chart"


@dataclass(frozen=True, kw_only=True)
class InstalledRun:
    """What a run in a cluster consists of.

    Attributes:
        name: of its ConfigMap; its Jobs' names begin with it.
        release: the Helm release, and the ConfigMap that owns what belongs to it.
        bodies: stage -> the Job to create for it, in the stages' order.
    """

    name: str
    release: str
    config: RunConfig
    store: Store
    bodies: Mapping[str, Object]

    @property
    def stages(self) -> list[Stage]:
        """The stages that this run has, in order."""
        return [stage for stage in STAGES if stage.name in self.bodies]

    def job_name(self, stage: str) -> str:
        """The name of a stage's Job. Raises ConfigError for a stage that the run has not."""
        if stage not in self.bodies:
            raise ConfigError(
                "stage",
                wanted=f"one of this run: {', '.join(self.bodies)}",
                found=stage,
                remedy="name one of them",
            )
        return str(self.bodies[stage]["metadata"]["name"])


def read_files(config: Path, jobs: Path) -> InstalledRun:
    """The run of mounted files. Raises ConfigError, and as `eagle3.store.open_store`."""
    try:
        return _parsed(config.read_text(), jobs.read_text(), where=str(jobs))
    except OSError as error:
        raise ConfigError(
            error.filename or str(jobs),
            wanted="the files of the run's ConfigMap",
            found=error.strerror or type(error).__name__,
            remedy=_INSTALL,
        ) from error


def read_cluster(cluster: Cluster, name: str) -> InstalledRun:
    """The run of a ConfigMap. Raises UpstreamMissing, ConfigError, and as `Cluster`."""
    found = cluster.config_map(name)
    if found is None:
        raise UpstreamMissing(
            f"configmap {name}",
            wanted=f"the one of a run, in the namespace {cluster.namespace}",
            found="none",
            remedy="see `kubectl get configmaps -l app.kubernetes.io/name=eagle3`",
        )
    data = found.get("data", {})
    if not {RUN_FILE, JOBS_FILE} <= data.keys():
        raise ConfigError(
            f"configmap {name}",
            wanted=f"{RUN_FILE} and {JOBS_FILE}",
            found=", ".join(data) or "nothing",
            remedy="name the ConfigMap of a run, which has the run's id in its name",
        )
    return _parsed(data[RUN_FILE], data[JOBS_FILE], where=f"configmap {name}")


def _parsed(config: str, jobs: str, where: str) -> InstalledRun:
    try:
        resolved = parse_config(strict_yaml.loads(config))
        bodies: dict[str, Any] = json.loads(jobs)
        first = next(iter(bodies.values()))
        labels = first["metadata"]["labels"]
        name = first["metadata"]["name"].removesuffix(f"-{next(iter(bodies))}")
        url = _variable(first, STORE_VARIABLE)
        release = labels[RELEASE_LABEL]
        assert labels[RUN_LABEL], "a run has an id"
    except (yaml.YAMLError, ValueError, KeyError, StopIteration, AssertionError) as error:
        raise ConfigError(
            where,
            wanted="what the chart writes",
            found=strict_yaml.problem(error) if isinstance(error, yaml.YAMLError) else repr(error),
            remedy=_INSTALL,
        ) from error
    known = {stage.name for stage in STAGES}
    if strange := sorted(bodies.keys() - known):
        raise ConfigError(
            where,
            wanted=f"Jobs of {', '.join(sorted(known))}",
            found=strange[0],
            remedy="install the chart of this version",
        )
    ordered = {stage.name: bodies[stage.name] for stage in STAGES if stage.name in bodies}
    return InstalledRun(
        name=name, release=release, config=resolved, store=open_store(url), bodies=ordered
    )


def _variable(job: Object, name: str) -> str:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return next(str(entry["value"]) for entry in container["env"] if entry["name"] == name)
