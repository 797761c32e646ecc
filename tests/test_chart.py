"""The chart: one shape for all Jobs, the same under both Helms, whatever profile it is given."""

import difflib
import functools
import json

import kubernetes_validate
import msgspec
import pytest
import yaml
from kubernetes_validate.utils import all_versions, major_minor

from eagle3 import __version__, chart, strict_yaml
from eagle3.config import load_config, parse_config
from eagle3.stages import STAGE_NAMES, STAGES
from tests.conftest import ROOT
from tests.helm import CHART, CPU, EVERYTHING, KIMI, PROFILES, SMALL, Helm, client

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
VERSIONS = [
    one
    for one in dict.fromkeys(map(major_minor, all_versions()))
    if tuple(map(int, one.split("."))) >= (1, 31)
]


@pytest.fixture(scope="module")
def helms():
    return {"3": Helm(client("clients-helm3", "helm")), "4": Helm(client("clients", "helm"))}


@pytest.fixture(scope="module")
def helm(helms):
    return helms["4"]


@pytest.fixture(scope="module")
def full(helm):
    """Kimi's profile with every value set."""
    return helm.release_of(KIMI, EVERYTHING)


def main_of(pod):
    (container,) = pod["containers"]
    return container


def gate_of(pod):
    (container,) = pod["initContainers"]
    return container


def mebibytes(quantity):
    number, unit = int(quantity[:-2]), quantity[-2:]
    return number * {"Mi": 1, "Gi": 1024}[unit]


class TestGenerated:
    def test_the_schema_is_that_of_the_structs(self):
        text = (CHART / "values.schema.json").read_text()
        assert json.loads(text) == chart.values_schema(), "run `make manifests`"

    def test_the_template_s_facts_are_those_of_the_stages(self):
        text = (CHART / "files" / "stages.json").read_text()
        assert json.loads(text) == chart.stage_facts(), "run `make manifests`"

    @pytest.mark.parametrize("folder", chart.PLAIN)
    def test_the_plain_manifests_are_the_chart_s(self, helm, folder):
        rendered = chart.plain_manifests(helm.path, CHART, chart.PLAIN[folder])
        assert list(rendered) == sorted(path.name for path in (ROOT / folder).glob("[0-9]*"))
        for name, text in rendered.items():
            written = (ROOT / folder / name).read_text()
            different = difflib.unified_diff(written.splitlines(), text.splitlines(), n=0)
            assert written == text, "run `make manifests`\n" + "\n".join(different)

    def test_the_chart_has_the_package_s_version(self):
        facts = yaml.safe_load((CHART / "Chart.yaml").read_text())
        assert facts["appVersion"] == facts["version"] == __version__
        for folder in chart.PLAIN:
            told = yaml.safe_load((ROOT / folder / "kustomization.yaml").read_text())
            assert {image["newTag"] for image in told["images"]} == {__version__}

    def test_images_have_the_names_that_they_are_built_by(self):
        built = (ROOT / "images" / "build.sh").read_text()
        assert 'eagle3-$name:${TAG:-$version}"' in built
        for name, image in VALUES["images"].items():
            assert image == {"repository": f"eagle3-{name}"}
        for folder in chart.PLAIN:
            told = yaml.safe_load((ROOT / folder / "kustomization.yaml").read_text())
            assert {image["name"] for image in told["images"]} == {
                image["repository"] for image in VALUES["images"].values()
            }


