"""What an evaluation asks which engine, and what the answers come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from eagle3 import acceptance
from eagle3.acceptance import Divergence, Figures, PromptResult
from eagle3.answers import Answers, BlockKey, covering, cut_blocks
from eagle3.config import EvaluateConfig
from eagle3.conversations import HeldoutPrompt
from eagle3.errors import AcceptanceInvalid, ConfigError

TRAINED, UNTRAINED, PLAIN = "trained", "untrained", "plain"
"""The engines: with the trained draft, with the draft before its first step, without any."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The prompts, and the blocks in which each engine answers them.

    The engines with a draft answer all prompts together; the plain one only the blocks that are
    compared. The trained and the plain one answer some prompts alone too, to be timed.
    """

    settings: EvaluateConfig
    prompts: tuple[HeldoutPrompt, ...]
    together: tuple[BlockKey, ...]
    alone: tuple[BlockKey, ...]
    untrained: bool

    @property
    def compared(self) -> tuple[BlockKey, ...]:
        """The blocks that hold the prompts whose answers are compared."""
        return covering(self.together, self.settings.lossless_prompts)

    @property
    def timed_together(self) -> tuple[BlockKey, ...]:
        """Those compared blocks that are full, so that each timed the same batch size."""
        return tuple(block for block in self.compared if len(block) == len(self.together[0]))

    @property
    def blocks(self) -> dict[str, tuple[BlockKey, ...]]:
        """Engine -> what it answers, in the order in which the engines run: the plain one last,
        since it also scores where answers part."""
        found = {TRAINED: _each_once(self.together + self.alone)}
        if self.untrained:
            found[UNTRAINED] = self.together
        return {**found, PLAIN: _each_once(self.compared + self.alone)}

    @property
    def num_answers(self) -> int:
        """All answers of all engines."""
        return sum(len(block) for blocks in self.blocks.values() for block in blocks)

    @property
    def max_model_len(self) -> int:
        """Tokens: the longest prompt, its answer, and a draft that reaches past the answer."""
        longest = max(len(prompt.input_ids) for prompt in self.prompts)
        return longest + self.settings.max_new_tokens + self.settings.num_speculative_tokens + 1


def make_plan(
    settings: EvaluateConfig, prompts: Sequence[HeldoutPrompt], *, untrained: bool, where: str
) -> Plan:
    """Choose the prompts and cut them into blocks.

    Args:
        prompts: every held-out prompt there is.
        untrained: whether there is an untrained draft.
        where: the prompts' place, for an error.

    Raises AcceptanceInvalid where there are fewer prompts than asked for, ConfigError where more
    are to be compared or timed than answered.
    """
    for field in ("lossless_prompts", "speed_prompts"):
        if getattr(settings, field) > settings.num_prompts:
            raise ConfigError(
                f"evaluate.{field}",
                wanted=f"at most evaluate.num_prompts, {settings.num_prompts}",
                found=getattr(settings, field),
                remedy="lower it, or raise evaluate.num_prompts",
            )
    if len(prompts) < settings.num_prompts:
        raise AcceptanceInvalid(
            "evaluate.num_prompts",
            wanted=f"{settings.num_prompts} held-out prompts",
            found=f"{len(prompts)} in {where}",
            remedy="raise prepare.heldout_share, or lower evaluate.num_prompts",
        )
    return Plan(
        settings=settings,
        prompts=tuple(prompts[: settings.num_prompts]),
        together=cut_blocks(settings.num_prompts, settings.concurrency),
        alone=cut_blocks(settings.speed_prompts, 1),
        untrained=untrained and settings.compare_untrained,
    )


def timed_elsewhere(
    plan: Plan, answers: Mapping[str, Answers], host: str
) -> dict[str, list[BlockKey]]:
    """Engine -> the blocks that it has to answer once more, for their time was taken elsewhere.

    A speed compares two engines, and says nothing where one ran on another machine. Where such a
    comparison is not finished it will be on this host, all of it.
    """
    again: dict[str, list[BlockKey]] = {TRAINED: [], PLAIN: []}
    for blocks in _timed(plan):
        known = {name: answers[name].known(blocks) for name in again}
        hosts = {block.host for found in known.values() for block in found}
        finished = all(len(found) == len(blocks) for found in known.values())
        if finished and len(hosts) == 1:
            continue
        for name, found in known.items():
            again[name] += [block.key for block in found if block.host != host]
    return again


def find_divergences(plan: Plan, answers: Mapping[str, Answers]) -> tuple[Divergence, ...]:
    """Where answers with the trained draft leave the plain ones, over the prompts compared."""
    count = plan.settings.lossless_prompts
    return acceptance.divergences(
        answers[TRAINED].results(plan.compared, count), answers[PLAIN].results(plan.compared, count)
    )


def conclude(plan: Plan, answers: Mapping[str, Answers], found: Sequence[Divergence]) -> Figures:
    """What the answers come to.

    Args:
        found: the divergences, scored.

    Raises AcceptanceInvalid where the draft changed the output, or where nothing was drafted.
    """
    settings = plan.settings
    dtype, near_tie = settings.engine.dtype, settings.near_tie
    acceptance.refuse_changed_output(
        found, dtype=dtype, near_tie=near_tie, compared=settings.lossless_prompts
    )
    trained = _drafted(plan, answers[TRAINED])
    untrained = _drafted(plan, answers[UNTRAINED]) if plan.untrained else None
    return Figures(
        heldout_prompts=len(trained),
        max_new_tokens=settings.max_new_tokens,
        num_speculative_tokens=settings.num_speculative_tokens,
        dtype=dtype,
        trained=acceptance.draft_figures(trained),
        untrained=acceptance.draft_figures(untrained) if untrained else None,
        comparison=acceptance.compare(trained, untrained) if untrained else None,
        speed=tuple(
            acceptance.speed_figures(
                len(blocks[0]), answers[TRAINED].of(blocks), answers[PLAIN].of(blocks)
            )
            for blocks in _timed(plan)
        ),
        # Anything else has been refused above.
        lossless=True,
        lossless_prompts=settings.lossless_prompts,
        near_tie=near_tie,
        divergences=tuple(found),
    )


def encode_figures(figures: Figures, plan: Plan, trained: Answers) -> bytes:
    """`acceptance.json`: the figures, and each prompt's own part in them."""
    record = msgspec.to_builtins(figures)
    record["prompts"] = [
        {
            "conversation": plan.prompts[result.prompt].conversation,
            "tokens": len(result.output_ids),
            "drafts": result.drafts,
            "accepted": list(result.accepted),
            "repeated_4gram_share": acceptance.repeated_ngram_share([result.output_ids]),
        }
        for result in _drafted(plan, trained)
    ]
    return msgspec.json.format(msgspec.json.encode(acceptance.rounded(record)), indent=1) + b"\n"


