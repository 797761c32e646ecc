"""A folder of version 1, as older tools wrote it: ten fields, samples, counts, a mapping."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

OLD_LAYER_IDS = (1, 3, 4, 7)
"""Of eight layers, counted as outputs; today's are one more each."""


def make_old_folder(
    folder: Path, *, hidden_size: int, vocab_size: int, num_rows: int = 10, seed: int = 0
) -> Path:
    """Write a whole folder of random samples and return it."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(num_rows):
        length = int(torch.randint(8, 60, (1,), generator=draw))
        mask = torch.ones(length, dtype=torch.int64)
        mask[:3] = 0
        layers = [torch.randn(length, hidden_size, generator=draw) for _ in OLD_LAYER_IDS]
        rows.append(
            {
                "input_ids": torch.randint(0, vocab_size, (length,), generator=draw),
                "hidden_states": [layer.to(torch.bfloat16) for layer in layers],
                "loss_mask": mask,
            }
        )
    write_folder(folder, rows, vocab_size=vocab_size)
    return folder


def write_folder(
    folder: Path, rows: Sequence[dict[str, Any]], *, vocab_size: int, **fields: Any
) -> None:
    """Write samples with the manifest, the counts and the mapping that go with them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, row in enumerate(rows):
        torch.save(row, folder / f"data_{number}.pt")
    supervised = torch.cat([row["input_ids"][row["loss_mask"] == 1] for row in rows])
    counts = torch.bincount(supervised, minlength=vocab_size)
    torch.save(counts, folder / "token_freq.pt")
    ids = counts.argsort(descending=True, stable=True)[:128].sort().values
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    torch.save(t2d, folder / "t2d.pt")
    torch.save(ids - torch.arange(len(ids)), folder / "d2t.pt")
    manifest = {
        "model_path": "/shared/tiny",
        "layer_ids": list(OLD_LAYER_IDS),
        "max_seq_len": 64,
        "tp_size": 8,
        "total_samples": len(rows),
        "total_tokens": sum(len(row["input_ids"]) for row in rows),
        "total_time_seconds": 1.69976,
        "data_format_version": 1,
        "hidden_size": rows[0]["hidden_states"][0].shape[1],
        "num_layers_captured": 4,
    }
    (folder / "data_config.json").write_text(json.dumps({**manifest, **fields}))


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """The samples of a folder, in order."""
    count = len(list(folder.glob("data_*.pt")))
    return [torch.load(folder / f"data_{number}.pt") for number in range(count)]
