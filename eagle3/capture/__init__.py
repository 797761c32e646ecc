"""The seam to the verifier's engine: token ids in, hidden states or answers out.

A story sees an engine only through the protocols of this package. `eagle3.vllm_capture` is the
real one; `FakeCapture` and `FakeGenerator` are small deterministic stand-ins for fast tests.
What an engine hands over is not believed: `check_states` looks at each row before it is packed,
and `numeric_gate` proves once, at the start, that the captured states are the ones from which
the engine computes its own log-probabilities. `eagle3.capture.units` makes objects of them.

Layer ids are the residual stream entering layer k (the last one, `num_hidden_layers`, is the
final hidden state before the model's last norm), ascending.
"""

from eagle3.capture.checks import as_stored, check_states, next_token_logprobs
from eagle3.capture.fakes import FakeCapture, FakeGenerator
from eagle3.capture.gate import GateFigures, Head, gate_prompts, numeric_gate
from eagle3.capture.protocols import (
    Capture,
    CapturedRow,
    Completion,
    Generator,
    Sampling,
    SpecCounters,
    SpeculativeGenerator,
    Told,
    nobody,
)

__all__ = [
    "Capture",
    "CapturedRow",
    "Completion",
    "FakeCapture",
    "FakeGenerator",
    "GateFigures",
    "Generator",
    "Head",
    "Sampling",
    "SpecCounters",
    "SpeculativeGenerator",
    "Told",
    "as_stored",
    "check_states",
    "gate_prompts",
    "next_token_logprobs",
    "nobody",
    "numeric_gate",
]
