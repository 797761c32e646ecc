"""Coverage: the same tokens as the mapping's, the smallest sizes, and when to suggest another."""

import io
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from eagle3.coverage import advice, coverage, coverage_by_size, show
from eagle3.errors import MappingInvalid
from eagle3.vocab import Mapping, build_mapping, counts_from_dict

V = 1024

# A busy machine is no failure.
calm = settings(deadline=None, max_examples=60)
count_dicts = st.dictionaries(st.integers(0, V - 1), st.integers(1, 50), min_size=1)
required_sets = st.sets(st.integers(0, V - 1), max_size=3)


def counts_of(counts: dict[int, int]) -> torch.Tensor:
    return counts_from_dict(counts, V)


def falling(num: int, times: int = 1) -> torch.Tensor:
    """Token i occurs `times * num // (i + 1)` times, as words in texts do; V counts."""
    return counts_of({i: max(1, times * num // (i + 1)) for i in range(num)})


def test_it_is_the_share_of_occurrences_not_of_distinct_tokens() -> None:
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[[5, 7]] = True
    mapping = Mapping(t2d=t2d, d2t=torch.tensor([5, 6]))
    assert coverage(counts_of({5: 90, 6: 9, 7: 1}), mapping) == pytest.approx(0.91)
    found = coverage_by_size(counts_of({5: 90, 6: 9, 7: 1}), 4, (0, 1, 2))
    assert (found.share, found.seen_once) == (0.9, 1)


@calm
@given(count_dicts, st.integers(3, V), required_sets)
def test_each_size_covers_what_its_mapping_covers(
    counts: dict[int, int], size: int, required: set[int]
) -> None:
    tensor = counts_of(counts)
    found = coverage_by_size(tensor, size, required)
    assert found.share == pytest.approx(coverage(tensor, build_mapping(tensor, size, required)))
    for at, share in found.curve[:: max(1, len(found.curve) // 3)]:
        assert share == pytest.approx(coverage(tensor, build_mapping(tensor, at, required)))


@calm
@given(count_dicts, st.integers(3, V), required_sets)
def test_no_smaller_size_covers_as_much(
    counts: dict[int, int], size: int, required: set[int]
) -> None:
    tensor = counts_of(counts)
    for share, least in coverage_by_size(tensor, size, required).smallest.items():
        assert coverage(tensor, build_mapping(tensor, least, required)) >= share - 1e-12
        if least > max(1, len(required)):
            assert coverage(tensor, build_mapping(tensor, least - 1, required)) < share


def test_the_curve_has_powers_of_two_the_size_the_whole_and_the_smallest_sizes() -> None:
    found = coverage_by_size(falling(900), 300, range(3))
    assert found.smallest.keys() == {0.9, 0.95, 0.99, 0.999}
    sizes = [size for size, _ in found.curve]
    assert sizes == sorted({256, 512, 1024, 300, *found.smallest.values()})
    shares = [share for _, share in found.curve]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_sizes_that_cannot_hold_the_required_ids_are_left_out() -> None:
    found = coverage_by_size(falling(900), 400, range(600, 900))
    assert min(size for size, _ in found.curve) >= 300
    assert min(found.smallest.values()) >= 300


def test_it_is_json_that_reads_back() -> None:
    found = coverage_by_size(falling(900), 300)
    told = json.loads(json.dumps(found.as_json()))
    assert [tuple(point) for point in told["curve"]] == list(found.curve)
    assert told["smallest"]["0.99"] == found.smallest[0.99]
    assert told["suggested_size"] == found.suggested


class TestSuggestion:
    def test_a_size_that_covers_too_little_hears_of_one_that_covers_99_per_cent(self) -> None:
        counts = falling(1000, times=1000)
        found = coverage_by_size(counts, 128)
        assert found.share < 0.95
        assert found.suggested == 1024 >= found.smallest[0.99]
        assert advice(128, found.suggested) == ("; vocab.draft_vocab_size 1024 would cover 99%")

    def test_a_size_of_which_less_than_half_is_of_use_hears_of_a_smaller_one(self) -> None:
        found = coverage_by_size(counts_of(dict.fromkeys(range(200), 1000)), 800)
        assert (found.smallest[0.999], found.suggested) == (200, 256)
        assert advice(800, 256) == "; vocab.draft_vocab_size 256 would cover 99.9%"

    def test_few_rows_are_no_reason_for_a_smaller_one(self) -> None:
        """Where one token in a hundred is new, a larger set would bring many more."""
        counts = dict.fromkeys(range(10), 1000) | dict.fromkeys(range(10, 110), 1)
        found = coverage_by_size(counts_of(counts), 800)
        assert (found.share, found.seen_once, found.suggested) == (1.0, 100, None)

    @pytest.mark.parametrize("size", [400, 511])
    def test_a_size_that_is_about_right_hears_of_none(self, size: int) -> None:
        found = coverage_by_size(counts_of(dict.fromkeys(range(200), 1000)), size)
        assert found.suggested is None
        assert advice(size, found.suggested) == ""

    @calm
    @given(count_dicts, st.integers(3, V), required_sets)
    def test_it_fits_the_vocabulary_and_is_another_size(
        self, counts: dict[int, int], size: int, required: set[int]
    ) -> None:
        found = coverage_by_size(counts_of(counts), size, required)
        if found.suggested is not None:
            assert max(1, len(required)) <= found.suggested <= V
            assert found.suggested != size
            build_mapping(counts_of(counts), found.suggested, required)


def test_the_table_marks_the_configured_size_and_the_smallest_ones() -> None:
    out = io.StringIO()
    show(coverage_by_size(falling(900), 300), Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert lines[0].strip() == "Supervised tokens inside the draft vocabulary"
    [configured] = [line for line in lines if "configured" in line]
    assert configured.split()[:1] == ["300"]
    assert sum("the smallest for" in line for line in lines) == 4
    assert any(line.split()[:2] == ["1,024", "100.00%"] for line in lines)


def test_anything_but_counts_is_refused() -> None:
    with pytest.raises(MappingInvalid, match="int64 tensor of shape"):
        coverage_by_size(torch.ones(V), 300)
