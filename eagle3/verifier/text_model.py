"""What can be asked of a verifier by whoever holds its config and its tokenizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from eagle3.errors import ConfigError, VerifierInvalid
from eagle3.manifest import default_layer_ids
from eagle3.verifier import tokenizer as tokenizers

CONFIG_NAME = "config.json"
TENSORS_NAME = "model.safetensors"
EMBED_KEY = "model.embed_tokens.weight"
NORM_KEY = "model.norm.weight"
LM_HEAD_KEY = "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class ThreeTensors:
    """embed [V, H], norm [H], lm_head [V, H], in the checkpoint's type (float16 as float32).

    For a tied verifier `lm_head` is `embed`.
    """

    embed: torch.Tensor
    norm: torch.Tensor
    lm_head: torch.Tensor


class TextModel(ABC):
    """What every holder of a verifier can ask, whether it was opened or loaded.

    Attributes:
        text_config: the text model's config as plain values, never nested.
    """

    def __init__(self, *, text_config: dict[str, Any], trust_remote_code: bool) -> None:
        self.text_config = text_config
        self._trust_remote_code = trust_remote_code

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers of the text model."""
        return int(self.text_config["num_hidden_layers"])

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return int(self.text_config["hidden_size"])

    @property
    def vocab_size(self) -> int:
        """Rows of lm_head, which the config is checked against."""
        return int(self.text_config["vocab_size"])

    @property
    def longest_context(self) -> int | None:
        """Tokens that the model takes; None where positions are scaled and it is not plain."""
        scaled = self.text_config.get("rope_parameters") or self.text_config.get("rope_scaling")
        kind = (scaled or {}).get("rope_type", "default")
        longest = self.text_config.get("max_position_embeddings")
        return int(longest) if longest and kind == "default" else None

    @property
    @abstractmethod
    def tokenizer_folder(self) -> Path:
        """A local folder with the tokenizer's files and config.json."""

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return self._open_tokenizer()

    def _open_tokenizer(self) -> PreTrainedTokenizerBase:
        return tokenizers.open_tokenizer(
            self.tokenizer_folder,
            vocab_size=self.vocab_size,
            trust_remote_code=self._trust_remote_code,
        )

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The proven tokenizer, one per verifier. Raises ConfigError, DataInvalid."""
        return self._tokenizer

    @cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer, ascending."""
        path = self.tokenizer_folder / tokenizers.GENERATION_CONFIG_NAME
        settings = tokenizers.read_settings(path)
        return tuple(sorted(tokenizers.stop_ids(self._tokenizer, settings)))

    @cached_property
    def required_ids(self) -> tuple[int, ...]:
        """Ids that every draft vocabulary must hold: special and stop ids, ascending, below V.

        Raises VerifierInvalid for one that lm_head has no row for.
        """
        ids = sorted({*tokenizers.special_ids(self._tokenizer), *self.stop_ids})
        if ids and not 0 <= ids[0] <= ids[-1] < self.vocab_size:
            raise VerifierInvalid(
                "special and stop ids",
                wanted=f"ids below {self.vocab_size}, the rows of lm_head",
                found=ids[-1] if ids[0] >= 0 else ids[0],
                remedy="correct generation_config.json or bring the matching tokenizer",
            )
        return tuple(ids)

    def layer_ids(self, wanted: Sequence[int] | None = None) -> tuple[int, ...]:
        """Three auxiliary ids and num_hidden_layers, ascending.

        Id k names the residual stream that enters layer k, so the last is num_hidden_layers and
        stands for what the final norm is given.

        Args:
            wanted: from the configuration; None takes `default_layer_ids`.

        Raises ConfigError for ids that break this.
        """
        last = self.num_hidden_layers
        ids = tuple(default_layer_ids(last) if wanted is None else wanted)
        auxiliary = ids[:-1]
        right = (
            len(ids) == 4
            and ids[-1] == last
            and list(auxiliary) == sorted(set(auxiliary))
            and auxiliary[0] > 0
            and auxiliary[-1] < last
        )
        if not right:
            raise ConfigError(
                "extract.layer_ids",
                wanted=f"three different ids between 1 and {last - 1}, ascending, then {last}",
                found=list(ids),
                remedy="note that id k is the input of layer k: "
                "the output of layer k, as older lists count, is k + 1",
            )
        return ids
