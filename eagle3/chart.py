"""What the Helm chart may be told, as structs, and the schema that Helm checks it against.

`charts/eagle3/values.schema.json` and `charts/eagle3/files/stages.json` are written from here, so
that the chart, the run's configuration and the table of stages cannot drift apart. Names are
camel case, as Helm's are. Whatever a person may leave out without a default has no value at all,
since Helm takes a null for "delete this key".

`make manifests` writes them, and the plain manifests of k8s/ with them.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from eagle3.config import Natural, RunConfig
from eagle3.stages import STAGE_NAMES, STAGES

RUN_ID_LENGTH = 20
"""Longest `run.id`: a Job's name, a pod's index and its suffix still fit a host name."""

PLAIN_RUN = "first"
"""The run that the plain manifests name."""

PLAIN = {
    "k8s/base": "values-small-gpu.yaml",
    "k8s/overlays/cpu": "values-cpu.yaml",
    "k8s/overlays/kimi": "values-kimi-k2.5-8xblackwell.yaml",
}
"""Folder of plain manifests -> the profile that it is rendered from."""

_SECONDS = msgspec.Meta(ge=1, description="seconds")
Seconds = Annotated[int, _SECONDS]
Workers = Annotated[int, msgspec.Meta(ge=1, le=1000)]
# Quantities are text: 4 and "4" are the same to Kubernetes, but Helm would turn 1Gi's neighbours,
# such as 1e3, into floating point. Sizes of memory are added up, hence only two units.
Memory = Annotated[str, msgspec.Meta(pattern=r"^[1-9][0-9]*(Mi|Gi)$")]
Disk = Annotated[str, msgspec.Meta(pattern=r"^[1-9][0-9]*(Mi|Gi|Ti)$")]
Cpu = Annotated[str, msgspec.Meta(pattern=r"^([1-9][0-9]*m?|[0-9]+\.[0-9]*[1-9])$")]
Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]
RunId = Annotated[
    str, msgspec.Meta(pattern=rf"^[a-z0-9]([-a-z0-9]{{0,{RUN_ID_LENGTH - 2}}}[a-z0-9])?$")
]
# No credentials in a URL: it stands in Jobs, manifests and logs.
Url = Annotated[str, msgspec.Meta(pattern=r"^[a-z][a-z0-9+.-]*://[^\s@]+$")]
AbsolutePath = Annotated[str, msgspec.Meta(pattern=r"^/[^\s:]+$")]
VariableName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Environment = dict[VariableName, str]
Labels = dict[Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][-A-Za-z0-9_./]*$")], str]
StageName = Literal["prepare", "regenerate", "extract", "vocab", "train", "export", "evaluate"]


class _Values(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"
):
    """A mapping of values: an unknown key is refused."""


class RunValues(_Values, frozen=True, kw_only=True):
    """Which run this is."""

    id: RunId | UnsetType = UNSET


class ImageValues(_Values, frozen=True, kw_only=True):
    """An image; a digest stands over a tag, and the chart's own version is the default tag."""

    repository: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9._/:-]*$")]
    tag: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][\w.-]{0,127}$")] | UnsetType = UNSET
    digest: Annotated[str, msgspec.Meta(pattern=r"^sha256:[0-9a-f]{64}$")] | UnsetType = UNSET


class ImagesValues(_Values, frozen=True, kw_only=True):
    """One image for each set of dependencies; `gate` is also the runner's."""

    gate: ImageValues
    base: ImageValues
    extract: ImageValues
    train: ImageValues


class NamedValues(_Values, frozen=True, kw_only=True):
    """A reference to another object of the namespace."""

    name: Name


class ServiceAccountValues(_Values, frozen=True, kw_only=True):
    """What the release's own accounts carry, such as a cloud role; or those to use instead."""

    annotations: dict[str, str]
    stage_name: Name | UnsetType = UNSET
    runner_name: Name | UnsetType = UNSET


class CredentialsValues(_Values, frozen=True, kw_only=True):
    """The Secret whose keys become environment variables of every container."""

    secret_name: Name | UnsetType = UNSET


