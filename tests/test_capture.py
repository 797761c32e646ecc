"""What an engine hands over is checked before anything is packed."""

from collections.abc import Iterator, Sequence

import pytest
import torch

from eagle3.capture import (
    Capture,
    CapturedRow,
    FakeCapture,
    FakeGenerator,
    Generator,
    Sampling,
    SpecCounters,
    check_states,
    next_token_logprobs,
    numeric_gate,
)
from eagle3.errors import CaptureInvalid

VOCAB_SIZE, HIDDEN_SIZE, LAYER_IDS = 300, 32, (2, 4, 5, 8)
IDS = [(7 * place) % VOCAB_SIZE for place in range(24)]


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
        norm_weight, lm_head = tensors()
        figures = numeric_gate(fake(), IDS, norm_weight=norm_weight, lm_head=lm_head, eps=1e-5)
        assert figures.num_tokens == len(IDS)
        assert figures.mean_difference < 1e-5
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
        _, lm_head = tensors()
        with pytest.raises(CaptureInvalid, match="nats of the engine's own"):
            numeric_gate(
                fake(), IDS, norm_weight=torch.ones(HIDDEN_SIZE), lm_head=lm_head, eps=1e-5
            )

    def test_b51_refuses_another_models_lm_head(self) -> None:
        norm_weight, _ = tensors()
        _, other = tensors(seed=1)
        with pytest.raises(CaptureInvalid, match="belong to this verifier"):
            numeric_gate(fake(), IDS, norm_weight=norm_weight, lm_head=other, eps=1e-5)

    def test_b21_refuses_a_layer_too_early(self) -> None:
        norm_weight, lm_head = tensors()
        shifted = LaterLayerLost(layer_ids=LAYER_IDS, norm_weight=norm_weight, lm_head=lm_head)
        with pytest.raises(CaptureInvalid, match="last layer id"):
            numeric_gate(shifted, IDS, norm_weight=norm_weight, lm_head=lm_head, eps=1e-5)

    def test_refuses_to_pass_where_all_layers_predict_alike(self) -> None:
        norm_weight, lm_head = tensors()
        flat = 1e-4 * lm_head
        capture = FakeCapture(
            layer_ids=LAYER_IDS, norm_weight=norm_weight, lm_head=flat, dtype=torch.float32
        )
        worse = flat * 1.5
        with pytest.raises(CaptureInvalid, match="times worse"):
            numeric_gate(capture, IDS, norm_weight=norm_weight, lm_head=worse, eps=1e-5)

    def test_a_nan_never_passes(self) -> None:
        norm_weight, lm_head = tensors()
        broken = lm_head.clone()
        broken[5] = float("nan")
        with pytest.raises(CaptureInvalid, match="nan nats"):
            numeric_gate(fake(), IDS, norm_weight=norm_weight, lm_head=broken, eps=1e-5)

    def test_a_prompt_of_a_few_tokens_proves_nothing(self) -> None:
        norm_weight, lm_head = tensors()
        with pytest.raises(CaptureInvalid, match="longer rows"):
            numeric_gate(fake(), IDS[:3], norm_weight=norm_weight, lm_head=lm_head, eps=1e-5)


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
        capture: Capture = fake()
        generator: Generator = FakeGenerator(vocab_size=VOCAB_SIZE, end_id=2)
        capture.close()
        generator.close()

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
