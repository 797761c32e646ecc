"""What the chart refuses, in both Helms, before anything is created."""

import shutil

import pytest
import yaml

from eagle3 import chart
from tests.helm import CHART, CPU, EVERYTHING, KIMI, Helm, Refused, Release, client

# Values over those of a profile -> the value that the refusal must name.
BY_SCHEMA = {
    "a text that reads false is no truth value": ({"runner": {"enabled": "false"}}, "enabled"),
    "nor in the run's configuration": ({"config": {"regenerate": {"enabled": "no"}}}, "enabled"),
    "a number is no truth value": ({"networkPolicy": {"enabled": 0}}, "enabled"),
    "an unknown value": ({"gpus": 8}, "gpus"),
    "an unknown stage": ({"stages": {"distill": {}}}, "distill"),
    "an unknown key of a stage": ({"stages": {"train": {"gpu": 1}}}, "gpu"),
    "an unknown key of the configuration": ({"config": {"train": {"epoch": 3}}}, "epoch"),
    "the store belongs to the values": ({"config": {"store": "s3://a/b"}}, "store"),
    "workers of a stage that has one": ({"stages": {"train": {"workers": 2}}}, "workers"),
    "no workers": ({"stages": {"extract": {"workers": 0}}}, "workers"),
    "processors without quotes": ({"stages": {"train": {"cpu": 4}}}, "cpu"),
    "memory without a unit": ({"stages": {"train": {"memory": 17179869184}}}, "memory"),
    "memory in a unit that is not added up": ({"stages": {"train": {"memory": "1T"}}}, "memory"),
    "shared memory as a share": ({"stages": {"train": {"shm": "50%"}}}, "shm"),
    "a row that was deleted": ({"stages": {"vocab": None}}, "vocab"),
    "an id that is a number": ({"run": {"id": 20261130}}, "id"),
    "an id in capitals": ({"run": {"id": "First"}}, "id"),
    "an id of 21 characters": ({"run": {"id": "a" * 21}}, "id"),
    "a tag that is a number": ({"images": {"gate": {"tag": 0.1}}}, "tag"),
    "half a digest": ({"images": {"gate": {"digest": "sha256:12ab"}}}, "digest"),
    "an image by a bare name": ({"images": {"gate": "eagle3-gate:1"}}, "gate"),
    "a store that is a path": ({"store": "/mnt/runs"}, "store"),
    "a store with its credentials": ({"store": "s3://key:secret@host/runs"}, "store"),
    "an environment that is a list": ({"env": [{"name": "A", "value": "b"}]}, "env"),
    "an environment of numbers": ({"env": {"NCCL_NTHREADS": 4}}, "NCCL_NTHREADS"),
    "a folder of the node": (
        {"extraVolumes": [{"name": "models", "hostPath": {"path": "/models"}}]},
        "hostPath",
    ),
    "a stage that is none": ({"run": {"id": "a"}, "only": ["distill"]}, "only"),
}

# The same for what a template says, with the whole sentence's beginning.
BY_SENTENCE = {
    "a credential for everyone": (
        {"env": {"HF_TOKEN": "hf_123"}},
        "env.HF_TOKEN: wanted no credential among the values",
    ),
    "a credential of one stage": (
        {"stages": {"train": {"env": {"AWS_SECRET_ACCESS_KEY": "abc"}}}},
        "stages.train.env.AWS_SECRET_ACCESS_KEY: wanted no credential",
    ),
    "a credential in the list": (
        {"extraEnv": [{"name": "DB_PASSWORD", "value": "abc"}]},
        "extraEnv.DB_PASSWORD: wanted no credential",
    ),
    "a URL with a password": (
        {"config": {"prepare": {"data": ["https://me:word@host/chats.jsonl"]}}},
        "config: wanted URLs without a password or a signature",
    ),
    "a proxy's password in env": (
        {"env": {"HTTPS_PROXY": "http://me:hunter2@proxy:3128"}},
        "env.HTTPS_PROXY: wanted no credential among the values",
    ),
    "another cloud's key": (
        {"env": {"AZURE_STORAGE_KEY": "hunter2"}},
        "env.AZURE_STORAGE_KEY: wanted no credential among the values",
    ),
    "a secret in small letters": (
        {"env": {"aws_secret_access_key": "hunter2"}},
        "env.aws_secret_access_key: wanted no credential among the values",
    ),
    "a signed URL": (
        {
            "config": {
                "prepare": {"data": ["https://b.s3.example/a?X-Amz-Date=1&X-Amz-Signature=2"]}
            }
        },
        "config: wanted URLs without a password or a signature",
    ),
    "a volume of the chart's own": (
        {"extraVolumes": [{"name": "scratch", "emptyDir": {}}]},
        'extraVolumes: wanted names that the chart does not use itself, found "scratch"',
    ),
    "a label of the chart's own": (
        {"podLabels": {"eagle3/run": "other"}},
        'podLabels: wanted labels that the chart does not set itself, found "eagle3/run"',
    ),
    "GPUs without shared memory": (
        {"stages": {"extract": {"shm": None}}},
        "stages.extract.shm: wanted a size beside gpus, found none",
    ),
    "a claim beside a verifier in a bucket": (
        {"weights": {"claim": "kimi"}},
        "config.verifier.source: wanted a folder at or below /models beside weights.claim, found",
    ),
    "a verifier beside the claim": (
        {"weights": {"claim": "kimi"}, "config": {"verifier": {"source": "/models-old/kimi"}}},
        "config.verifier.source: wanted a folder at or below /models beside weights.claim",
    ),
    "annotations for accounts of others": (
        {"serviceAccount": {"annotations": {"a": "b"}, "stageName": "a", "runnerName": "b"}},
        "serviceAccount.annotations: wanted none beside stageName and runnerName",
    ),
    "the pod's limit": (
        {"env": {"EAGLE3_SCRATCH_BYTES": "1"}},
        "env.EAGLE3_SCRATCH_BYTES: wanted no variable that the chart sets itself",
    ),
    "a variable of the chart's own": (
        {"env": {"EAGLE3_STORE": "s3://other"}},
        "env.EAGLE3_STORE: wanted no variable that the chart sets itself",
    ),
    "plain manifests without a name": ({"only": ["train"]}, "run.id: wanted one together"),
    "a stage that the run leaves out": (
        {
            "run": {"id": "a"},
            "only": ["regenerate"],
            "config": {"regenerate": {"enabled": False}},
        },
        'only: wanted stages of this run, found "regenerate"',
    ),
    "an engine wider than its pod": (
        {"stages": {"extract": {"gpus": 4}}},
        "config.extract.engine.tensor_parallel_size: wanted at most stages.extract.gpus, 4",
    ),
}


