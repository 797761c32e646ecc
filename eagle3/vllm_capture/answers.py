"""`VllmGenerator`: answers by the verifier, with or without the help of a draft."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.outputs import CompletionOutput
from vllm.v1.metrics.reader import Counter, Metric, Vector

from eagle3.capture import Completion, Sampling, SpecCounters, Told, nobody
from eagle3.vllm_capture.engine import Engine
from eagle3.vllm_capture.options import EngineOptions

NUM_DRAFTS = "vllm:spec_decode_num_drafts"
NUM_DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens"
NUM_ACCEPTED_TOKENS = "vllm:spec_decode_num_accepted_tokens"
ACCEPTED_PER_POS = "vllm:spec_decode_num_accepted_tokens_per_pos"


class VllmGenerator:
    """A `SpeculativeGenerator` (see `eagle3.capture`) on a running vLLM.

    Args:
        options: see there.
        draft: folder of the exported draft; without one the verifier answers alone.
        num_speculative_tokens: tokens that the draft proposes a step.
    """

    def __init__(
        self, options: EngineOptions, *, draft: Path | None = None, num_speculative_tokens: int = 3
    ) -> None:
        arguments: dict[str, Any] = {}
        if draft is not None:
            arguments = {
                "speculative_config": {
                    "method": "eagle3",
                    "model": str(draft),
                    "num_speculative_tokens": num_speculative_tokens,
                },
                "disable_log_stats": False,
                "per_request_spec_decode_metrics": "summary",
            }
        self._engine = Engine(options, arguments, mla_off=draft is not None)
        self._drafting = draft is not None

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, told: Told = nobody
    ) -> list[Completion]:
        """See `Generator.generate`."""
        if sampling.temperature > 0:
            with self._engine.alive():
                self._engine.llm.collective_rpc("restart_random", args=(sampling.seed,))
        params = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            ignore_eos=sampling.ignore_end,
            logprobs=sampling.num_top_logprobs or None,
            detokenize=False,
        )
        outputs = self._engine.run(prompts, params, told)
        return [_completion(output.outputs[0]) for output in outputs]

    def counters(self) -> SpecCounters:
        """See `SpeculativeGenerator.counters`; zeros without a draft."""
        if not self._drafting:
            return SpecCounters(0, 0, 0, ())
        metrics = self._engine.llm.get_metrics()
        per_pos = [metric for metric in metrics if metric.name == ACCEPTED_PER_POS]
        assert len(per_pos) == 1
        assert isinstance(per_pos[0], Vector)
        return SpecCounters(
            _count(metrics, NUM_DRAFTS),
            _count(metrics, NUM_DRAFT_TOKENS),
            _count(metrics, NUM_ACCEPTED_TOKENS),
            tuple(per_pos[0].values),
        )

    def close(self) -> None:
        """See `Generator.close`."""
        self._engine.close()


def _count(metrics: Sequence[Metric], name: str) -> int:
    return sum(
        metric.value for metric in metrics if metric.name == name and isinstance(metric, Counter)
    )


def _completion(output: CompletionOutput) -> Completion:
    top_logprobs = tuple(
        {token: entry.logprob for token, entry in position.items()}
        for position in output.logprobs or ()
    )
    drafted = output.spec_decode_metrics
    return Completion(
        tuple(output.token_ids),
        output.finish_reason or "abort",
        top_logprobs,
        tuple(drafted.histogram) if drafted is not None else (),
    )
