"""What vLLM's worker learns from us: to start random numbers anew, and to say what it captures."""

from __future__ import annotations

from typing import Any

from vllm.utils.torch_utils import set_random_seed


class TaughtWorker:
    """Mixed into vLLM's worker by `worker_extension_cls`; called through `collective_rpc`."""

    model_runner: Any

    def restart_random(self, seed: int) -> None:
        """Set the state of every random generator of this worker.

        A seed per request would do the same, but vLLM's CPU sampler fails on it as soon as a
        prompt is prefilled in two steps.
        """
        set_random_seed(seed)

    def layers_captured(self) -> list[int]:
        """The ids of the layers before which the running model itself takes states, ascending."""
        modules = self.model_runner.get_model().modules()
        named = (getattr(module, "aux_hidden_state_layers", ()) for module in modules)
        return sorted({int(layer_id) for ids in named for layer_id in ids})
