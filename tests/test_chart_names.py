"""Which run a release is, under which names its objects go, and as whom its pods act."""

import shutil

import msgspec
import pytest
import yaml

from eagle3 import strict_yaml
from eagle3.config import EngineConfig
from eagle3.config_fields import field_meta
from tests.conftest import ROOT
from tests.helm import CHART, CPU, KIMI, Helm, client

DOCUMENT = (ROOT / "docs" / "cluster.md").read_text()


@pytest.fixture(scope="module")
def helm():
    return Helm(client("clients", "helm"))


def everything(node):
    """(key, value) of every mapping in an object."""
    if isinstance(node, dict):
        yield from node.items()
        node = list(node.values())
    for below in node if isinstance(node, list) else ():
        yield from everything(below)


def notes_of(helm, *arguments):
    told = helm("install", "e3", str(CHART), f"-f={CHART / CPU}", "--dry-run=client", *arguments)
    return told.partition("NOTES:")[2]


class TestNames:
    def test_the_same_values_are_the_same_run_to_the_byte(self, helm):
        again = Helm(helm.path).release.__wrapped__(helm, CPU)
        assert again.text == helm.release(CPU).text

    def test_other_values_are_another_run(self, helm):
        ours, other = helm.release(CPU), helm.release(CPU, "stages.train.memory=7Gi")
        assert ours.run["metadata"]["name"] != other.run["metadata"]["name"]
        assert ours.run["immutable"] is True
        kept = [*ours.of_kind("Job"), ours.run]
        assert all(
            one["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for one in kept
        )

    @pytest.mark.parametrize(
        "told",
        [
            "runner.memory=1Gi",
            "runner.pollSeconds=60",
            "networkPolicy.enabled=false",
            "serviceAccount.annotations.role=drafts",
        ],
    )
    def test_what_surrounds_a_run_may_be_corrected_while_it_goes_on(self, helm, told):
        ours, other = helm.release(CPU), helm.release(CPU, told)
        assert ours.run == other.run, "stages already done are not begun again"
        assert ours.text != other.text

    def test_what_belongs_to_the_release_has_the_same_name_in_every_run(self, helm):
        def names(release):
            return {
                (one["kind"], one["metadata"]["name"])
                for one in release.objects
                if "eagle3/run" not in one["metadata"]["labels"]
            }

        shared = names(helm.release(CPU))
        assert shared == names(helm.release(CPU, "stages.train.memory=7Gi"))
        assert ("ConfigMap", "e3") in shared

    def test_another_version_of_the_chart_is_another_run_and_every_text_says_so(
        self, helm, tmp_path
    ):
        """Its images and its Jobs are others; a person who upgrades must know it before."""
        newer = shutil.copytree(CHART, tmp_path / "eagle3")
        facts = (newer / "Chart.yaml").read_text()
        (newer / "Chart.yaml").write_text(facts.replace("\nversion: ", "\nversion: 9"))

        def run(chart, *sets):
            text = helm("template", "e3", str(chart), f"-f={CHART / CPU}", *sets)
            objects = [one for one in yaml.safe_load_all(text) if one]
            (found,) = (one for one in objects if "run.yaml" in one.get("data", {}))
            return found["metadata"]["name"]

        assert run(newer) != run(CHART)
        assert run(newer, "--set-string=run.id=7") == run(CHART, "--set-string=run.id=7")
        values = (CHART / "values.yaml").read_text().replace("\n  # ", " ")
        assert "the hash of the chart's version" in values
        assert "another version of the chart" in notes_of(helm).replace("\n", " ")
        told = " ".join(DOCUMENT.split())
        assert "made of the chart's version and of all values but" in told
        assert "**A newer version of the chart**" in told

    def test_names_that_read_as_numbers_stay_names(self, helm):
        """The schema admits them, and the API server wants text: it would refuse at the runner."""
        values = {
            "run": {"id": "5"},
            "queueName": "2026",
            "priorityClassName": "1e5",
            "runtimeClassName": "0x1f",
            "credentials": {"secretName": "1e-5"},
            "weights": {"claim": "0777"},
            "serviceAccount": {"stageName": "12", "runnerName": "13"},
            "config": {"verifier": {"source": "/models/kimi"}},
        }
        release = helm.release_of(KIMI, values, name="1e")
        # As Helm and the API server read it: 1e-5 is a number there, and text to PyYAML.
        objects = [strict_yaml.loads(one) for one in release.text.split("\n---\n")]
        for one in [*objects, *release.jobs.values()]:
            named = [
                value
                for key, value in everything(one)
                if key in ("name", "queue-name", "claimName", "serviceAccountName")
                or key.endswith(("ClassName", "/queue-name", "/instance", "/run"))
            ]
            assert named
            assert all(isinstance(value, str) for value in named), named


class TestAccounts:
    """A cloud role is bound to an account by its name, before or beside the chart."""

    GIVEN = "serviceAccount.stageName=drafts,serviceAccount.runnerName=orders"

    def accounts(self, release):
        return {whose: pod["serviceAccountName"] for whose, pod in release.pods()}

    def test_their_names_are_told(self, helm):
        for name in ("<release>-stage", "<release>-runner"):
            assert f"`{name}`" in DOCUMENT
            assert name in (CHART / "values.yaml").read_text()
        notes = notes_of(helm)
        assert "e3-stage (stages" in notes
        assert "e3-runner (runner)" in notes
        assert "drafts (stages" in notes_of(helm, f"--set={self.GIVEN}")

    def test_those_that_exist_are_used_everywhere_and_none_is_made(self, helm):
        release = helm.release(CPU, self.GIVEN)
        assert not release.of_kind("ServiceAccount")
        for whose, account in self.accounts(release).items():
            assert account == ("orders" if whose.endswith("-runner") else "drafts")
        (binding,) = release.of_kind("RoleBinding")
        assert [one["name"] for one in binding["subjects"]] == ["orders"]
        assert [one["metadata"]["name"] for one in release.of_kind("Role")] == ["e3-runner"]

    def test_one_may_be_given_and_the_other_made(self, helm):
        told = ("serviceAccount.stageName=drafts", "serviceAccount.annotations.a=b")
        release = helm.release(CPU, *told)
        (made,) = (one["metadata"] for one in release.of_kind("ServiceAccount"))
        assert (made["name"], made["annotations"]) == ("e3-runner", {"a": "b"})
        assert set(self.accounts(release).values()) == {"drafts", "e3-runner"}

    def test_plain_manifests_use_it_too(self, helm):
        release = helm.release(CPU, "serviceAccount.stageName=drafts,run.id=a,only={train}")
        assert not release.of_kind("ServiceAccount")
        (job,) = release.of_kind("Job")
        assert job["spec"]["template"]["spec"]["serviceAccountName"] == "drafts"

    def test_another_for_the_stages_is_another_run_since_jobs_cannot_change(self, helm):
        before = helm.release(CPU).run
        after = helm.release(CPU, "serviceAccount.stageName=drafts").run
        assert after["metadata"]["name"] != before["metadata"]["name"]
        assert helm.release(CPU, "serviceAccount.runnerName=drafts").run == before


def test_the_settings_of_an_engine_that_may_change_within_a_run_are_those_that_are_told():
    """A stage refuses the others, when the Jobs that were deleted for the change are gone."""
    told = " ".join(DOCUMENT.split())
    told = told[told.index("What may change in between") :].partition("**To go back**")[0]
    may, never = told.split("A stage that has begun refuses")
    for field in msgspec.structs.fields(EngineConfig):
        meta = field_meta(field)
        assert (f"`{field.name}`" in may) == (not meta["affects"])
        assert (f"`{field.name}`" in never) == meta["affects"]
        assert all(f"`{key}`" in may for key in meta["but"])
