"""What the engines answered, kept so that a killed evaluation goes on where it was.

Prompts are answered in blocks: together, as a server under load would, or alone, to time one
request at a time. Each finished block is one object `answers/<engine>/...` of the stage's work,
with its answers, vLLM's counts of them, the seconds they took and on which machine.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from types import TracebackType
from typing import TypeVar

import msgspec

from eagle3 import strict_json
from eagle3.acceptance import Block, Divergence, PromptResult
from eagle3.capture import Completion, Sampling, SpecCounters, SpeculativeGenerator, Told, nobody
from eagle3.errors import AcceptanceInvalid, ManifestInvalid
from eagle3.progress import host_name
from eagle3.store import Store

BlockKey = tuple[int, ...]
T = TypeVar("T")

# The first request of an engine pays for caches and kernels that no later one pays for.
_WARM_UP_TOKENS = 8
# A token outside the most probable 20 is no near tie.
_TOP_LOGPROBS = 20
_SCORES_NAME = "divergences.json"


def cut_blocks(num_prompts: int, concurrency: int) -> tuple[BlockKey, ...]:
    """Prompts 0 to `num_prompts` in blocks that are answered together; the last may be smaller."""
    starts = range(0, num_prompts, concurrency)
    return tuple(tuple(range(at, min(at + concurrency, num_prompts))) for at in starts)


def covering(blocks: Iterable[BlockKey], num_prompts: int) -> tuple[BlockKey, ...]:
    """The blocks that hold the first `num_prompts` prompts, whole."""
    return tuple(block for block in blocks if block[0] < num_prompts)


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Who takes the time: this machine, and this process among those of an evaluation."""

    host: str = field(default_factory=host_name)
    attempt: str = field(default_factory=lambda: secrets.token_hex(8))


class Answers:
    """The blocks that one engine has answered."""

    def __init__(self, work: Store, engine: str) -> None:
        """Args: work: what is done under evaluate's claim. engine: its word in the paths."""
        self.engine = engine
        self._store = work.child(f"answers/{engine}")
        self._blocks = {block.key: block for block in self._read_all()}

    def missing(self, blocks: Iterable[BlockKey]) -> list[BlockKey]:
        """Those of the blocks that are still to be answered."""
        return [block for block in blocks if block not in self._blocks]

    def known(self, blocks: Iterable[BlockKey]) -> list[Block]:
        """Those of the blocks that have been answered."""
        return [self._blocks[block] for block in blocks if block in self._blocks]

    def forget(self, blocks: Iterable[BlockKey]) -> None:
        """Count the blocks as not answered; what was recorded of them will be replaced."""
        for block in blocks:
            self._blocks.pop(block, None)

    def of(self, blocks: Iterable[BlockKey]) -> list[Block]:
        """The blocks, all of which have been answered."""
        return [self._blocks[block] for block in blocks]

    def results(self, blocks: Iterable[BlockKey], num_prompts: int) -> list[PromptResult]:
        """The answers to the first `num_prompts` prompts, in their order."""
        found = [result for block in self.of(blocks) for result in block.results]
        return sorted(found, key=lambda result: result.prompt)[:num_prompts]

    def record(self, block: Block) -> None:
        """Keep a finished block."""
        path = f"{len(block.results):04d}-{block.key[0]:06d}.json"
        self._store.write_bytes(path, msgspec.json.encode(block))
        self._blocks[block.key] = block

    def _read_all(self) -> list[Block]:
        return [_decoded(self._store, info.path, Block) for info in self._store.list()]


class LazyEngine:
    """An engine that is started when it is first asked, as a context manager that stops it.

    Starting takes half a minute and more, and a resumed evaluation may need none of it.
    """

    def __init__(self, start: Callable[[], SpeculativeGenerator]) -> None:
        self._start = start
        self._engine: SpeculativeGenerator | None = None

    def __enter__(self) -> LazyEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._engine is not None:
            self._engine.close()

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, told: Told = nobody
    ) -> list[Completion]:
        """Answer the prompts as one unit of work; the clock of no caller sees the start."""
        return self._started().generate(prompts, sampling, told)

    def counters(self) -> SpecCounters:
        """See `SpeculativeGenerator.counters`."""
        return self._started().counters()

    def _started(self) -> SpeculativeGenerator:
        if self._engine is None:
            self._engine = self._start()
        return self._engine


