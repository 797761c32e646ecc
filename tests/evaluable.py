"""A run that is ready to be evaluated, and scripted engines to answer in it.

Everything upstream of evaluate is there, tiny but whole; the engines answer by arithmetic, so that
every figure of an evaluation is known beforehand.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from eagle3 import artifact as artifacts
from eagle3.artifact import Artifact
from eagle3.capture import Completion, Sampling, SpecCounters, Told, nobody
from eagle3.config import EngineConfig, EvaluateConfig, PrepareConfig, RunConfig, VerifierConfig
from eagle3.conversations import HeldoutPrompt, RowRecord
from eagle3.conversations.records import encode_lines
from eagle3.evaluation import PLAIN, TRAINED
from eagle3.manifest import FileEntry, Manifest, TokenizerFacts, VerifierFacts
from eagle3.stages import stage_named
from eagle3.store import open_store
from jobs.process import StageRun, gate_inputs

VERIFIER = VerifierFacts(fingerprint="f", num_hidden_layers=8, hidden_size=64, vocab_size=512)
TOKENIZER = TokenizerFacts(fingerprint="t", size=300)
K = 3


class Killed(BaseException):
    """What kill -9 looks like from inside: nothing handles it."""


class Scripted:
    """Engines that answer by arithmetic, behind the evaluate story's `Engines` protocol.

    A step of the trained draft accepts two tokens, one of the untrained none. Class attributes
    are the script: `changed` maps a prompt to the place where the trained answer leaves the
    verifier's, `gap` is how far apart the verifier finds the two tokens there, `miscounted` the
    drafts that an engine counts of itself beyond those of its answers.
    """

    changed: ClassVar[dict[int, int]] = {}
    gap: ClassVar[float] = 0.01
    silent: ClassVar[bool] = False
    miscounted: ClassVar[int] = 0
    kill_after: ClassVar[int | None] = None
    log: ClassVar[list[str]] = []

    def __init__(self, run: StageRun, plan, scratch: Path) -> None:
        self.prompts = [prompt.input_ids for prompt in plan.prompts]

    def start(self, name: str) -> "ScriptedEngine":
        self.log.append(f"start {name}")
        return ScriptedEngine(self, name)


def asked(log: Sequence[str]) -> list[str]:
    """The blocks that engines were asked for, out of a script's log."""
    return [line for line in log if line.split()[0] not in ("start", "stop")]


class ScriptedEngine:
    def __init__(self, script: Scripted, name: str) -> None:
        self.script, self.name = script, name
        self.histogram = [0] * (K + 1)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, told: Told = nobody
    ) -> list[Completion]:
        if sampling.num_top_logprobs:
            return [self.score(prompt) for prompt in prompts]
        if not sampling.ignore_end:
            if self.script.kill_after == len(asked(self.script.log)):
                raise Killed
            self.script.log.append(f"{self.name} {len(prompts)}")
        answers = [self.answer(prompt, sampling) for prompt in prompts]
        for answer in answers:
            for at, steps in enumerate(answer.accepted_histogram):
                self.histogram[at] += steps
        self.histogram[0] += self.script.miscounted
        return answers

    def counters(self) -> SpecCounters:
        per_position = tuple(sum(self.histogram[at:]) for at in range(1, K + 1))
        drafts = sum(self.histogram)
        return SpecCounters(drafts, K * drafts, sum(per_position), per_position)

    def answer(self, prompt: Sequence[int], sampling: Sampling) -> Completion:
        ids = [(prompt[0] * 7 + at * at) % 100 for at in range(sampling.max_tokens)]
        if self.name == TRAINED and prompt[0] in self.script.changed:
            ids[self.script.changed[prompt[0]]] = 500
        steps = (0, 0, 4 + prompt[0] % 2, 0) if self.name == TRAINED else (len(ids), 0, 0, 0)
        if self.name == PLAIN or self.script.silent:
            steps = ()
        return Completion(tuple(ids), "length", (), steps)

    def score(self, history: Sequence[int]) -> Completion:
        at = len(history) - len(self.script.prompts[history[0]])
        own = (history[0] * 7 + at * at) % 100
        return Completion((own,), "length", ({own: -0.5, 500: -0.5 - self.script.gap},))

    def close(self) -> None:
        self.script.log.append(f"stop {self.name}")


