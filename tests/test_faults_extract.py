"""Faults of extracting that no other file's tests answer for, each by its row of the table."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
import torch

from eagle3.capture import CapturedRow, check_states
from eagle3.errors import CaptureInvalid
from jobs.process import run_stage
from tests.upstreams import CONFIG

IDS = [5, 3, 8, 1]


def test_b108_the_state_of_a_generated_token_is_never_taken_for_one_of_the_prompt() -> None:
    states = torch.randn(len(IDS) + 1, 4, 16, generator=torch.Generator().manual_seed(0))
    ids = torch.tensor(IDS)
    assert check_states(CapturedRow(ids, states[:-1]), IDS, num_layers=4, hidden_size=16) is None
    with pytest.raises(CaptureInvalid, match="tokens, layers, hidden"):
        check_states(CapturedRow(ids, states), IDS, num_layers=4, hidden_size=16)
    answered = torch.cat([ids, torch.tensor([7])])
    with pytest.raises(CaptureInvalid, match="the 4 ids that were sent"):
        check_states(CapturedRow(answered, states), IDS, num_layers=4, hidden_size=16)


def test_b101_a_store_that_cannot_keep_what_is_written_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    fsspec.register_implementation("forgetful", "tests.test_store_urls.Forgetful", clobber=True)
    arguments = ["--config", str(tmp_path / "run.yaml"), "--store", "forgetful://run"]
    begun: list[str] = []
    assert run_stage("prepare", lambda run: begun.append(run.store.url) or "", arguments) == 78
    assert begun == []
    assert "only one of two writers" in capsys.readouterr().err
