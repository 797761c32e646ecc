"""vLLM, and nothing else in the project imports it.

`VllmCapture` shows the verifier's hidden states, `VllmGenerator` its answers, with a draft's
help or without. Both start from `EngineOptions`.

What of vLLM 0.32.0 is relied on; a test looks every name up, so that an upgrade fails there
and not in a run:

    vllm.LLM.enqueue
    vllm.LLM.sleep
    vllm.LLM.wake_up
    vllm.LLM.collective_rpc
    vllm.LLM.get_metrics
    vllm.SamplingParams
    vllm.engine.arg_utils.EngineArgs
    vllm.envs.disable_envs_cache
    vllm.distributed.cleanup_dist_env_and_memory
    vllm.outputs.RequestOutput
    vllm.outputs.CompletionOutput
    vllm.platforms.current_platform.is_cpu
    vllm.utils.torch_utils.set_random_seed
    vllm.v1.engine.llm_engine.LLMEngine.step
    vllm.v1.engine.llm_engine.LLMEngine.has_unfinished_requests
    vllm.v1.engine.llm_engine.LLMEngine.abort_request
    vllm.v1.engine.core_client.EngineCoreClient.shutdown
    vllm.v1.engine.exceptions.EngineDeadError
    vllm.v1.metrics.reader.Counter
    vllm.v1.metrics.reader.Vector

of vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector: PendingSave,
load_hidden_states, cleanup_hidden_states, extract_from_kv_cache and, of its
ExampleHiddenStatesConnector, the method `_submit_async_write` and the attributes `_kv_cache`,
`_block_size`, `_is_tp_rank_zero`, `_lock_fds`, `_req_copy_events`;

of the engine's arguments those that `options` names; of the environment
VLLM_ENABLE_V1_MULTIPROCESSING, VLLM_WORKER_MULTIPROC_METHOD, VLLM_MLA_DISABLE,
VLLM_CPU_OMP_THREADS_BIND, VLLM_NO_USAGE_STATS, VLLM_LOGGING_LEVEL, VLLM_LOGGING_CONFIG_PATH.
"""

from eagle3.vllm_capture.answers import VllmGenerator
from eagle3.vllm_capture.options import EngineOptions
from eagle3.vllm_capture.states import VllmCapture

__all__ = ["EngineOptions", "VllmCapture", "VllmGenerator"]