def answer_missing(
    engine: LazyEngine,
    answers: Answers,
    blocks: Iterable[BlockKey],
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    clock: Clock,
) -> Iterator[BlockKey]:
    """Let the engine answer the blocks that it has not answered yet, each recorded when yielded.

    Args:
        prompts: token ids of every prompt; a block names its prompts by place.

    Raises AcceptanceInvalid where what the engine counts of each answer and what it counts of
    itself do not agree.
    """
    missing = answers.missing(blocks)
    if missing:
        first = prompts[missing[0][0]]
        engine.generate([first], Sampling(max_tokens=_WARM_UP_TOKENS, ignore_end=True))
    for block in missing:
        asked, before = [prompts[prompt] for prompt in block], engine.counters()
        begun = time.perf_counter()
        completions = engine.generate(asked, Sampling(max_tokens=max_tokens))
        seconds = time.perf_counter() - begun
        results = tuple(_result(*pair) for pair in zip(block, completions, strict=True))
        _check_counts(answers.engine, results, engine.counters().since(before))
        answers.record(
            Block(
                engine=answers.engine,
                seconds=seconds,
                host=clock.host,
                attempt=clock.attempt,
                results=results,
            )
        )
        yield block


def _check_counts(name: str, results: Sequence[PromptResult], engine: SpecCounters) -> None:
    """The answers' own counts add up to the engine's: acceptance rests on nothing else."""
    drafts = sum(result.drafts for result in results)
    columns = zip_longest(*(result.accepted for result in results), fillvalue=0)
    accepted = [sum(column) for column in columns]
    per_position = zip_longest(accepted, engine.accepted_per_pos, fillvalue=0)
    totals = (engine.num_drafts, engine.num_accepted_tokens)
    if (drafts, sum(accepted)) != totals or any(ours != theirs for ours, theirs in per_position):
        raise AcceptanceInvalid(
            f"evaluate: counts of the {name} engine",
            wanted=f"{engine.num_drafts} drafts and {list(engine.accepted_per_pos)} accepted, as"
            " it counts of itself",
            found=f"{drafts} and {accepted} in its {len(results)} answers",
            remedy="install the version of vLLM that eagle3 pins",
        )


def score_gaps(
    engine: LazyEngine,
    work: Store,
    found: Sequence[Divergence],
    prompts: Sequence[Sequence[int]],
    plain: Sequence[PromptResult],
) -> tuple[Divergence, ...]:
    """Each divergence with its gap, scored by the engine without a draft.

    The engine is given the prompt and the answer up to the divergence and says how probable
    either token is next. A token beyond its 20 most probable counts as the least of them, so the
    gap is then a lower bound. Scored once and kept.
    """
    if (scored := _recorded_gaps(work, found)) is None:
        scored = tuple(_scored(engine, item, prompts, plain) for item in found)
        work.write_bytes(_SCORES_NAME, msgspec.json.encode(scored))
    return scored


def _scored(
    engine: LazyEngine,
    item: Divergence,
    prompts: Sequence[Sequence[int]],
    plain: Sequence[PromptResult],
) -> Divergence:
    if item.verifier_token is None or item.draft_token is None:
        return item
    answer = next(result for result in plain if result.prompt == item.prompt)
    history = [*prompts[item.prompt], *answer.output_ids[: item.position]]
    sampling = Sampling(max_tokens=1, num_top_logprobs=_TOP_LOGPROBS, ignore_end=True)
    (completion,) = engine.generate([history], sampling)
    (shown,) = completion.top_logprobs
    least = min(shown.values())
    gap = shown.get(item.verifier_token, least) - shown.get(item.draft_token, least)
    return msgspec.structs.replace(item, gap=gap)


def _recorded_gaps(work: Store, found: Sequence[Divergence]) -> tuple[Divergence, ...] | None:
    """The divergences as they were scored before, or None where they were not, or were others."""
    if not work.exists(_SCORES_NAME):
        return None
    scored = _decoded(work, _SCORES_NAME, tuple[Divergence, ...])
    bare = tuple(msgspec.structs.replace(item, gap=None) for item in scored)
    return scored if bare == tuple(found) else None


def _result(prompt: int, completion: Completion) -> PromptResult:
    """An answer with vLLM's own counts: how many steps accepted 0, 1, 2 ... draft tokens."""
    steps = completion.accepted_histogram
    return PromptResult(
        prompt=prompt,
        output_ids=tuple(completion.token_ids),
        drafts=sum(steps),
        accepted=tuple(sum(steps[at:]) for at in range(1, len(steps))),
    )


def _decoded(store: Store, path: str, kind: type[T]) -> T:
    try:
        return strict_json.decode(store.read_bytes(path), kind)
    except msgspec.DecodeError as error:
        raise ManifestInvalid(
            f"{store.url}/{path}",
            wanted="answers of an evaluation",
            found=error,
            remedy="delete it and run evaluate again",
        ) from error
