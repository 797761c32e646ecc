"""Of a checkpoint only the bytes that are needed are read: from a folder and from a real S3."""

import shutil
import tempfile
from pathlib import Path

import pytest

from eagle3.config import VerifierConfig
from eagle3.errors import EnvironmentMisconfigured
from eagle3.store import Store, open_store
from eagle3.verifier import open_verifier
from eagle3.verifier.files import SCRATCH_BYTES, open_files
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


class TestRoom:
    """Whether a download fits is asked before a byte of it is read."""

    def remote(self, folder: Path) -> str:
        store = open_store(f"memory://room/{folder.name}")
        for path in folder.iterdir():
            store.put_file(path, path.name)
        return store.url

    def test_the_pod_s_limit_counts_where_the_node_s_disk_is_larger(
        self,
        models: dict[str, Path],
        read: list[tuple[str, int]],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        needed = sum(path.stat().st_size for path in models["kimi"].iterdir())
        files = open_files(self.remote(models["kimi"]))
        monkeypatch.setenv(SCRATCH_BYTES, str(needed - 1))
        with pytest.raises(EnvironmentMisconfigured) as refused:
            files.whole_folder(tmp_path)
        assert f"wanted room for {needed} bytes" in str(refused.value)
        assert f"found {needed - 1} bytes before its pod is evicted" in str(refused.value)
        assert "stages.<stage>.scratch" in str(refused.value)
        assert not read
        monkeypatch.setenv(SCRATCH_BYTES, str(needed))
        assert files.whole_folder(tmp_path).is_dir()

    def test_the_disk_counts_where_it_is_smaller(
        self, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        full = shutil.disk_usage(tmp_path)._replace(free=1000)
        monkeypatch.setattr("eagle3.verifier.files.shutil.disk_usage", lambda place: full)
        monkeypatch.setenv(SCRATCH_BYTES, str(10**15))
        files = open_files(self.remote(models["llama"]))
        with pytest.raises(EnvironmentMisconfigured, match="found 1000 bytes free on its disk"):
            files.whole_folder(tmp_path)

    def test_the_pod_s_limit_is_not_that_of_a_claim_mounted_elsewhere(
        self, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Another mount than that of the test's own folder, on every Linux.
        monkeypatch.setattr(tempfile, "tempdir", "/proc")
        monkeypatch.setenv(SCRATCH_BYTES, "1")
        assert open_files(self.remote(models["llama"])).whole_folder(tmp_path).is_dir()

    def test_a_limit_that_is_no_number_is_one_sentence(
        self, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(SCRATCH_BYTES, "200Gi")
        with pytest.raises(EnvironmentMisconfigured, match="wanted a number of bytes, found 200Gi"):
            open_files(self.remote(models["llama"])).whole_folder(tmp_path)
