"""The hidden-states backend: upstream's loader asks for row i, and gets it from the store.

Every sample comes by one ranged read and is checked whole (length, checksum, finiteness) before
the trainer sees it; a row that cannot be read is an error, never a gap in a packed batch.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from hs_connectors import HiddenStatesBackend, HiddenStatesTransfer

from eagle3.draft.rows import RowIndex
from eagle3.shards import read_sample

BACKEND = "eagle3-store"


class StoreTransfer(HiddenStatesTransfer):  # type: ignore[misc]
    """Reads samples from the shards that an index points into. Can be pickled."""

    def __init__(self, index: RowIndex) -> None:
        self._index = index
        self._store = index.open()

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor]:
        """Row `file_idx` of the data set: `hidden_states` bf16 [T, L, H], `token_ids` [T].

        Raises ShardInvalid, or what the store raises; never answers None for a missing row.
        """
        sample = read_sample(self._store, self._index.refs[file_idx], finite=True)
        return {"hidden_states": sample.hidden_states, "token_ids": sample.input_ids}

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Never called: rows are never missing, so upstream never asks a server for one."""
        raise NotImplementedError


@HiddenStatesBackend.register(BACKEND)
class StoreBackend(HiddenStatesBackend):  # type: ignore[misc]
    """How upstream finds the transfer by name. It adds no arguments of its own."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        """No arguments: the index lies in the data set folder."""

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        """No arguments."""

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> StoreTransfer:  # noqa: ARG004
        """The transfer for a data set folder that `eagle3.draft.rows` wrote."""
        return StoreTransfer(RowIndex.load(Path(data_path)))

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        """Never called: extract configures vLLM itself."""
        raise NotImplementedError