class World:
    """A run's store with everything upstream of evaluate, tiny but whole."""

    def __init__(self, root: str, *, heldout: int = 10, untrained: bool = True) -> None:
        self.store = open_store(root)
        self.made: dict[str, Artifact] = {}
        rows = [self.row(f"{i:032x}") for i in range(100, 120)]
        prompts = [self.prompt(i) for i in range(heldout)]
        self.make("verifier", (), {"config.json": b"{}"})
        self.make(
            "prepare",
            (),
            {"rows-000000.jsonl": encode_lines(rows), "heldout.jsonl": encode_lines(prompts)},
        )
        self.make("extract", ("prepare", "verifier"), {"hidden-000000.safetensors": b"states"})
        self.make(
            "vocab",
            ("prepare", "verifier"),
            {"coverage.json": b'{"curve": [[16, 0.5], [64, 0.9]]}'},
            facts={"draft_vocab_size": 64, "coverage": 0.9},
        )
        line = b'{"kind": "train", "step": 1, "loss": 4.5}\n'
        self.make("train", ("extract", "vocab", "verifier"), {"metrics.jsonl": line})
        drafts = {"config.json": b"{}", "model.safetensors": b"weights"}
        if untrained:
            drafts |= {"untrained/config.json": b"{}", "untrained/model.safetensors": b"zeros"}
        self.make("export", ("train", "vocab", "verifier"), drafts)

    @staticmethod
    def row(conversation: str) -> RowRecord:
        return RowRecord(row="000000000.0", conversation=conversation, source=0, messages=[])

    @staticmethod
    def prompt(place: int) -> HeldoutPrompt:
        ids = [place, *range(place % 3 + 1)]
        return HeldoutPrompt(
            row=f"{place:09d}.0", conversation=f"{place:032x}", messages=[], input_ids=ids
        )

    def make(
        self, kind: str, inputs: tuple[str, ...], objects: dict[str, bytes], facts=None
    ) -> Artifact:
        prefix = self.store.child(kind)
        files = []
        for path, data in objects.items():
            prefix.write_bytes(path, data)
            files.append(FileEntry(path=path, bytes=len(data), sha256=prefix.sha256(path)))
        manifest = Manifest(
            artifact=kind,
            identity=kind,
            files=tuple(files),
            inputs={name: self.made[name].ref() for name in inputs},
            verifier=VERIFIER,
            tokenizer=TOKENIZER,
            facts=facts or {},
        )
        self.made[kind] = artifacts.commit(prefix, manifest)
        return self.made[kind]

    @staticmethod
    def config(inputs: dict[str, str] | None = None, **evaluate) -> RunConfig:
        settings = {
            "num_prompts": 10,
            "max_new_tokens": 16,
            "num_speculative_tokens": K,
            "concurrency": 4,
            "speed_prompts": 3,
            "lossless_prompts": 6,
            "engine": EngineConfig(dtype="float32"),
        }
        return RunConfig(
            verifier=VerifierConfig(source="nowhere", serving_name="some/verifier"),
            prepare=PrepareConfig(data=("nowhere.jsonl",)),
            inputs=inputs or {},
            evaluate=EvaluateConfig(**{**settings, **evaluate}),
        )

    def run(self, inputs: dict[str, str] | None = None, **evaluate) -> StageRun:
        config, stage = self.config(inputs, **evaluate), stage_named("evaluate")
        return StageRun(
            stage=stage,
            config=config,
            store=self.store,
            inputs=gate_inputs(config, self.store, stage),
        )

    def written(self) -> dict:
        return json.loads(self.store.read_bytes("evaluate/acceptance.json"))
