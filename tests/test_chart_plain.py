"""k8s/: the chart's Jobs as plain manifests, which a person edits in a few places and applies."""

import re
import shutil
import subprocess

import pytest
import yaml

from eagle3 import chart
from eagle3.stages import STAGE_NAMES
from tests.conftest import ROOT
from tests.helm import CHART, client

DOCUMENT = (ROOT / "docs" / "cluster.md").read_text()


def built(folder):
    """What `kubectl apply -k` would send."""
    command = [client("clients", "kubectl"), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    """The manifests of each folder after its settings were edited, as `kubectl apply -k`."""
    root = tmp_path_factory.mktemp("k8s")
    shutil.copytree(ROOT / "k8s", root / "k8s")
    found = {}
    for folder in chart.PLAIN:
        settings = root / folder / "settings.yaml"
        told = yaml.safe_load(settings.read_text())
        told["data"] = {"store": "s3://mine/drafts", "credentials": "mine"}
        settings.write_text(yaml.safe_dump(told))
        found[folder] = built(root / folder)
    return found


class TestPlainManifests:
    @pytest.mark.parametrize("folder", chart.PLAIN)
    def test_settings_are_edited_in_one_place(self, edited, folder):
        text = yaml.safe_dump_all(edited[folder])
        told = yaml.safe_load((ROOT / folder / "settings.yaml").read_text())["data"]
        assert told["store"] not in text
        assert told["credentials"] not in text
        # In the gate, in the stage and beside them, of seven Jobs; and once on the ConfigMap.
        assert text.count("s3://mine/drafts") == 7 * 3 + 1
        assert "local-config" not in text

    @pytest.mark.parametrize("folder", chart.PLAIN)
    def test_a_stage_is_chosen_by_its_label(self, edited, folder):
        by_stage = {}
        for one in edited[folder]:
            by_stage.setdefault(one["metadata"]["labels"]["eagle3/stage"], []).append(one["kind"])
        shared = by_stage.pop("shared")
        assert sorted(shared) == ["ConfigMap", "NetworkPolicy", "ServiceAccount"]
        assert by_stage == {name: ["Job"] for name in STAGE_NAMES}

    def test_the_settings_as_shipped_are_those_that_were_rendered(self):
        for folder, profile in chart.PLAIN.items():
            told = yaml.safe_load((ROOT / folder / "settings.yaml").read_text())["data"]
            values = yaml.safe_load((CHART / profile).read_text())
            assert told["store"] == f"{values['store']}/{chart.PLAIN_RUN}"
            assert told["credentials"] == values["credentials"]["secretName"]

    def test_each_job_is_complete_with_its_gate(self):
        for folder in chart.PLAIN:
            for name in STAGE_NAMES:
                path = ROOT / folder / chart.plain_file(name)
                (job,) = yaml.safe_load_all(path.read_text())
                pod = job["spec"]["template"]["spec"]
                assert pod["initContainers"][0]["command"][3:5] == ["--stage", name]
                assert pod["containers"][0]["command"][2] == f"jobs.{name}"


class TestWorkloadIdentity:
    """docs/cluster.md says what to do where there is no Secret; as it says, it goes."""

    def test_without_the_secret_s_reference_the_folder_still_renders(self, tmp_path):
        shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
        shared = "k8s/settings/kustomization.yaml"
        assert f"`{shared}`" in DOCUMENT
        component = yaml.safe_load((tmp_path / shared).read_text())
        (ours,) = (
            one
            for one in component["replacements"]
            if one["source"]["fieldPath"] == "data.credentials"
        )
        component["replacements"].remove(ours)
        (tmp_path / shared).write_text(yaml.safe_dump(component))
        for path in tmp_path.glob("k8s/**/[1-9]*.yaml"):
            text = path.read_text()
            left, count = re.subn(
                r"^ +envFrom:\n +- secretRef:\n +name: .*\n", "", text, flags=re.MULTILINE
            )
            assert count == 2, f"the gate and the stage of {path}"
            path.write_text(left)
        for folder in chart.PLAIN:
            objects = built(tmp_path / folder)
            assert "secretRef" not in yaml.safe_dump_all(objects)
            assert len([one for one in objects if one["kind"] == "Job"]) == len(STAGE_NAMES)

    def test_the_account_that_a_role_is_bound_to_is_the_one_that_is_named(self):
        for folder in chart.PLAIN:
            objects = yaml.safe_load_all((ROOT / folder / "00-shared.yaml").read_text())
            (account,) = (one for one in objects if one["kind"] == "ServiceAccount")
            assert f"`{account['metadata']['name']}`" in DOCUMENT