class TestTable:
    def test_every_stage_has_a_row_and_nothing_else_does(self):
        assert tuple(VALUES["stages"]) == STAGE_NAMES
        fields = {field.name: field for field in msgspec.structs.fields(chart.StagesValues)}
        assert tuple(fields) == STAGE_NAMES == chart.StageName.__args__
        for stage in STAGES:
            assert (fields[stage.name].type is chart.IndexedStageValues) == stage.indexed

    @pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.name)
    def test_a_row_holds_what_the_table_of_stages_says(self, stage):
        row = VALUES["stages"][stage.name]
        assert row["gpus"] == stage.gpus
        assert ("workers" in row) == stage.indexed
        assert ("shm" in row) == bool(stage.gpus)

    def test_images_are_those_of_the_stages_and_the_gate_s(self):
        assert set(VALUES["images"]) == {"gate", *(stage.image for stage in STAGES)}

    def test_every_value_is_explained(self):
        """A comment stands above each key but where the table of stages says it once."""
        lines, faults = (CHART / "values.yaml").read_text().splitlines(), []
        for number, line in enumerate(lines):
            above = lines[number - 1].strip()
            key = line.strip().partition(":")[0]
            if not line.strip() or line.strip().startswith(("#", "{}")) or key in STAGE_NAMES:
                continue
            opens_a_section = line.endswith(":") and not above
            if not (above.startswith("#") or opens_a_section or key == "extraVolumeMounts"):
                faults.append(line)
        assert not faults, "explain each value above it"


class TestBothHelms:
    @pytest.mark.parametrize("profile", PROFILES)
    def test_they_render_the_same(self, helms, profile):
        assert helms["3"].release(profile).objects == helms["4"].release(profile).objects

    @pytest.mark.parametrize("profile", PROFILES)
    @pytest.mark.parametrize("version", ["3", "4"])
    def test_they_find_nothing_to_lint(self, helms, version, profile):
        assert "0 chart(s) failed" in helms[version](
            "lint", str(CHART), "--strict", f"--values={CHART / profile}"
        )

    def test_notes_name_the_next_commands(self, helm):
        told = helm("install", "e3", str(CHART), f"-f={CHART / CPU}", "--dry-run=client")
        notes = told.partition("NOTES:")[2]
        run = helm.release(CPU).run["metadata"]["name"]
        for command in (
            "helm test e3",
            f"eagle3 status {run}",
            f"eagle3 scale extract --run {run} --workers 4",
            "kubectl logs",
            "helm uninstall e3",
            "What is in the store stays.",
        ):
            assert command in notes


class TestSchemasOfKubernetes:
    @pytest.mark.parametrize("version", VERSIONS)
    def test_every_object_is_valid_strictly(self, full, monkeypatch, version):
        utils = kubernetes_validate.utils
        monkeypatch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        for one in [*full.objects, *full.jobs.values()]:
            kubernetes_validate.validate(one, version, strict=True)

    def test_from_1_31_to_the_newest_are_looked_at(self):
        assert VERSIONS[0] == "1.31"
        assert len(VERSIONS) >= 7

    def test_names_and_labels_are_text_and_short_enough(self, helm):
        """An id such as 1e5 is a number to YAML, and a pod's host name has 63 characters."""
        release = helm.release(CPU, "run.id=1e5", name="r" * 31)
        for one in [*release.objects, *release.jobs.values()]:
            labels = one["metadata"]["labels"]
            assert all(isinstance(value, str) for value in labels.values())
        assert release.run["metadata"]["labels"]["eagle3/run"] == "1e5"
        assert max(len(f"{job['metadata']['name']}-999") for job in release.jobs.values()) <= 63


