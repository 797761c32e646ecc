"""Acceptance arithmetic: means, intervals, repetition, divergences and what is refused."""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3.acceptance import (
    Block,
    Divergence,
    PromptResult,
    compare,
    divergences,
    draft_figures,
    first_divergence,
    refuse_changed_output,
    repeated_ngram_share,
    rounded,
    speed_figures,
)
from eagle3.errors import AcceptanceInvalid

K = 3

few = settings(max_examples=25, deadline=None)
"""Each example resamples thousands of times, on machines of any load."""


@st.composite
def answers(draw: st.DrawFn, *, min_size: int = 2) -> list[PromptResult]:
    """Answers as an engine gives them: accepted tokens never rise from one position to the next."""
    results = []
    for prompt in range(draw(st.integers(min_size, 30))):
        drafts = draw(st.integers(1, 60))
        accepted, most = [], drafts
        for _ in range(K):
            most = draw(st.integers(0, most))
            accepted.append(most)
        ids = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=20)))
        results.append(
            PromptResult(prompt=prompt, output_ids=ids, drafts=drafts, accepted=tuple(accepted))
        )
    return results


def answer(prompt: int, ids: tuple[int, ...], drafts: int = 4, accepted=(2, 1, 0)) -> PromptResult:
    return PromptResult(prompt=prompt, output_ids=ids, drafts=drafts, accepted=accepted)


@few
@given(answers())
def test_the_mean_length_is_one_plus_accepted_over_drafts_and_its_interval_holds_it(results):
    figures = draft_figures(results)
    drafts = sum(result.drafts for result in results)
    accepted = sum(sum(result.accepted) for result in results)
    assert figures.mean_length == pytest.approx(1 + accepted / drafts)
    assert figures.mean_length == pytest.approx(1 + sum(figures.per_position))
    low, high = figures.interval
    assert 1 - 1e-9 <= low <= figures.mean_length + 1e-9
    assert figures.mean_length - 1e-9 <= high <= 1 + K + 1e-9


@few
@given(answers())
def test_a_draft_compared_with_itself_differs_by_nothing_with_certainty(results):
    found = compare(results, results)
    assert found.difference == 0
    assert found.interval == (0, 0)


@few
@given(answers())
def test_prompts_that_all_accept_alike_leave_no_doubt(results):
    alike = [msgspec.structs.replace(r, drafts=8, accepted=(4, 2, 2)) for r in results]
    assert draft_figures(alike).interval == pytest.approx((2, 2))


def test_the_interval_narrows_as_the_square_root_of_the_prompts():
    def width(count: int) -> float:
        low, high = draft_figures(
            [answer(n, (1,), drafts=10, accepted=(n % 5 * 2, 0, 0)) for n in range(count)]
        ).interval
        return high - low

    assert width(100) / width(400) == pytest.approx(2, rel=0.15)


def test_the_interval_of_a_known_spread_is_the_textbook_one():
    # Half the prompts accept 0.4 tokens a draft, half 0.6: standard error 0.1 / sqrt(400).
    results = [answer(n, (1,), drafts=10, accepted=(4 + n % 2 * 2, 0, 0)) for n in range(400)]
    low, high = draft_figures(results).interval
    assert low == pytest.approx(1.5 - 1.96 * 0.005, abs=0.001)
    assert high == pytest.approx(1.5 + 1.96 * 0.005, abs=0.001)


def test_the_paired_difference_is_surer_than_its_parts():
    hard = [answer(n, (1,), drafts=10, accepted=(n % 10, 0, 0)) for n in range(60)]
    easier = [answer(n, (1,), drafts=10, accepted=(n % 10 + 1, 0, 0)) for n in range(60)]
    found = compare(easier, hard)
    assert found.difference == pytest.approx(0.1)
    assert found.interval == pytest.approx((0.1, 0.1))
    low, high = draft_figures(hard).interval
    assert high - low > 0.1


def test_acceptance_by_position_counts_drafts_not_answers():
    figures = draft_figures([answer(0, (1,), 9, (9, 3, 0)), answer(1, (1,), 1, (0, 0, 0))])
    assert figures.per_position == pytest.approx((0.9, 0.3, 0.0))


def test_an_answer_without_a_draft_counts_as_nothing():
    figures = draft_figures([answer(0, (1, 2)), answer(1, (7,), drafts=0, accepted=())])
    assert figures.drafts == 4
    assert figures.tokens == 3


def test_acceptance_of_zero_drafts_is_refused():
    with pytest.raises(AcceptanceInvalid, match="none in 3 answers"):
        draft_figures([answer(n, (1,), drafts=0, accepted=()) for n in range(3)])


def test_two_drafts_on_other_prompts_are_not_compared():
    with pytest.raises(AcceptanceInvalid, match="same 2 prompts"):
        compare([answer(0, (1,)), answer(1, (1,))], [answer(0, (1,)), answer(2, (1,))])