def facts_of(figures: Figures) -> dict[str, Any]:
    """The figures that do not hang on how fast the machine was."""
    facts: dict[str, Any] = {
        "acceptance_length_trained": figures.trained.mean_length,
        "acceptance_length_interval": figures.trained.interval,
        "acceptance_per_position": figures.trained.per_position,
        "drafts": figures.trained.drafts,
        "repeated_4gram_share": figures.trained.repeated_4gram_share,
        "heldout_prompts": figures.heldout_prompts,
        "num_speculative_tokens": figures.num_speculative_tokens,
        "lossless": figures.lossless,
        "lossless_prompts": figures.lossless_prompts,
        "near_tie_divergences": len(figures.divergences),
    }
    if figures.untrained is not None and figures.comparison is not None:
        facts |= {
            "acceptance_length_untrained": figures.untrained.mean_length,
            "acceptance_length_difference": figures.comparison.difference,
            "acceptance_length_difference_interval": figures.comparison.interval,
        }
    return dict(acceptance.rounded(facts))


def rates_of(figures: Figures) -> dict[str, float]:
    """Tokens per second and speedups: at batch 1 under plain names, at others with the size."""
    rates: dict[str, float] = {}
    for speed in figures.speed:
        suffix = "" if speed.batch == 1 else f"_batch_{speed.batch}"
        rates[f"tokens_per_second_with_draft{suffix}"] = speed.with_draft
        rates[f"tokens_per_second_without{suffix}"] = speed.without
        rates[f"speedup{suffix}"] = speed.speedup
    return dict(acceptance.rounded(rates, 3))


def _drafted(plan: Plan, answers: Answers) -> list[PromptResult]:
    return answers.results(plan.together, plan.settings.num_prompts)


def _each_once(blocks: tuple[BlockKey, ...]) -> tuple[BlockKey, ...]:
    return tuple(dict.fromkeys(blocks))


def _timed(plan: Plan) -> list[tuple[BlockKey, ...]]:
    """One at a time, and together where that is not the same."""
    return [plan.alone] + ([plan.timed_together] if len(plan.together[0]) > 1 else [])
