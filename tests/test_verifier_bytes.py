"""Of a checkpoint only the bytes that are needed are read: from a folder and from a real S3."""

from pathlib import Path

import pytest

from eagle3.config import VerifierConfig
from eagle3.store import Store, open_store
from eagle3.verifier import open_verifier
from tests import weight_bytes
from tests.s3_server import BUCKET, S3Server
from tests.tiny_verifiers import make_kimi, make_llama

PLAIN = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
KEYS = {"llama": PLAIN, "kimi": tuple(f"language_model.{key}" for key in PLAIN)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A single file that is mostly layers, and several files with an index."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "llama": make_llama(folder / "llama", hidden_size=256, num_layers=12),
        "kimi": make_kimi(folder / "kimi"),
    }


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(path, bytes) of everything that any store gives, as it is given."""
    given: list[tuple[str, int]] = []
    ranged, whole, download = Store.read_range, Store.read_bytes, Store.get_file

    def read_range(self: Store, path: str, start: int, end: int) -> bytes:
        data = ranged(self, path, start, end)
        given.append((path, len(data)))
        return data

    def read_bytes(self: Store, path: str) -> bytes:
        data = whole(self, path)
        given.append((path, len(data)))
        return data

    def get_file(self: Store, path: str, target: Path) -> None:
        download(self, path, target)
        given.append((path, target.stat().st_size))

    monkeypatch.setattr(Store, "read_range", read_range)
    monkeypatch.setattr(Store, "read_bytes", read_bytes)
    monkeypatch.setattr(Store, "get_file", get_file)
    return given


def of_weights(read: list[tuple[str, int]]) -> int:
    return sum(count for path, count in read if path.endswith(".safetensors"))


def check(source: str, folder: Path, keys: tuple[str, ...], read: list[tuple[str, int]]) -> None:
    """Where the three lie, which weights they are, and the three: each for its own bytes."""
    verifier = open_verifier(VerifierConfig(source=source))
    assert of_weights(read) == 0
    _ = verifier.stored
    assert of_weights(read) <= sum(sizes[""] for sizes in weight_bytes.headers(folder).values())
    verifier.facts()
    told = weight_bytes.identity(folder, keys)
    assert of_weights(read) == told
    verifier.three_tensors()
    assert of_weights(read) == told + weight_bytes.three(folder, keys)


@pytest.mark.parametrize("name", KEYS)
def test_of_a_folder(models: dict[str, Path], name: str, read: list[tuple[str, int]]) -> None:
    check(str(models[name]), models[name], KEYS[name], read)


def test_of_a_bucket(
    models: dict[str, Path], s3_environment: S3Server, read: list[tuple[str, int]]
) -> None:
    url = f"s3://{BUCKET}/verifier-bytes"
    store = open_store(url)
    for path in models["kimi"].iterdir():
        store.put_file(path, path.name)
    check(url, models["kimi"], KEYS["kimi"], read)


def test_what_is_read_is_a_small_part_of_a_large_file(models: dict[str, Path]) -> None:
    size = (models["llama"] / "model.safetensors").stat().st_size
    assert weight_bytes.identity(models["llama"], KEYS["llama"]) < size / 8
