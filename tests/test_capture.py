"""What an engine hands over is checked before anything is packed."""

from collections.abc import Iterator, Sequence

import pytest
import torch

from eagle3.capture import (
    Capture,
    CapturedRow,
    FakeCapture,
    FakeGenerator,
    GateFigures,
    Generator,
    Head,
    Sampling,
    SpecCounters,
    check_states,
    gate_prompts,
    next_token_logprobs,
    numeric_gate,
)
from eagle3.errors import CaptureInvalid

VOCAB_SIZE, HIDDEN_SIZE, LAYER_IDS = 300, 32, (2, 4, 5, 8)
IDS = [(7 * place) % VOCAB_SIZE for place in range(24)]
PROMPTS = [IDS, IDS[3:14], [(11 * place) % VOCAB_SIZE for place in range(190)]]


def tensors(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A norm weight `[H]` and an lm_head `[V, H]`, wide enough that layers predict differently."""
    source = torch.Generator().manual_seed(seed)
    norm_weight = torch.rand(HIDDEN_SIZE, generator=source) + 0.5
    return norm_weight, 0.4 * torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=source)


def fake(dtype: torch.dtype = torch.float32) -> FakeCapture:
    norm_weight, lm_head = tensors()
    return FakeCapture(
        layer_ids=LAYER_IDS, norm_weight=norm_weight, lm_head=lm_head, eps=1e-5, dtype=dtype
    )


def gate(
    capture: Capture,
    *,
    norm: torch.Tensor | None = None,
    lm_head: torch.Tensor | None = None,
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> GateFigures:
    """The gate with the fake's own tensors, or with others."""
    own_norm, own_head = tensors()
    head = Head(
        norm=own_norm if norm is None else norm,
        lm_head=own_head if lm_head is None else lm_head,
        eps=1e-5,
    )
    return numeric_gate(capture, prompts, LAYER_IDS, head)


def good_row() -> CapturedRow:
    (row,) = fake().capture([IDS])
    return row


def check(row: CapturedRow, ids: Sequence[int] = IDS) -> str | None:
    return check_states(row, ids, num_layers=len(LAYER_IDS), hidden_size=HIDDEN_SIZE)


class LaterLayerLost(FakeCapture):
    """Captures as the fake does, but every layer one too early, as old conventions had it."""

    def capture(self, rows: Sequence[Sequence[int]]) -> Iterator[CapturedRow]:
        for row in super().capture(rows):
            yield row._replace(hidden_states=row.hidden_states.roll(1, dims=1))

    def prompt_logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        norm_weight, lm_head = tensors()
        (row,) = super().capture([ids])
        return next_token_logprobs(
            row.hidden_states[:, -1],
            row.token_ids,
            norm_weight=norm_weight,
            lm_head=lm_head,
            eps=1e-5,
        )


def named_tensors() -> dict[str, torch.Tensor]:
    norm_weight, lm_head = tensors()
    return {"norm_weight": norm_weight, "lm_head": lm_head}


class OneRowSpoilt(FakeCapture):
    """Adds something to the last layer of the shortest row, and reports as if nothing were."""

    def __init__(self, added: float) -> None:
        super().__init__(layer_ids=LAYER_IDS, **named_tensors())
        self._added = added

    def prompt_logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        return fake().prompt_logprobs(ids)

    def capture(self, rows: Sequence[Sequence[int]]) -> Iterator[CapturedRow]:
        shortest = min(len(ids) for ids in rows)
        for row in super().capture(rows):
            if len(row.token_ids) == shortest:
                row.hidden_states[:, -1, 0] += self._added
            yield row


class BeginningLost(FakeCapture):
    """Captures only what no other row began with, as a cached prefix leaves it."""

    def capture(self, rows: Sequence[Sequence[int]]) -> Iterator[CapturedRow]:
        for row in super().capture(rows):
            yield CapturedRow(row.token_ids[4:], row.hidden_states[4:])


class TestCheckStates:
    def test_a_good_row_passes(self) -> None:
        assert check(good_row()) is None

    def test_b23_a_row_shorter_than_its_prompt_is_refused(self) -> None:
        row = good_row()
        short = CapturedRow(row.token_ids[4:], row.hidden_states[4:])
        with pytest.raises(CaptureInvalid, match="prefix caching"):
            check(short)

    def test_another_prompts_file_is_refused(self) -> None:
        with pytest.raises(CaptureInvalid, match="ids that were sent"):
            check(good_row(), [*IDS[:-1], 3])

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_b26_a_poisoned_row_is_rejected_with_its_reason(self, value: float) -> None:
        row = good_row()
        row.hidden_states[3, 1, 5] = value
        assert check(row) == "non_finite"

    def test_b27_float16_is_refused(self) -> None:
        row = good_row()
        with pytest.raises(CaptureInvalid, match="float16 overflows"):
            check(row._replace(hidden_states=row.hidden_states.half()))

    def test_b98_a_row_of_zeros_is_rejected_with_its_reason(self) -> None:
        row = good_row()
        row.hidden_states[7, 2] = 0
        assert check(row) == "zero_state"

    def test_b98_a_missing_layer_is_refused(self) -> None:
        row = good_row()
        with pytest.raises(CaptureInvalid, match="layer_ids"):
            check(row._replace(hidden_states=row.hidden_states[:, :3]))

    def test_b98_layers_before_tokens_is_refused(self) -> None:
        row = good_row()
        with pytest.raises(CaptureInvalid, match="tokens, layers, hidden"):
            check(row._replace(hidden_states=row.hidden_states.transpose(0, 1)))

    def test_b98_one_layer_twice_is_refused(self) -> None:
        row = good_row()
        row.hidden_states[:, 3] = row.hidden_states[:, 1]
        with pytest.raises(CaptureInvalid, match="number 1 and 3"):
            check(row)

    def test_bfloat16_is_as_good_as_float32(self) -> None:
        (row,) = fake(torch.bfloat16).capture([IDS])
        assert row.hidden_states.dtype == torch.bfloat16
        assert check(row) is None


class TestNumericGate:
    def test_passes_with_the_verifiers_own_tensors(self) -> None:
        figures = gate(fake())
        assert figures.num_rows == len(PROMPTS)
        # 23 and 10 next tokens, and of 189 as many as are judged of one row.
        assert figures.num_tokens == 23 + 10 + 128
        assert figures.mean_difference <= figures.worst_row < 1e-5
        assert 1e-5 < figures.stored_difference < 0.02
        assert min(figures.other_layers) > 0.5

    def test_logprobs_are_those_of_torchs_own_operators(self) -> None:
        norm_weight, lm_head = tensors()
        states = torch.randn(len(IDS), HIDDEN_SIZE, generator=torch.Generator().manual_seed(5))
        ids = torch.tensor(IDS)
        normed = torch.nn.functional.rms_norm(states, (HIDDEN_SIZE,), norm_weight, eps=1e-5)
        logprobs = torch.log_softmax(normed @ lm_head.T, dim=-1)
        expected = logprobs[:-1].gather(1, ids[1:, None])[:, 0]
        found = next_token_logprobs(states, ids, norm_weight=norm_weight, lm_head=lm_head, eps=1e-5)
        torch.testing.assert_close(found, expected)

    def test_the_vocabulary_is_walked_to_its_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        norm_weight, lm_head = tensors()
        states = torch.randn(len(IDS), HIDDEN_SIZE, generator=torch.Generator().manual_seed(5))
        ids = torch.tensor(IDS)
        whole = next_token_logprobs(states, ids, norm_weight=norm_weight, lm_head=lm_head, eps=1e-5)
        monkeypatch.setattr("eagle3.capture.checks.VOCAB_CHUNK", 64)
        in_pieces = next_token_logprobs(
            states, ids, norm_weight=norm_weight, lm_head=lm_head, eps=1e-5
        )
        torch.testing.assert_close(in_pieces, whole)

    def test_b22_refuses_a_norm_left_out(self) -> None:
        with pytest.raises(CaptureInvalid, match="nats of the engine's own"):
            gate(fake(), norm=torch.ones(HIDDEN_SIZE))

    def test_b51_refuses_another_models_lm_head(self) -> None:
        _, other = tensors(seed=1)
        with pytest.raises(CaptureInvalid, match="belong to this verifier"):
            gate(fake(), lm_head=other)

    def test_b21_refuses_a_layer_too_early(self) -> None:
        norm_weight, lm_head = tensors()
        shifted = LaterLayerLost(layer_ids=LAYER_IDS, norm_weight=norm_weight, lm_head=lm_head)
        with pytest.raises(CaptureInvalid, match="last layer id"):
            gate(shifted)

    def test_refuses_to_pass_where_all_layers_predict_alike(self) -> None:
        norm_weight, lm_head = tensors()
        flat = 1e-4 * lm_head
        capture = FakeCapture(
            layer_ids=LAYER_IDS, norm_weight=norm_weight, lm_head=flat, dtype=torch.float32
        )
        worse = flat * 1.5
        with pytest.raises(CaptureInvalid, match="times worse"):
            gate(capture, lm_head=worse)

    def test_a_nan_never_passes(self) -> None:
        broken = tensors()[1]
        broken[5] = float("nan")
        with pytest.raises(CaptureInvalid, match="nan nats"):
            gate(fake(), lm_head=broken)

    def test_one_wrong_row_among_right_ones_is_refused(self) -> None:
        """The wrong one is too short to spoil the mean over all."""
        with pytest.raises(CaptureInvalid, match="in one row"):
            gate(OneRowSpoilt(0.02))

    def test_states_that_do_not_survive_being_stored_are_refused(self) -> None:
        """Right in float32, but logits of hundreds turn on bfloat16's last bit."""
        steep = {**named_tensors(), "lm_head": 40 * tensors()[1]}
        with pytest.raises(CaptureInvalid, match="when rounded to bfloat16"):
            gate(FakeCapture(layer_ids=LAYER_IDS, **steep), lm_head=steep["lm_head"])

    def test_b26_a_poisoned_row_stops_the_gate(self) -> None:
        with pytest.raises(CaptureInvalid, match="non_finite in a row of 24"):
            gate(OneRowSpoilt(float("nan")), prompts=[IDS])

    def test_b23_a_row_without_its_cached_beginning_stops_the_gate(self) -> None:
        with pytest.raises(CaptureInvalid, match="prefix caching"):
            gate(BeginningLost(layer_ids=LAYER_IDS, **named_tensors()))

    def test_b21_an_engine_that_takes_states_elsewhere_is_refused(self) -> None:
        elsewhere = FakeCapture(layer_ids=(2, 4, 6, 8), **named_tensors())
        with pytest.raises(CaptureInvalid, match=r"\[2, 4, 5, 8\], found \[2, 4, 6, 8\]"):
            gate(elsewhere)


class TestGatePrompts:
    def rows(self, *lengths: int) -> list[torch.Tensor]:
        return [torch.arange(length) for length in lengths]

    def test_lengths_differ_from_the_shortest_to_the_longest(self) -> None:
        prompts = gate_prompts([self.rows(9, 30, 9, 12, 700, 40, 41, 3, 30)])
        assert [len(ids) for ids in prompts] == [9, 12, 40, 700]

    def test_a_unit_of_one_row_has_one_prompt(self) -> None:
        assert [len(ids) for ids in gate_prompts([self.rows(8)])] == [8]

    def test_of_a_very_long_row_the_beginning_is_enough(self) -> None:
        assert [len(ids) for ids in gate_prompts([self.rows(50_000)])] == [2048]

    def test_rows_of_a_few_tokens_prove_nothing(self) -> None:
        with pytest.raises(CaptureInvalid, match="rows of at most 7"):
            gate_prompts([self.rows(3, 7, 7), self.rows(5)])

    def test_the_first_unit_with_a_row_long_enough_gives_them(self) -> None:
        units = iter([self.rows(3, 7), self.rows(9, 5, 30), self.rows(40)])
        assert [len(ids) for ids in gate_prompts(units)] == [9, 30]
        assert len(list(units)) == 1, "later units are not read"


class TestFakes:
    def test_a_captured_row_depends_on_its_ids_alone(self) -> None:
        rows = [IDS, IDS[:5], [9, 9, 9]]
        together = list(fake().capture(rows))
        apart = [row for ids in reversed(rows) for row in fake().capture([ids])]
        for row, other in zip(together, reversed(apart), strict=True):
            assert torch.equal(row.hidden_states, other.hidden_states)

    def test_a_prefix_has_the_states_of_the_whole(self) -> None:
        whole, prefix = fake().capture([IDS, IDS[:9]])
        assert torch.equal(whole.hidden_states[:9], prefix.hidden_states)

    def test_the_fakes_are_what_the_stories_ask_for(self) -> None:
        generator = FakeGenerator(vocab_size=VOCAB_SIZE, end_id=2)
        for protocol, one in ((Capture, fake()), (Generator, generator)):
            asked = {name for name in vars(protocol) if not name.startswith("_")}
            assert "close" in asked
            assert [name for name in asked if not callable(getattr(one, name, None))] == []
            one.close()

    def test_answers_are_repeatable_and_end_both_ways(self) -> None:
        generator = FakeGenerator(vocab_size=VOCAB_SIZE, end_id=2, end_share=0.05)
        prompts = [[place, place + 1] for place in range(20)]
        sampling = Sampling(max_tokens=20)
        answers = generator.generate(prompts, sampling)
        assert answers == generator.generate(prompts, sampling)
        assert {answer.finish_reason for answer in answers} == {"stop", "length"}
        for answer in answers:
            stopped = answer.finish_reason == "stop"
            assert stopped == (answer.token_ids[-1] == 2 and len(answer.token_ids) <= 20)

    def test_the_seed_matters_only_to_sampled_answers(self) -> None:
        generator = FakeGenerator(vocab_size=VOCAB_SIZE, end_id=2)
        for temperature, same in ((0.0, True), (1.0, False)):
            answers = [
                generator.generate(
                    [IDS], Sampling(max_tokens=9, temperature=temperature, seed=seed)
                )
                for seed in (0, 1)
            ]
            assert (answers[0] == answers[1]) is same


def test_counters_since_an_earlier_reading() -> None:
    earlier = SpecCounters(10, 30, 12, (6, 4, 2))
    later = SpecCounters(25, 75, 40, (18, 13, 9))
    assert later.since(earlier) == SpecCounters(15, 45, 28, (12, 9, 7))