class TestPods:
    """Every pod, of every stage, the runner and the test."""

    def test_pod_security_restricted_holds(self, full):
        admitted = {"configMap", "emptyDir", "persistentVolumeClaim"}
        pods = dict(full.pods())
        assert {*STAGE_NAMES, "e3-test"} < set(pods)
        for pod in pods.values():
            assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & pod.keys()
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["runAsUser"] > 0
            assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            for volume in pod["volumes"]:
                assert volume.keys() - {"name"} <= admitted
            for container in [*pod.get("initContainers", []), *pod["containers"]]:
                assert container["securityContext"] == {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "runAsNonRoot": True,
                    "capabilities": {"drop": ["ALL"]},
                }
                assert "ports" not in container

    def test_what_an_operator_adds_to_pods_is_on_all_of_them(self, full):
        templates = [job["spec"]["template"] for job in [*full.jobs.values(), *full.of_kind("Job")]]
        assert len(templates) == 8
        for pod in [*templates, *full.of_kind("Pod")]:
            assert pod["metadata"]["labels"]["azure.workload.identity/use"] == "true"
            assert pod["metadata"]["labels"]["app.kubernetes.io/name"] == "eagle3"
            assert pod["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
            assert pod["spec"]["runtimeClassName"] == "nvidia"
            context = pod["spec"]["securityContext"]
            assert context["runAsUser"] == 1000680000
            assert (context["runAsGroup"], context["supplementalGroups"]) == (0, [2000])
            assert "fsGroup" not in context, "null leaves it to the cluster"
            assert context["fsGroupChangePolicy"] == "OnRootMismatch"
        on = {"kubernetes.io/arch": "amd64"}
        for whose, pod in full.pods():
            if whose not in STAGE_NAMES:
                assert pod["nodeSelector"] == on

    def test_the_runner_alone_has_a_token(self, full):
        for whose, pod in full.pods():
            runner = whose.endswith("-runner")
            assert pod["automountServiceAccountToken"] is runner
            assert pod["serviceAccountName"] == ("e3-runner" if runner else "e3-stage")
        for account in full.of_kind("ServiceAccount"):
            assert account["automountServiceAccountToken"] is False
            assert "eks.amazonaws.com/role-arn" in account["metadata"]["annotations"]

    def test_the_runner_may_do_no_more_than_it_does(self, full):
        (role,) = full.of_kind("Role")
        allowed = {
            resource: set(rule["verbs"]) for rule in role["rules"] for resource in rule["resources"]
        }
        assert allowed == {
            "jobs": {"get", "create", "patch"},
            "pods": {"list"},
            "events": {"list", "create"},
            "configmaps": {"get", "patch"},
        }

    @pytest.mark.fault("B83")
    def test_the_gate_is_who_the_stage_is(self, full):
        """One identity, or the gate proves nothing about what the stage will find."""
        for job in full.jobs.values():
            pod = job["spec"]["template"]["spec"]
            gate, stage = gate_of(pod), main_of(pod)
            for name in ("env", "envFrom", "volumeMounts"):
                assert gate[name] == stage[name]
            assert gate["envFrom"] == [{"secretRef": {"name": "eagle3-s3"}}]

    def test_whatever_is_written_goes_to_the_scratch_volume(self, helm):
        for _, pod in helm.release(CPU).pods():
            for container in [*pod.get("initContainers", []), *pod["containers"]]:
                env = {one["name"]: one.get("value") for one in container["env"]}
                homes = [name for name in env if name.endswith(("HOME", "DIR", "ROOT"))]
                assert {"HOME", "TMPDIR", "HF_HOME", "TRITON_CACHE_DIR"} < set(homes)
                assert all(env[name].split("/")[1] == "scratch" for name in homes)
                mounts = {one["mountPath"]: one for one in container["volumeMounts"]}
                assert "readOnly" not in mounts["/scratch"]
                assert mounts["/etc/eagle3"]["readOnly"] is True

    @pytest.mark.parametrize("profile", PROFILES)
    @pytest.mark.fault("B81")
    def test_shared_memory_is_there_and_counted(self, helm, profile):
        """64 MB, the runtime's default, end tensor parallelism with a bus error."""
        sizes = VALUES["stages"] | {}
        given = yaml.safe_load((CHART / profile).read_text())["stages"]
        release = helm.release(profile)
        for stage, job in release.jobs.items():
            size = {**sizes[stage], **given.get(stage, {})}
            pod = job["spec"]["template"]["spec"]
            volumes = {one["name"]: one for one in pod["volumes"]}
            container = main_of(pod)
            limit = mebibytes(container["resources"]["limits"]["memory"])
            shm = mebibytes(size["shm"]) if "shm" in size else 0
            assert limit == mebibytes(size["memory"]) + shm
            assert limit == mebibytes(container["resources"]["requests"]["memory"])
            assert ("dshm" in volumes) == bool(shm)
            if shm:
                assert volumes["dshm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": size["shm"]}
                assert {"name": "dshm", "mountPath": "/dev/shm"} in container["volumeMounts"]
            assert shm or not size["gpus"]

    def test_gpus_are_limited_as_requested_and_held_by_no_gate(self, helm):
        release = helm.release(KIMI)
        for stage in STAGES:
            pod = release.jobs[stage.name]["spec"]["template"]["spec"]
            resources = main_of(pod)["resources"]
            for part in (resources["limits"], resources["requests"]):
                assert part.get("nvidia.com/gpu") == (str(stage.gpus) if stage.gpus else None)
            assert "nvidia.com/gpu" not in gate_of(pod)["resources"]["limits"]
            selector = pod.get("nodeSelector", {}).get("nvidia.com/gpu.product")
            assert selector == ("NVIDIA-B200" if stage.gpus else None)

    def test_without_a_gpu_a_stage_has_as_many_threads_as_it_asked_processors_for(self, helm):
        def threads(job):
            env = main_of(job["spec"]["template"]["spec"])["env"]
            found = [one for one in env if one["name"] == "OMP_NUM_THREADS"]
            return [one.get("value", one.get("valueFrom")) for one in found]

        asked = [{"resourceFieldRef": {"containerName": "stage", "resource": "requests.cpu"}}]
        assert all(threads(job) == asked for job in helm.release(CPU).jobs.values())
        kimi = helm.release(KIMI).jobs
        assert not threads(kimi["extract"]), "with a GPU it is the engine's own affair"
        assert threads(kimi["prepare"]) == asked
        given = helm.release(CPU, 'stages.train.env.OMP_NUM_THREADS="6"').jobs
        assert threads(given["train"]) == ['"6"']

    @pytest.mark.fault("B117")
    def test_disk_is_requested_and_bounded(self, helm):
        for job in helm.release(KIMI).jobs.values():
            pod = job["spec"]["template"]["spec"]
            resources = main_of(pod)["resources"]
            size = resources["limits"]["ephemeral-storage"]
            assert resources["requests"]["ephemeral-storage"] == size
            assert {"name": "scratch", "emptyDir": {"sizeLimit": size}} in pod["volumes"]

    def test_a_stage_knows_what_its_pod_may_hold(self, helm):
        """The disk below is the node's and larger: a download that fits it may end in eviction."""
        limit = {"containerName": "stage", "resource": "limits.ephemeral-storage"}
        told = {"name": "EAGLE3_SCRATCH_BYTES", "valueFrom": {"resourceFieldRef": limit}}
        for whose, pod in helm.release(KIMI).pods():
            for container in [*pod.get("initContainers", []), *pod["containers"]]:
                assert (told in container["env"]) == (whose in STAGE_NAMES)
        elsewhere = helm.release(KIMI, "env.TMPDIR=/claim").jobs["extract"]
        assert told not in main_of(elsewhere["spec"]["template"]["spec"])["env"]

    def test_everything_that_may_be_set_arrives(self, full):
        job = full.jobs["extract"]
        pod, stage = job["spec"]["template"]["spec"], main_of(job["spec"]["template"]["spec"])
        env = {one["name"]: one.get("value", one.get("valueFrom")) for one in stage["env"]}
        assert env["NCCL_DEBUG"] == "WARN", "a stage's own stands over everyone's"
        assert env["HF_HOME"] == "/cache/huggingface"
        assert env["POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
        assert env["VLLM_ENGINE_READY_TIMEOUT_S"] == "7200"
        assert len(env) == len(stage["env"]), "no variable twice"
        assert pod["nodeSelector"] == {"zone": "a", "nvidia.com/gpu.product": "NVIDIA-B200"}
        assert [one["key"] for one in pod["tolerations"]] == ["nvidia.com/gpu", "drafts"]
        assert pod["priorityClassName"] == "batch"
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert stage["imagePullPolicy"] == "Always"
        assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "drafts"
        assert "suspend" not in job["spec"], "that is Kueue's to set"
        assert job["metadata"]["annotations"]["eagle3/ttl-seconds"] == "3600"
        train = main_of(full.jobs["train"]["spec"]["template"]["spec"])
        assert train["image"] == f"eagle3-train@sha256:{'0' * 64}"
        assert {"name": "EAGLE3_IMAGE_DIGEST", "value": f"sha256:{'0' * 64}"} in train["env"]

    def test_the_verifier_is_mounted_where_it_is_read_and_never_writable(self, full):
        mounted = {}
        for stage, job in full.jobs.items():
            mounts = main_of(job["spec"]["template"]["spec"])["volumeMounts"]
            mounted[stage] = [one for one in mounts if one["name"] == "weights"]
        holders = {stage for stage, mounts in mounted.items() if mounts}
        assert holders == {"prepare", "regenerate", "extract", "evaluate"}
        wanted = {"name": "weights", "mountPath": "/models", "readOnly": True}
        assert all(mounted[stage] == [wanted] for stage in holders)
        claim = {"claimName": "verifier", "readOnly": True}
        volumes = full.jobs["extract"]["spec"]["template"]["spec"]["volumes"]
        assert {"name": "weights", "persistentVolumeClaim": claim} in volumes

    def test_nothing_kills_an_engine_that_takes_an_hour_to_start(self, full):
        for stage, job in full.jobs.items():
            stage_container = main_of(job["spec"]["template"]["spec"])
            assert not {"livenessProbe", "startupProbe"} & stage_container.keys()
            assert job["spec"]["activeDeadlineSeconds"] >= 24 * 3600
            grace = job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
            assert grace >= {"train": 600, "extract": 120, "regenerate": 120}.get(stage, 30)
            if stage == "train":
                limit = {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": str(grace - 30)}
                assert limit in stage_container["env"], "torch's launcher waits as long"


class TestJobs:
    @pytest.mark.fault("B78")
    def test_a_failed_pod_stays_and_is_not_doubled(self, full):
        for job in full.jobs.values():
            assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"
            assert job["spec"]["podReplacementPolicy"] == "Failed"

    def test_no_job_is_deleted_by_time_before_its_artefact_is_committed(self, helm):
        """The runner sets it then; a Job that failed on Friday is there on Monday."""
        for job in helm.release(CPU, "ttlSeconds=0").jobs.values():
            assert "ttlSecondsAfterFinished" not in job["spec"]
            assert job["metadata"]["annotations"]["eagle3/ttl-seconds"] == "0"
        for job in helm.release(CPU).jobs.values():
            assert "eagle3/ttl-seconds" not in job["metadata"]["annotations"]

    def test_the_work_of_an_indexed_stage_spreads_over_nodes(self, full):
        for stage in STAGES:
            spec = full.jobs[stage.name]["spec"]
            spread = spec["template"]["spec"].get("topologySpreadConstraints")
            assert bool(spread) == stage.indexed == ("completionMode" in spec)
            if stage.indexed:
                assert spec["completions"] == spec["parallelism"] == spec["maxFailedIndexes"] == 2
                assert "backoffLimit" not in spec
                labels = spec["template"]["metadata"]["labels"]
                assert spread[0]["labelSelector"]["matchLabels"].items() <= labels.items()

    def test_the_runner_is_given_whole_jobs_in_order(self, helm):
        release = helm.release(CPU)
        assert tuple(release.jobs) == STAGE_NAMES
        run = release.run["metadata"]["name"]
        for stage, job in release.jobs.items():
            assert job["metadata"]["name"] == f"{run}-{stage}"
            assert not {"namespace", "ownerReferences"} & job["metadata"].keys()
            assert job["metadata"]["labels"]["eagle3/stage"] == stage
            pod = job["spec"]["template"]["spec"]
            assert pod["volumes"][0]["configMap"]["name"] == run
            assert main_of(pod)["command"][2] == f"jobs.{stage}"
            (store,) = (one for one in main_of(pod)["env"] if one["name"] == "EAGLE3_STORE")
            assert store["value"] == f"s3://eagle3/runs/{run.removeprefix('e3-')}"

    def test_a_stage_that_the_run_leaves_out_has_no_job(self, helm):
        jobs = helm.release(CPU, "config.regenerate.enabled=false").jobs
        assert tuple(jobs) == tuple(name for name in STAGE_NAMES if name != "regenerate")


class TestNetwork:
    def test_nothing_comes_in_and_private_addresses_are_closed(self, helm):
        release = helm.release(SMALL)
        policy = release.named("NetworkPolicy", "e3")["spec"]
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        assert "ingress" not in policy, "an empty list would be a change at each upgrade"
        names, https = policy["egress"]
        assert {(one["protocol"], one["port"]) for one in names["ports"]} == {
            ("UDP", 53),
            ("TCP", 53),
        }
        assert "10.0.0.0/8" in https["to"][0]["ipBlock"]["except"]
        assert [one["port"] for one in https["ports"]] == [443]
        for job in release.jobs.values():
            labels = job["spec"]["template"]["metadata"]["labels"]
            assert policy["podSelector"]["matchLabels"].items() <= labels.items()

    def test_public_addresses_can_be_closed(self, helm):
        closed = helm.release(SMALL, "networkPolicy.publicHttps=false")
        (names,) = closed.named("NetworkPolicy", "e3")["spec"]["egress"]
        assert {one["port"] for one in names["ports"]} == {53}

    def test_the_api_server_is_the_runner_s_alone(self, helm):
        release = helm.release(SMALL)
        chosen = release.named("NetworkPolicy", "e3-runner")["spec"]["podSelector"]["matchLabels"]
        (runner,) = release.of_kind("Job")
        assert chosen.items() <= runner["spec"]["template"]["metadata"]["labels"].items()
        for job in release.jobs.values():
            labels = job["spec"]["template"]["metadata"]["labels"]
            assert not chosen.items() <= labels.items()

    def test_what_is_added_is_added_for_all(self, full):
        assert full.named("NetworkPolicy", "e3")["spec"]["egress"][-1] == {
            "ports": [{"protocol": "TCP", "port": 9000}]
        }


class TestProfiles:
    @pytest.mark.parametrize("profile", PROFILES)
    def test_its_run_file_is_one_that_stages_accept(self, helm, profile):
        text = helm.release(profile).run["data"]["run.yaml"]
        written = strict_yaml.loads((CHART / profile).read_text())["config"]
        assert parse_config(strict_yaml.loads(text)) == parse_config(written)

    def test_kimi_is_the_documented_run(self):
        values = strict_yaml.loads((CHART / KIMI).read_text())
        ours = parse_config(values["config"])
        documented = load_config(ROOT / "docs" / "examples" / "kimi-k2.5.yaml")
        assert ours.extract.layer_ids == (2, 30, 58, 61)
        assert documented.extract.layer_ids is None, "the default, which is the same"
        extract = msgspec.structs.replace(ours.extract, layer_ids=None)
        assert msgspec.structs.replace(ours, extract=extract) == documented
        for stage in ("regenerate", "extract", "evaluate"):
            assert getattr(ours, stage).engine.tensor_parallel_size == 8
            assert values["stages"][stage]["gpus"] == 8

    def test_cpu_is_the_demonstration(self):
        ours = parse_config(strict_yaml.loads((CHART / CPU).read_text())["config"])
        demo = load_config(ROOT / "docs" / "examples" / "demo.yaml")
        prepare = msgspec.structs.replace(demo.prepare, data=ours.prepare.data)
        verifier = msgspec.structs.replace(demo.verifier, source=ours.verifier.source)
        assert ours == msgspec.structs.replace(demo, prepare=prepare, verifier=verifier)

    @pytest.mark.parametrize(("profile", "gpus"), [(CPU, 0), (SMALL, 1), (KIMI, 8)])
    def test_its_gpu_stages_hold_as_many(self, helm, profile, gpus):
        for stage in STAGES:
            if stage.gpus:
                pod = helm.release(profile).jobs[stage.name]["spec"]["template"]["spec"]
                held = main_of(pod)["resources"]["limits"].get("nvidia.com/gpu", "0")
                assert int(held) == gpus
