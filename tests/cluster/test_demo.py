"""The demonstration's verifier and chats by `helm install`, as far as two processors let it be."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import figures
from tests.cluster.cluster import Cluster, Namespace
from tests.cluster.release import Release, give_credentials, merged, upload_demo, values_of
from tests.s3_server import BUCKET
from tests.tiny_run import artifact_at

pytestmark = [pytest.mark.cluster, pytest.mark.images, pytest.mark.slow, pytest.mark.timeout(3600)]

# Of 1100 conversations, 128 tokens of answer, four epochs and 200 prompts in the profile for CPUs.
SMALLER = {
    "prepare": {
        "max_seq_len": 256,
        "max_conversations": 40,
        "heldout_share": 0.2,
        "max_heldout": 8,
    },
    "regenerate": {"max_turns": 1, "max_new_tokens": 24, "unit_rows": 16},
    "extract": {"unit_rows": 16},
    "vocab": {"draft_vocab_size": 1024},
    "train": {"total_seq_len": 256, "epochs": 1, "max_steps": 8, "validation_share": 0.1},
    "evaluate": {"num_prompts": 8, "max_new_tokens": 24, "speed_prompts": 2, "lossless_prompts": 8},
}


def test_smollm2_goes_from_chats_to_a_measured_draft(
    loaded: Cluster, inputs: dict[str, Any], namespace: Namespace, tmp_path: Path
) -> None:
    assert loaded.s3 is not None
    give_credentials(namespace, loaded.s3)
    demo = merged(merged(inputs, upload_demo(tmp_path)), SMALLER)
    demo["verifier"]["serving_name"] = "HuggingFaceTB/SmolLM2-135M-Instruct"
    release = Release(
        namespace=namespace,
        name="demo",
        folder=tmp_path,
        values=values_of(loaded.s3, demo, store=f"s3://{BUCKET}/{namespace.name}"),
    )
    started = time.monotonic()
    release.helm("install")
    release.wait("runner", seconds=3000)
    figures.record(demo_seconds_cluster=round(time.monotonic() - started, 1))
    store = release.store(release.run_name())
    evaluated = artifact_at(store, "evaluate").manifest.facts
    assert evaluated["lossless"]
    assert evaluated["heldout_prompts"] == 8
    assert artifact_at(store, "prepare").manifest.total_samples == 32
