"""What vLLM's worker learns from us: to start its random numbers anew."""

from __future__ import annotations

from vllm.utils.torch_utils import set_random_seed


class SeedableWorker:
    """Mixed into vLLM's worker by `worker_extension_cls`; called through `collective_rpc`.

    A seed per request would do the same, but vLLM's CPU sampler fails on it as soon as a prompt
    is prefilled in two steps.
    """

    def restart_random(self, seed: int) -> None:
        """Set the state of every random generator of this worker."""
        set_random_seed(seed)