@few
@given(st.lists(st.integers(0, 5), max_size=40))
def test_repeated_4grams_are_those_that_stood_earlier_in_the_answer(ids):
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    for start in range(len(ids) - 3):
        gram = tuple(ids[start : start + 4])
        repeated += gram in seen
        seen.add(gram)
    share = repeated / max(len(ids) - 3, 1)
    assert repeated_ngram_share([ids]) == pytest.approx(share)


def test_repetition_across_answers_is_none():
    assert repeated_ngram_share([[1, 2, 3, 4], [1, 2, 3, 4]]) == 0
    assert repeated_ngram_share([[7] * 8]) == pytest.approx(4 / 5)
    assert repeated_ngram_share([[1, 2, 3]]) == 0


@few
@given(
    st.lists(st.integers(0, 3), max_size=12),
    st.lists(st.integers(0, 3), max_size=12),
)
def test_the_first_divergence_is_where_the_answers_part(ours, theirs):
    found = first_divergence(answer(5, tuple(ours)), answer(5, tuple(theirs)))
    if ours == theirs:
        assert found is None
        return
    assert found is not None
    at = found.position
    assert ours[:at] == theirs[:at]
    assert ours[at : at + 1] != theirs[at : at + 1]
    assert found.draft_token == (ours[at] if at < len(ours) else None)
    assert found.verifier_token == (theirs[at] if at < len(theirs) else None)


def test_divergences_are_named_by_prompt():
    plain = [answer(0, (1, 2, 3)), answer(1, (4, 5)), answer(2, (6,))]
    drafted = [answer(0, (1, 2, 3)), answer(1, (4, 9)), answer(2, (6, 7))]
    assert divergences(drafted, plain) == (
        Divergence(prompt=1, position=1, verifier_token=5, draft_token=9),
        Divergence(prompt=2, position=1, verifier_token=None, draft_token=7),
    )


def diverged(gap: float | None) -> Divergence:
    return Divergence(prompt=3, position=7, verifier_token=10, draft_token=11, gap=gap)


def test_no_divergence_is_refused_in_no_dtype():
    for dtype in ("float32", "bfloat16"):
        refuse_changed_output([], dtype=dtype, near_tie=0.1, compared=64)


@few
@given(st.floats(-0.0999, 0.0999))
def test_in_bfloat16_a_near_tie_may_go_either_way(gap):
    refuse_changed_output([diverged(gap)], dtype="bfloat16", near_tie=0.1, compared=64)


@few
@given(st.floats(0, 5))
def test_in_float32_not_even_a_near_tie_is_allowed(gap):
    with pytest.raises(AcceptanceInvalid):
        refuse_changed_output([diverged(gap)], dtype="float32", near_tie=0.1, compared=64)


def test_in_bfloat16_a_wide_gap_is_refused_and_the_widest_is_named():
    found = [diverged(0.05), diverged(0.3), diverged(-2.5)]
    with pytest.raises(AcceptanceInvalid, match=r"2 that differ.*2\.5 nats apart"):
        refuse_changed_output(found, dtype="bfloat16", near_tie=0.1, compared=64)


def test_an_answer_that_ends_early_is_no_near_tie():
    with pytest.raises(AcceptanceInvalid, match="where one answer ended"):
        refuse_changed_output([diverged(None)], dtype="bfloat16", near_tie=0.1, compared=64)


def timed(prompts: tuple[int, ...], seconds: float, host: str = "here", tokens: int = 10) -> Block:
    results = tuple(answer(prompt, tuple(range(tokens))) for prompt in prompts)
    return Block(engine="any", seconds=seconds, host=host, attempt=host, results=results)


def test_speed_is_measured_on_the_prompts_that_both_engines_answered():
    drafted = [timed((0, 1), 1.0), timed((2, 3), 1.0), timed((4,), 99.0)]
    plain = [timed((0, 1), 2.0), timed((2, 3), 2.0)]
    found = speed_figures(2, drafted, plain)
    assert (found.with_draft, found.without) == (20, 10)
    assert found.speedup == 2
    assert found.interval == pytest.approx((2, 2))
    assert found.prompts == 4


def test_one_block_gives_a_speed_without_an_interval():
    assert speed_figures(1, [timed((0,), 1.0)], [timed((0,), 4.0)]).interval is None


def test_times_of_two_machines_make_no_speed():
    drafted = [timed((0,), 1.0), timed((1,), 1.0)]
    plain = [timed((0,), 2.0), timed((1,), 2.0, "there")]
    with pytest.raises(AcceptanceInvalid, match="of here, there"):
        speed_figures(1, drafted, plain)


def test_speeds_of_other_blocks_are_not_compared():
    with pytest.raises(AcceptanceInvalid, match="speed at batch 2"):
        speed_figures(2, [timed((0, 1), 1.0)], [timed((0, 2), 2.0)])


def test_rounding_reaches_every_float_and_nothing_else():
    value = {"a": [1 / 3, 2], "b": {"c": (math.pi,)}, "d": "1.23456789", "e": None}
    assert rounded(value, 3) == {"a": [0.333, 2], "b": {"c": [3.142]}, "d": "1.23456789", "e": None}
