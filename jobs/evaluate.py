"""evaluate: how much of the draft a real vLLM accepts, how fast that is, and whether it lies.

Three engines answer the same held-out prompts greedily, one after the other: with the trained
draft, with the untrained one, and without any. Every finished block of prompts is kept, so a
killed evaluation goes on where it was. Writes `acceptance.json` and `report.html`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec
from rich.console import Console

from eagle3 import artifact as artifacts
from eagle3.acceptance import Divergence, Figures
from eagle3.answers import Answers, Clock, LazyEngine, answer_missing, score_gaps
from eagle3.artifact import Artifact
from eagle3.capture import SpeculativeGenerator
from eagle3.config import name_when_served
from eagle3.conversations import read_heldout
from eagle3.evaluation import (
    PLAIN,
    TRAINED,
    UNTRAINED,
    Plan,
    conclude,
    encode_figures,
    facts_of,
    find_divergences,
    make_plan,
    rates_of,
    timed_elsewhere,
)
from eagle3.lineage import refuse_trained_on, walk
from eagle3.manifest import Manifest
from eagle3.report import gather, render
from eagle3.report.terminal import show
from eagle3.verifier import reopen_verifier
from eagle3.vllm_capture import EngineOptions, VllmGenerator
from jobs.process import StageRun, run_stage

FIGURES_NAME, REPORT_NAME = "acceptance.json", "report.html"
_UNTRAINED_FOLDER = "untrained"
_WITH = {
    TRAINED: "with the trained draft",
    UNTRAINED: "with the untrained draft",
    PLAIN: "without a draft",
}


class Engines(Protocol):
    """Starts engines by name: trained, untrained or plain."""

    def __init__(self, run: StageRun, plan: Plan, scratch: Path) -> None: ...

    def start(self, name: str) -> SpeculativeGenerator:
        """A running engine, with the draft that the name asks for."""


class VllmEngines:
    """vLLM on the verifier, with an exported draft or without one."""

    def __init__(self, run: StageRun, plan: Plan, scratch: Path) -> None:
        self._run, self._plan, self._scratch = run, plan, scratch

    def start(self, name: str) -> SpeculativeGenerator:
        """See `Engines.start`. Raises VerifierInvalid, ManifestInvalid for other bytes."""
        export = self._run.inputs["export"]
        draft = None if name == PLAIN else draft_folder(export, self._scratch / "export", name)
        count = self._plan.settings.num_speculative_tokens
        options = self._options
        self._run.say(f"starting vLLM {_WITH[name]}")
        return VllmGenerator(options, draft=draft, num_speculative_tokens=count)

    @functools.cached_property
    def _options(self) -> EngineOptions:
        verifier = reopen_verifier(self._run.config.verifier, self._run.inputs["verifier"])
        settings = self._plan.settings
        together = max(settings.engine.max_num_seqs, settings.concurrency)
        return EngineOptions.of(
            msgspec.structs.replace(settings.engine, max_num_seqs=together),
            model=verifier.local_folder(self._scratch),
            max_model_len=self._plan.max_model_len,
            trust_remote_code=self._run.config.verifier.trust_remote_code,
            between_steps=self._run.check_stop,
        )


def story(run: StageRun, engines: type[Engines] = VllmEngines) -> str:
    """Check the split, ask the engines, conclude, write, commit."""
    identity = run.claim()
    if done := run.committed(identity):
        length = done.manifest.facts["acceptance_length_trained"]
        return f"already committed, acceptance length {length:.2f}"
    source, settings = run.inputs["prompts"].store, run.config.evaluate
    plan = make_plan(
        settings,
        read_heldout(run.inputs["prompts"]),
        untrained=has_untrained(run.inputs["export"]),
        where=source.url,
    )
    lineage = walk([run.inputs["export"]])
    refuse_trained_on({prompt.conversation for prompt in plan.prompts}, lineage)
    answers, found = ask_all(run, plan, engines)
    figures = conclude(plan, answers, found)
    show(figures, Console())
    verifier = name_when_served(run.config.verifier)
    write(
        run,
        identity,
        figures,
        {
            FIGURES_NAME: encode_figures(figures, plan, answers[TRAINED]),
            REPORT_NAME: render(gather(figures, lineage, verifier)).encode(),
        },
    )
    return (
        f"acceptance length {figures.trained.mean_length:.2f} on {figures.heldout_prompts} "
        f"held-out prompts, see {run.output().url}/{REPORT_NAME}"
    )


def ask_all(
    run: StageRun, plan: Plan, engines: type[Engines]
) -> tuple[dict[str, Answers], tuple[Divergence, ...]]:
    """Let each engine answer what it has not answered yet, and score where answers part."""
    work = run.work.own
    answers, clock = {name: Answers(work, name) for name in plan.blocks}, Clock()
    for name, stale in timed_elsewhere(plan, answers, clock.host).items():
        answers[name].forget(stale)
    prompts = [prompt.input_ids for prompt in plan.prompts]
    scored: tuple[Divergence, ...] = ()
    with (
        run.scratch() as scratch,
        run.progress("answer", total=plan.num_answers, unit="prompts") as progress,
    ):
        starter = engines(run, plan, scratch)
        for name, blocks in plan.blocks.items():
            missing = answers[name].missing(blocks)
            progress.advance(sum(map(len, {*blocks} - {*missing})), resumed=True, note=name)
            with LazyEngine(functools.partial(starter.start, name)) as engine:
                for block in answer_missing(
                    engine,
                    answers[name],
                    missing,
                    prompts,
                    max_tokens=plan.settings.max_new_tokens,
                    clock=clock,
                ):
                    progress.advance(len(block), note=name)
                    run.check_stop()
                if name == PLAIN:
                    found = find_divergences(plan, answers)
                    plain = answers[PLAIN].results(plan.compared, plan.settings.num_prompts)
                    scored = score_gaps(engine, work, found, prompts, plain)
    return answers, scored


def write(run: StageRun, identity: str, figures: Figures, objects: dict[str, bytes]) -> None:
    """Write the objects and commit the manifest that names them."""
    run.work.check_held()
    files = tuple(
        artifacts.put(run.output(), path, data, timed=True) for path, data in objects.items()
    )
    source = run.inputs["verifier"].manifest
    run.commit(
        Manifest(
            artifact="evaluate",
            identity=identity,
            files=files,
            rows_in=figures.heldout_prompts,
            rows_kept=figures.heldout_prompts,
            verifier=source.verifier,
            tokenizer=source.tokenizer,
            facts=facts_of(figures),
            measured=rates_of(figures),
        )
    )


def has_untrained(export: Artifact) -> bool:
    """Whether the untrained draft was exported too."""
    return any(entry.path.startswith(f"{_UNTRAINED_FOLDER}/") for entry in export.manifest.files)


def draft_folder(export: Artifact, scratch: Path, name: str) -> Path:
    """The local folder of an exported draft, every byte of it checked. Raises ManifestInvalid."""
    export.refuse_strangers(".safetensors")
    for entry in export.manifest.files:
        export.local(entry.path, scratch)
    root = export.store.local_path() or scratch
    return root / _UNTRAINED_FOLDER if name == UNTRAINED else root


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stage as this process."""
    return run_stage("evaluate", story, argv)


if __name__ == "__main__":
    sys.exit(main())
