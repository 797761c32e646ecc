"""The runner: makes each stage's Job when what the stage reads is committed, and ends with the run.

It keeps nothing of its own. What it does next follows from the manifests in the store, from two
small records there, and from the Jobs' state (`eagle3.ordering`), so that it may be killed at any
point and started again. It deletes nothing and makes nothing twice.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from eagle3 import artifact as artifacts
from eagle3.cluster import ANNOTATIONS, Cluster, Object, open_cluster
from eagle3.diagnosis import diagnose, job_state
from eagle3.errors import (
    ConfigError,
    DataInvalid,
    Eagle3Error,
    PermissionRefused,
    ServiceUnavailable,
    Stopped,
    TemporaryFailure,
    UpstreamMissing,
)
from eagle3.ordering import Act, JobRecord, JobRecords, JobState, decide
from eagle3.progress import read_progress
from eagle3.stages import Stage
from jobs.arguments import Parser
from jobs.installed import InstalledRun, read_files
from jobs.local import write_summary
from jobs.patience import Patience
from jobs.process import gate_inputs, guarded, input_urls, stop_requested

POLL_SECONDS = 10.0


class Runner:
    """Orders the stages of one run on one cluster.

    Args:
        tell: is given a line whenever something changed.

    Attributes:
        failure: why a stage failed, at the last look; the first of several.
        going: whether a Job was at work then.
    """

    def __init__(self, run: InstalledRun, cluster: Cluster, tell: Callable[[str], None]) -> None:
        self._run, self._cluster, self._tell = run, cluster, tell
        # Manifests never change: what was seen committed stays so.
        self._committed: set[str] = set()
        self._owner: Object | None = None
        self._told: set[str] = set()
        self.failure: Eagle3Error | None = None
        self.going = False

    def adopt(self) -> None:
        """Make the release's ConfigMap the owner of the run's own and of the runner's Job.

        Both outlive an upgrade; when the release is uninstalled they go with their owner. Where
        there is no release, as for a run that was applied by hand, nothing is owned.
        """
        found = self._cluster.config_map(self._run.release)
        if found is None:
            return
        self._owner = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "name": self._run.release,
            "uid": found["metadata"]["uid"],
        }
        name = f"{self._run.name}-runner"
        try:
            if run := self._cluster.config_map(self._run.name):
                self._cluster.patch_config_map(self._run.name, self._owned(run))
            if job := self._cluster.job(name):
                self._cluster.patch_job(name, self._owned(job))
        except PermissionRefused as error:
            # Some clusters let only those who may delete an object give it an owner.
            self._tell(f"runner: {error} `helm uninstall` will leave {self._run.name} standing.")

    def _owned(self, thing: Object) -> Object:
        """The change by which it has our owner beside those that others gave it.

        A merge replaces the whole list: should another owner come between, it is refused.
        """
        assert self._owner is not None, "adopted"
        ours = (self._owner["kind"], self._owner["name"])
        standing = thing["metadata"].get("ownerReferences", [])
        others = [one for one in standing if (one["kind"], one["name"]) != ours]
        metadata = {"ownerReferences": [*others, self._owner]}
        if version := thing["metadata"].get("resourceVersion"):
            metadata["resourceVersion"] = version
        return {"metadata": metadata}

    def step(self) -> bool:
        """Look at every stage once, do what there is to do, and return whether all is committed.

        A stage that failed is in `failure` afterwards, until somebody lets it be tried again: what
        else is at work goes on meanwhile. Raises UpstreamMissing where nothing can go on.
        """
        held_up: list[UpstreamMissing] = []
        self.failure, self.going = None, False
        for stage in self._run.stages:
            if stage.name not in self._committed:
                try:
                    self.going |= self._step(stage)
                except UpstreamMissing as error:
                    held_up.append(error)
        done = len(self._committed) == len(self._run.stages)
        if not (done or self.going or self.failure):
            raise held_up[0]
        return done

    def _fail(self, error: Eagle3Error) -> bool:
        """Keep why a stage failed, tell it once, and return that nothing of it is at work."""
        self.failure = self.failure or error
        if (text := str(error)) not in self._told:
            self._told.add(text)
            self._tell(f"runner: {text}")
        return False

    def _step(self, stage: Stage) -> bool:
        """One stage; whether a Job of it is at work. Raises UpstreamMissing while it is held up."""
        records, name = JobRecords(self._run.store, stage), self._run.job_name(stage.name)
        ours = JobRecord(job=name, namespace=self._cluster.namespace)
        records.expect(ours)
        # Asked before the Job: one that `retry` takes away in between is not noted as the next.
        made = records.made() is not None
        job = self._cluster.job(name)
        # Asked after the Job: one that has ended without a manifest will never have one.
        committed = all(artifacts.find(self._run.store.child(kind)) for kind in stage.writes)
        match decide(committed=committed, made=made, job=job_state(job)):
            case Act.NOTHING:
                self._note_committed(stage, job)
                return False
            case Act.MISS:
                # Forgotten meanwhile: somebody lets it be tried again, which the next look does.
                return records.made() is None or self._fail(records.vanished())
            case Act.MAKE:
                self._refuse_early(stage)
                try:
                    gate_inputs(self._run.config, self._run.store, stage)
                    records.intend(ours)
                    job = self._make(stage)
                except (DataInvalid, ConfigError) as error:
                    return self._fail(error)
        assert job is not None, "made, or seen"
        # One that is being deleted is gone soon: `cancel` has it be as if it was never made.
        if not made and "deletionTimestamp" not in job["metadata"]:
            records.note(msgspec.structs.replace(ours, uid=str(job["metadata"]["uid"])))
        return self._look_at(stage, job)

    def _refuse_early(self, stage: Stage) -> None:
        """The gate lists objects: it is not asked while a stage of this run is still to commit."""
        urls = input_urls(self._run.config, self._run.store, stage)
        for one in self._run.stages:
            own = {self._run.store.child(kind).url for kind in one.writes}
            if one.name not in self._committed and own & set(urls.values()):
                raise UpstreamMissing(
                    f"{stage.name}: {one.name}",
                    wanted="a committed artefact",
                    found="none yet",
                    remedy=f"wait for {one.name}",
                )

    def _make(self, stage: Stage) -> Object:
        body = copy.deepcopy(self._run.bodies[stage.name])
        if self._owner is not None:
            body["metadata"]["ownerReferences"] = [self._owner]
        job = self._cluster.create_job(body)
        self._cluster.tell(job, "StageBegun", f"what {stage.name} reads is committed")
        self._tell(f"{stage.name}: job {job['metadata']['name']} made")
        return job

    def _look_at(self, stage: Stage, job: Object) -> bool:
        """Tell how a Job is going, and return whether it is; else `failure` says why not."""
        state, name = job_state(job), str(job["metadata"]["name"])
        if state is JobState.ACTIVE:
            self._show_progress(stage, job)
            return True
        if state is JobState.COMPLETE:
            error: Eagle3Error = DataInvalid(
                f"{stage.name}: job {name}",
                wanted="a committed artefact when it ends",
                found="none, though its pods ended with 0",
                remedy=f"see its log, then `eagle3 retry {stage.name}`",
            )
        else:
            found = diagnose(job, self._cluster.pods(name))
            error = found.as_error(f"{stage.name}: job {name}")
        self._cluster.tell(job, "StageFailed", str(error), warning=True)
        self._cluster.annotate(job, {"progress": f"failed: {error}"[:500]})
        return self._fail(error)

    def _show_progress(self, stage: Stage, job: Object) -> None:
        found = diagnose(job, self._cluster.pods(job["metadata"]["name"]), self._cluster.warnings())
        reports = read_progress(self._run.store, stage.name)
        words = "; ".join(found.told(reports, time.time()))
        # As much as is kept, or a long sentence would differ from itself at each look.
        text = (f"{found.state}: {words}" if words else found.state)[:500]
        before = job["metadata"].get("annotations", {}).get("eagle3/progress")
        if text != before:
            self._cluster.annotate(job, {"progress": text})
            self._tell(f"{stage.name}: {text}")

    def _note_committed(self, stage: Stage, job: Object | None) -> None:
        manifest = artifacts.find(self._run.store.child(stage.writes[-1]))
        digest = manifest.digest[:12] if manifest else ""
        if job is not None:
            self._cluster.annotate(job, {"progress": f"committed as {digest}"})
            self._cluster.tell(job, "StageCommitted", f"{stage.name} is committed as {digest}")
            if seconds := job["metadata"].get("annotations", {}).get(f"{ANNOTATIONS}/ttl-seconds"):
                ttl = {"spec": {"ttlSecondsAfterFinished": int(seconds)}}
                with contextlib.suppress(UpstreamMissing):
                    self._cluster.patch_job(str(job["metadata"]["name"]), ttl)
        self._tell(f"{stage.name}: committed as {digest}")
        # Last: where the API server was away before, the next look does it all again.
        self._committed.add(stage.name)


def order(
    run: InstalledRun,
    cluster: Cluster,
    tell: Callable[[str], None],
    poll_seconds: float,
    *,
    job: str = "",
) -> None:
    """Go on until the run is committed; then write its summary.

    An API server or a store that does not answer is asked again, without end and without any
    conclusion, and one that refuses what it let pass before for a while. Raises the error of a
    stage that failed, and Stopped after SIGTERM.

    Args:
        job: the Job in whose pod this runs, where it does: what the run waits for is noted on it.
    """
    runner, patience = Runner(run, cluster, tell), Patience(cluster, tell, job)
    adopted = done = False
    while not done:
        try:
            if not patience.cancelled():
                if not adopted:
                    runner.adopt()
                    adopted = True
                done = runner.step()
                patience.rest()
        except (ServiceUnavailable, TemporaryFailure, PermissionRefused) as error:
            patience.bear(error)
        else:
            # What is at work may take days, and is not this failure's matter.
            if runner.failure and not runner.going:
                raise runner.failure
        if not done and stop_requested(poll_seconds):
            raise Stopped("runner", remedy="start it again; it goes on from what is in the store")
    if run.stages[-1].name == "evaluate":
        tell(write_summary(run.store, {}))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the runner and return its exit code: 0, or that of the stage that failed."""
    return guarded("runner", lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> None:
    parser = Parser(prog="python -m jobs.runner")
    parser.add_argument("--config", type=Path, required=True, help="the run's YAML file")
    parser.add_argument("--jobs", type=Path, required=True, help="the Jobs that the chart rendered")
    parser.add_argument("--poll-seconds", type=_seconds, default=POLL_SECONDS)
    parser.add_argument("--check", action="store_true", help="only see that the store can be used")
    found = parser.parse_args(argv)
    run = read_files(found.config, found.jobs)
    if found.check:
        run.store.probe()
        print(f"runner: {run.store.url} can be read and written", flush=True)
        return
    order(
        run,
        open_cluster(),
        lambda line: print(line, flush=True),
        found.poll_seconds,
        job=f"{run.name}-runner",
    )


def _seconds(text: str) -> float:
    """A time to wait. Raises ArgumentTypeError for what no clock can wait."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"wanted seconds above 0, found {text!r}")
    return found


if __name__ == "__main__":
    sys.exit(main())
