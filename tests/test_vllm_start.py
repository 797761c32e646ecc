"""How vLLM is started, and what its refusals mean: the names, the arguments, the sentences.

Nothing here starts an engine wholly.
"""

import dataclasses
import importlib
import json
import logging
import logging.config
import os
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import vllm.envs
from vllm.engine.arg_utils import EngineArgs

import eagle3.vllm_capture
from eagle3.errors import ConfigError, EnvironmentMisconfigured, VerifierInvalid
from eagle3.vllm_capture import EngineOptions, VllmCapture, VllmGenerator
from eagle3.vllm_capture.environment import environment_of
from eagle3.vllm_capture.options import FREE, OF_A_USE, engine_arguments
from eagle3.vllm_capture.refusals import died, explain, read_errors, write_logging_config
from tests.tiny_verifiers import make_kimi, make_llama

pytestmark = pytest.mark.engine

DOC = eagle3.vllm_capture.__doc__ or ""


def options(model: Path, **changes: object) -> EngineOptions:
    plain = EngineOptions(model=model, max_model_len=1025, dtype="float32", num_threads=1)
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_kimi(tmp_path_factory.mktemp("kimi"))


def config_of(model: Path) -> Any:
    return json.loads((model / "config.json").read_text())


def test_an_engine_takes_the_threads_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def threads(num_threads: int | None) -> str:
        found = environment_of(True, num_threads=num_threads, mla_off=False)
        return found["OMP_NUM_THREADS"]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads(None) == str(len(os.sched_getaffinity(0)))
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert threads(None) == "7"
    assert threads(3) == "3"


class TestUpstreamNames:
    """Each name that the package says it relies on is still there."""

    @pytest.mark.parametrize("name", re.findall(r"^    (vllm\.\S+)$", DOC, flags=re.MULTILINE))
    def test_a_dotted_name(self, name: str) -> None:
        pkgutil.resolve_name(name)

    def test_the_connectors_names(self) -> None:
        module = importlib.import_module(re.search(r"of (vllm\.\S+):", DOC)[1])
        connector = module.ExampleHiddenStatesConnector
        initialised = connector.__init__.__code__.co_names
        for name in re.findall(r"`(_\w+)`", DOC):
            assert hasattr(connector, name) or name in initialised, name
        for name in re.findall(r"PendingSave|\w+_hidden_states\b|extract_from_\w+", DOC):
            assert hasattr(module, name) or name == "extract_hidden_states", name

    def test_the_engines_arguments_and_environment(self, kimi: Path) -> None:
        accepted = {field.name for field in dataclasses.fields(EngineArgs)}
        assert accepted >= engine_arguments(options(kimi), config_of(kimi), {}).keys() | OF_A_USE
        assert set(re.findall(r"\bVLLM_\w+", DOC)) <= set(vllm.envs.environment_variables)