class VariableValues(_Values, frozen=True, kw_only=True):
    """An environment variable as Kubernetes has it."""

    name: VariableName
    value: str | UnsetType = UNSET
    value_from: dict[str, Any] | UnsetType = UNSET


class VolumeValues(_Values, frozen=True, kw_only=True):
    """A volume of a kind that Pod Security *restricted* admits: hostPath is none."""

    name: Name
    config_map: dict[str, Any] | UnsetType = UNSET
    secret: dict[str, Any] | UnsetType = UNSET
    projected: dict[str, Any] | UnsetType = UNSET
    csi: dict[str, Any] | UnsetType = UNSET
    ephemeral: dict[str, Any] | UnsetType = UNSET
    empty_dir: dict[str, Any] | UnsetType = UNSET
    persistent_volume_claim: dict[str, Any] | UnsetType = UNSET


class VolumeMountValues(_Values, frozen=True, kw_only=True):
    """Where a volume of `extraVolumes` is mounted."""

    name: Name
    mount_path: AbsolutePath
    sub_path: str | UnsetType = UNSET
    read_only: bool | UnsetType = UNSET


class WeightsValues(_Values, frozen=True, kw_only=True):
    """A claim that holds the verifier, for the stages that read it."""

    claim: Name | UnsetType = UNSET
    mount_path: AbsolutePath


class GpuValues(_Values, frozen=True, kw_only=True):
    """How this cluster names its GPUs."""

    resource: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")]
    product_label: str
    product: Annotated[str, msgspec.Meta(min_length=1)] | UnsetType = UNSET


class TolerationValues(_Values, frozen=True, kw_only=True):
    """A toleration as Kubernetes has it."""

    key: str | UnsetType = UNSET
    operator: Literal["Exists", "Equal", "Lt", "Gt"] | UnsetType = UNSET
    value: str | UnsetType = UNSET
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | UnsetType = UNSET
    toleration_seconds: int | UnsetType = UNSET


class PodSecurityValues(_Values, frozen=True, kw_only=True):
    """Whom a pod runs as; nobody is root."""

    run_as_user: Annotated[int, msgspec.Meta(ge=1)] | UnsetType = UNSET
    run_as_group: Natural | UnsetType = UNSET
    fs_group: Natural | UnsetType = UNSET
    supplemental_groups: list[Natural] | UnsetType = UNSET


class StageValues(_Values, frozen=True, kw_only=True):
    """The size and the limits of a stage's Job."""

    gpus: Natural
    cpu: Cpu
    memory: Memory
    shm: Memory | UnsetType = UNSET
    scratch: Disk
    deadline_seconds: Seconds
    grace_seconds: Seconds
    backoff_limit: Natural
    node_selector: Labels | UnsetType = UNSET
    env: Environment | UnsetType = UNSET


class IndexedStageValues(StageValues, frozen=True, kw_only=True):
    """The same for a stage whose work several pods share."""

    workers: Workers


class StagesValues(_Values, frozen=True, kw_only=True):
    """The table of Jobs, one row for each stage."""

    prepare: StageValues
    regenerate: IndexedStageValues
    extract: IndexedStageValues
    vocab: StageValues
    train: StageValues
    export: StageValues
    evaluate: StageValues


class RunnerValues(_Values, frozen=True, kw_only=True):
    """The Job that starts the stages one after another."""

    enabled: bool
    ttl_seconds: Natural
    cpu: Cpu
    memory: Memory
    poll_seconds: Seconds
    node_selector: Labels


class PortValues(_Values, frozen=True, kw_only=True):
    """A port of a network policy as Kubernetes has it."""

    protocol: Literal["TCP", "UDP", "SCTP"] | UnsetType = UNSET
    port: int | str | UnsetType = UNSET
    end_port: int | UnsetType = UNSET


class EgressValues(_Values, frozen=True, kw_only=True):
    """An egress rule of a network policy as Kubernetes has it."""

    to: list[dict[str, Any]] | UnsetType = UNSET
    ports: list[PortValues] | UnsetType = UNSET


class NetworkPolicyValues(_Values, frozen=True, kw_only=True):
    """What the pods may reach besides DNS and public HTTPS."""

    enabled: bool
    public_https: bool
    extra_egress: list[EgressValues]