@pytest.fixture(scope="module", params=["clients-helm3", "clients"])
def helm(request):
    return Helm(client(request.param, "helm"))


@pytest.mark.parametrize("fault", BY_SCHEMA)
@pytest.mark.fault("B90")
def test_the_schema_refuses(helm, fault):
    values, named = BY_SCHEMA[fault]
    with pytest.raises(Refused, match="don't meet the specifications of the schema") as refused:
        helm.release_of(KIMI, values)
    assert named in str(refused.value)


@pytest.mark.parametrize("fault", BY_SENTENCE)
def test_a_template_refuses_in_a_sentence(helm, fault):
    values, sentence = BY_SENTENCE[fault]
    with pytest.raises(Refused) as refused:
        helm.release_of(KIMI, values)
    assert sentence in str(refused.value)


def test_a_release_whose_names_would_not_fit_is_refused(helm):
    with pytest.raises(Refused, match="release name: wanted at most 31 characters"):
        helm.release(CPU, name="r" * 32)


def test_store_and_configuration_must_be_given(helm):
    with pytest.raises(Refused) as refused:
        helm("template", "e3", str(CHART))
    assert "store" in str(refused.value)
    assert "config" in str(refused.value)


def test_a_file_that_holds_a_token_may_be_named(helm):
    """Workload identity hands out files; and not every name that ends so is a secret."""
    env = {"AWS_WEB_IDENTITY_TOKEN_FILE": "/var/run/token", "VLLM_MAX_TOKENS": "9"}
    key = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    assert helm.release_of(CPU, {"env": env, "extraEnv": [key]}).jobs


@pytest.mark.parametrize("source", ["/models", "/models/kimi", "file:///models/kimi"])
def test_a_verifier_on_its_claim_is_taken(helm, source):
    told = {"weights": {"claim": "kimi"}, "config": {"verifier": {"source": source}}}
    assert helm.release_of(CPU, told).jobs


def test_it_can_be_a_part_of_another_chart(helm, tmp_path):
    """Helm then hands it `global`, which nobody set; and that says nothing about the run."""
    shutil.copytree(CHART, tmp_path / "whole" / "charts" / "eagle3")
    (tmp_path / "whole" / "Chart.yaml").write_text("{apiVersion: v2, name: whole, version: 1.0.0}")
    values = yaml.safe_load((CHART / CPU).read_text())
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({"eagle3": values}))
    text = helm("template", "e3", str(tmp_path / "whole"), f"-f={tmp_path / 'values.yaml'}")
    parts = Release(tuple(one for one in yaml.safe_load_all(text) if one), text)
    assert parts.run["metadata"]["name"] == helm.release(CPU).run["metadata"]["name"]


class TestStructs:
    def test_nothing_is_let_through_unnamed(self):
        """Each object of the schema lists its keys, but those that are mappings by nature."""

        def open_objects(node, path):
            if isinstance(node, dict):
                if node.get("type") == "object" and node.get("additionalProperties") is not False:
                    yield path
                for key, below in node.items():
                    yield from open_objects(below, f"{path}.{key}")
            elif isinstance(node, list):
                for below in node:
                    yield from open_objects(below, path)

        schema = chart.values_schema()["$defs"]
        found = {
            path.removeprefix(".").replace("properties.", "").removesuffix(".anyOf")
            for path in open_objects(schema, "")
        }
        kubernetes = {
            "EgressValues.to.items",
            "VariableValues.valueFrom",
            "ChartValues.global",
            *(
                f"VolumeValues.{kind}"
                for kind in (
                    "configMap",
                    "csi",
                    "emptyDir",
                    "ephemeral",
                    "persistentVolumeClaim",
                    "projected",
                    "secret",
                )
            ),
        }
        text_by_name = {
            "ChartValues.env",
            "ServiceAccountValues.annotations",
            "ChartValues.podLabels",
            "ChartValues.podAnnotations",
            "RunnerValues.nodeSelector",
            *(
                f"{kind}StageValues.{key}"
                for kind in ("", "Indexed")
                for key in ("env", "nodeSelector")
            ),
        }
        run_file = {
            "EngineConfig.extra",
            "GeometryConfig.rope",
            "PrepareConfig.roles",
            "RunConfig.inputs",
        }
        assert found == kubernetes | text_by_name | run_file

    def test_what_the_chart_defaults_to_and_all_that_may_be_set_is_known(self):
        """Each key of the schema stands in values.yaml, in a profile or among what is tested."""
        said = [yaml.safe_load((CHART / "values.yaml").read_text()), EVERYTHING]
        said += [yaml.safe_load((CHART / profile).read_text()) for profile in (CPU, KIMI)]
        keys = {key for values in said for key in values} | {"only", "global"}
        assert keys == set(chart.values_schema()["$defs"]["ChartValues"]["properties"])