class TestRefusals:
    def test_a_missing_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"readable config.json.*found none"):
            VllmGenerator(options(tmp_path / "nowhere"))

    def test_an_argument_that_is_not_the_users_to_set(self, llama: Path) -> None:
        with pytest.raises(ConfigError, match=r"engine\.extra\.enable_prefix_caching"):
            VllmGenerator(options(llama, extra={"enable_prefix_caching": True}))

    def test_extra_changes_no_argument_that_we_decide(self, kimi: Path) -> None:
        config = config_of(kimi)
        decided = (engine_arguments(options(kimi), config, {}).keys() | OF_A_USE) - FREE
        assert decided >= {"trust_remote_code", "gpu_memory_utilization", "compilation_config"}
        for name in decided:
            with pytest.raises(ConfigError, match=rf"engine\.extra\.{name}: .*leave it out"):
                engine_arguments(options(kimi, extra={name: True}), config, {})
        for name in FREE:
            assert engine_arguments(options(kimi, extra={name: 4096}), config, {})[name] == 4096

    @pytest.mark.parametrize(
        ("extra", "words"),
        [
            ({"max_model_length": 1}, r"max_model_length: .*; max_model_len is not for you to set"),
            ({"block_sizes": 16}, r"block_sizes: .*leave it out, or write block_size"),
            ({"max_num_batched_tokens": "8192"}, r"wanted a number of tokens.*found '8192'"),
            ({"block_size": "big"}, r"engine\.extra: .*found block_size, and it says: 1 valid"),
        ],
    )
    def test_an_argument_that_vllm_does_not_take(
        self, llama: Path, extra: dict[str, object], words: str
    ) -> None:
        with pytest.raises(ConfigError, match=words) as refused:
            VllmGenerator(options(llama, extra=extra))
        assert "\n" not in str(refused.value)

    def test_an_engine_that_does_not_start_leaves_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError):
            VllmCapture(options(tmp_path / "no"), layer_ids=(2, 4, 5, 8), scratch=tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_b23_b25_every_prompt_is_computed_anew_and_in_one_step(self, kimi: Path) -> None:
        found = engine_arguments(options(kimi), config_of(kimi), {})
        assert found["enable_prefix_caching"] is False
        assert found["enable_chunked_prefill"] is False
        assert found["max_num_batched_tokens"] >= found["max_model_len"]

    def test_b25_prefill_in_pieces(self, llama: Path) -> None:
        with pytest.raises(ConfigError, match="prefilled in one step"):
            VllmGenerator(options(llama, extra={"max_num_batched_tokens": 512}))

    @pytest.mark.parametrize("layer_ids", [(), (4, 2, 8), (2, 2, 8)])
    def test_layer_ids_out_of_order(self, llama: Path, layer_ids: tuple[int, ...]) -> None:
        with pytest.raises(ConfigError, match="ascending"):
            VllmCapture(options(llama), layer_ids=layer_ids)

    def test_an_unknown_architecture(self, llama: Path, tmp_path: Path) -> None:
        config = json.loads((llama / "config.json").read_text())
        config |= {"architectures": ["NopeForCausalLM"], "model_type": "nope"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(VerifierInvalid, match="an architecture that this vLLM serves"):
            VllmGenerator(options(tmp_path))

    def test_a_context_longer_than_the_verifiers(self, llama: Path) -> None:
        with pytest.raises(ConfigError, match="max_seq_len"):
            VllmGenerator(options(llama, max_model_len=4096))

    def test_b104_too_little_memory_for_one_row(
        self, llama: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(ConfigError, match=r"No available memory.*or use more GPUs"):
            VllmGenerator(options(llama, extra={"kv_cache_memory_bytes": 1 << 16}))
        assert "Loading" not in capfd.readouterr().err

    def test_of_a_dead_engines_chained_exceptions_the_first_is_its_sentence(self) -> None:
        log = (
            "ERROR EngineCore fatal\nTraceback:\n  File x\ntorch.OutOfMemoryError: CUDA is full\n"
            "The above exception was the direct cause of the following exception:\n"
            "Traceback:\n  File y\nRuntimeError: a worker failed\n"
        )
        assert died(log).found == "torch.OutOfMemoryError: CUDA is full"
        assert "killed" in died("").found
        kernels = died("InductorError: InvalidCxxCompiler: No working C++ compiler found")
        assert (kernels.exit_code, "g++" in kernels.remedy) == (78, True)

    def test_b104_the_words_of_another_process_are_read_from_its_log(self, tmp_path: Path) -> None:
        """Its exception stays there; the exception here only says that there was one."""
        before = logging.getLogger("vllm").handlers[:], logging.getLogger("vllm").level
        config = json.loads(write_logging_config(tmp_path, "ERROR").read_text())
        config["handlers"].pop("stderr")
        config["loggers"]["vllm"]["handlers"].remove("stderr")
        logging.config.dictConfig(config)
        logging.getLogger("vllm").error("No available memory for the cache blocks.")
        (written,) = logging.getLogger("vllm").handlers
        written.close()
        logging.getLogger("vllm").handlers[:], logging.getLogger("vllm").level = before
        here = "Engine core initialization failed. See root cause above."
        refusal = explain(f"{here}\n{read_errors(tmp_path)}", Path("model"), 64)
        assert isinstance(refusal, ConfigError)
        assert "No available memory" in refusal.found
        bare = explain(here, Path("model"), 64)
        assert isinstance(bare, EnvironmentMisconfigured)
        assert "log above" in bare.remedy
        assert explain("something else", Path("model"), 64) is None