class ChartValues(_Values, frozen=True, kw_only=True):
    """Everything that a release may be told."""

    store: Url
    config: RunConfig
    run: RunValues
    images: ImagesValues
    image_pull_policy: Literal["IfNotPresent", "Always", "Never"]
    image_pull_secrets: list[NamedValues]
    service_account: ServiceAccountValues
    credentials: CredentialsValues
    env: Environment
    extra_env: list[VariableValues]
    extra_volumes: list[VolumeValues]
    extra_volume_mounts: list[VolumeMountValues]
    weights: WeightsValues
    gpu: GpuValues
    tolerations: list[TolerationValues]
    priority_class_name: Name | UnsetType = UNSET
    runtime_class_name: Name | UnsetType = UNSET
    pod_labels: Labels
    pod_annotations: Labels
    pod_security_context: PodSecurityValues
    queue_name: Name | UnsetType = UNSET
    stages: StagesValues
    ttl_seconds: Natural | UnsetType = UNSET
    runner: RunnerValues
    network_policy: NetworkPolicyValues
    only: list[StageName] | UnsetType = UNSET
    # What Helm hands to every chart of a chart; nothing here reads it.
    global_: dict[str, Any] | UnsetType = msgspec.field(name="global", default=UNSET)


def values_schema() -> dict[str, Any]:
    """The JSON schema of the chart's values; the run's store is a value of its own."""
    schema: dict[str, Any] = msgspec.json.schema(ChartValues)
    del schema["$defs"]["RunConfig"]["properties"]["store"]
    return {"$schema": "http://json-schema.org/draft-07/schema#", **schema}


def stage_facts() -> list[dict[str, Any]]:
    """What the chart's template must know of each stage, in order.

    The verifier's own files are read by whoever starts an engine, and by prepare, which is the
    stage that reads nothing of the run.
    """
    return [
        {
            "name": stage.name,
            "image": stage.image,
            "indexed": stage.indexed,
            "optional": stage.optional,
            "readsWeights": stage.image == "extract" or not stage.reads,
        }
        for stage in STAGES
    ]


def write_generated(chart: Path) -> None:
    """Write both generated files of the chart."""
    for path, content in {
        chart / "values.schema.json": values_schema(),
        chart / "files" / "stages.json": stage_facts(),
    }.items():
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def plain_manifests(helm: str, chart: Path, profile: str) -> dict[str, str]:
    """File name -> manifests of a profile, for kubectl: what all stages share, then each stage.

    Raises CalledProcessError where Helm refuses.
    """
    only = ",".join(STAGE_NAMES)
    command = [helm, "template", "eagle3", str(chart), "--values", str(chart / profile)]
    command += ["--set", f"run.id={PLAIN_RUN},only={{{only}}}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    files: dict[str, list[str]] = {}
    for document in re.split(r"^---\n", done.stdout, flags=re.MULTILINE):
        body = re.sub(r"^# Source: .*\n", "", document).strip()
        if body:
            # The first label of that name is the object's own.
            stage = re.search(r"^    eagle3/stage: (\w+)$", body, flags=re.MULTILINE)
            assert stage, "every object of the plain manifests says which stage it belongs to"
            files.setdefault(plain_file(stage[1]), []).append(body)
    return {name: "---\n" + "\n---\n".join(files[name]) + "\n" for name in sorted(files)}


def plain_file(stage: str) -> str:
    """The file of a stage, or of what all share: they sort in the order of the run."""
    number = 0 if stage == "shared" else 10 * (STAGE_NAMES.index(stage) + 1)
    return f"{number:02}-{stage}.yaml"


def main() -> None:
    """Write everything that is generated; k8s/ only where `--helm` names a Helm."""
    parser = argparse.ArgumentParser(prog="python -m eagle3.chart", description=__doc__)
    parser.add_argument("--helm", help="path of a Helm, to render k8s/ with")
    found = parser.parse_args()
    root = Path(__file__).resolve().parents[1]
    chart = root / "charts" / "eagle3"
    write_generated(chart)
    for folder, profile in PLAIN.items() if found.helm else ():
        for name, text in plain_manifests(found.helm, chart, profile).items():
            (root / folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
