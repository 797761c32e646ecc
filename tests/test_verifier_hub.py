"""A verifier on the hub: ranges instead of downloads, and one commit from prepare on.

The hub is a server of this process that answers as huggingface.co does to the real client, and
so is the storage that it sends the client to for weights.
"""

import contextlib
import json
import shutil
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from huggingface_hub import constants

from eagle3.config import VerifierConfig
from eagle3.errors import (
    ConfigError,
    EnvironmentMisconfigured,
    PermissionRefused,
    ServiceUnavailable,
    VerifierInvalid,
)
from eagle3.verifier import Verifier, hub, open_verifier
from eagle3.verifier.files import SCRATCH_BYTES
from tests import weight_bytes
from tests.tiny_verifiers import make_kimi

COMMITS = ("a" * 40, "b" * 40)
REPO = "owner/tiny"
KEYS = tuple(
    f"language_model.{key}.weight" for key in ("model.embed_tokens", "model.norm", "lm_head")
)


class Hub(ThreadingHTTPServer):
    """One repository, whose commits are folders; the last is `main`.

    Attributes:
        sent: bytes of each file that were sent, by name.
        expired: how often a request for a range is refused, as an address signed too long ago is.
        storage: where weights lie; None is here.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.commits: dict[str, Path] = {}
        self.sent: dict[str, int] = {}
        self.expired = 0
        self.storage: Storage | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Storage(ThreadingHTTPServer):
    """Where the hub sends the client for weights: another host, which must not see the token.

    Attributes:
        ranges: how many ranges were sent.
        whole: whether it ignores ranges, as some proxies do.
        short: bytes that are missing at the end of each answer.
    """

    daemon_threads = True

    def __init__(self, hub: Hub) -> None:
        super().__init__(("127.0.0.1", 0), _StorageHandler)
        self.hub = hub
        self.ranges = 0
        self.whole = False
        self.short = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _StorageHandler(BaseHTTPRequestHandler):
    server: Storage

    def log_message(self, *args: Any) -> None: ...

    def do_GET(self) -> None:
        commit, name = self.path.strip("/").split("/")
        data, code = (self.server.hub.commits[commit] / name).read_bytes(), 200
        if self.headers.get("Authorization"):
            data, code = b"the token is not for this host", 400
        elif not self.server.whole:
            start, end = self.headers["Range"].removeprefix("bytes=").split("-")
            data, code = data[int(start) : int(end) + 1 - self.server.short], 206
            self.server.ranges += 1
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *args: Any) -> None: ...

    def _answer(self) -> None:
        parts = urlsplit(self.path).path.strip("/").split("/")
        if parts[:1] == ["api"]:
            if parts[2:4] != REPO.split("/"):
                return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            what, revision = parts[4], parts[5]
            commit = list(self.server.commits)[-1] if revision == "main" else revision
            if (folder := self.server.commits.get(commit)) is None:
                return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            files = [
                {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": "0" * 40}
                for p in sorted(folder.iterdir())
            ]
            tree: Any = files if what == "tree" else {"id": REPO, "sha": commit, "siblings": []}
            return self._send(200, json.dumps(tree).encode(), {})
        commit, name = parts[3], parts[4]
        path = self.server.commits[commit] / name
        if not path.exists():
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        data = path.read_bytes()
        facts = {"X-Repo-Commit": commit, "ETag": f'"{commit}{name}"'}
        if self.server.storage is not None and name.endswith(".safetensors"):
            facts["X-Linked-Size"] = str(len(data))
            facts["Location"] = f"{self.server.storage.url}/{commit}/{name}"
            return self._send(302, b"", facts)
        if asked := self.headers.get("Range"):
            if self.server.expired:
                self.server.expired -= 1
                return self._send(403, b"", {})
            start, end = asked.removeprefix("bytes=").split("-")
            return self._send(206, data[int(start) : int(end) + 1], facts, name)
        return self._send(200, data, facts, name)

    def _send(self, code: int, data: bytes, headers: dict[str, str], name: str = "") -> None:
        self.send_response(code)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "GET":
            # Counted first: whoever has the answer may look at once.
            self.server.sent[name] = self.server.sent.get(name, 0) + len(data)
            self.wfile.write(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Kimi-shaped verifier: several weight files, never written to."""
    return make_kimi(tmp_path_factory.mktemp("models") / "kimi")


@pytest.fixture
def server(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub as this process's client sees it, with the verifier as its only commit."""
    found = Hub()
    found.commits[COMMITS[0]] = folder
    template = found.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", found.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    hub._located.cache_clear()
    with serving(found):
        yield found


@pytest.fixture
def storage(server: Hub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    """A host that the hub sends the client to for weights, and a token that is not for it."""
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_hub_alone")
    server.storage = Storage(server)
    with serving(server.storage):
        yield server.storage


@contextlib.contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield
    server.shutdown()
    thread.join()
    server.server_close()


def opened(source: str = REPO, **settings: Any) -> Verifier:
    return open_verifier(VerifierConfig(source=source, **settings))


def test_the_fingerprint_is_that_of_the_same_folder_and_no_weight_file_is_downloaded(
    folder: Path, server: Hub
) -> None:
    there, here = opened(), opened(str(folder))
    assert there.facts().elsewhere() == here.facts()
    assert there.facts().commit == COMMITS[0]
    assert there.tokenizer_facts() == here.tokenizer_facts()
    assert not list(there.files.store.local_path("").glob("model-*"))  # type: ignore[union-attr]
    weights = sorted(folder.glob("model-*.safetensors"))
    asked = sum(server.sent[path.name] for path in weights)
    assert asked == weight_bytes.identity(folder, KEYS) < sum(p.stat().st_size for p in weights)
    there.three_tensors()
    again = sum(server.sent[path.name] for path in weights) - asked
    assert again == weight_bytes.three(folder, KEYS)


@pytest.mark.slow
def test_later_stages_open_the_commit_that_the_data_was_prepared_with(
    folder: Path, server: Hub, tmp_path: Path
) -> None:
    before = opened().facts()
    moved = Path(shutil.copytree(folder, tmp_path / "moved"))
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps({**config, "changed": 1}))
    server.commits[COMMITS[1]] = moved
    assert opened().facts().commit == COMMITS[1]
    later = open_verifier(VerifierConfig(source=REPO), before)
    assert later.facts() == before
    assert later.local_folder(tmp_path).name == COMMITS[0]
    pinned = VerifierConfig(source=REPO, revision=COMMITS[1])
    with pytest.raises(VerifierInvalid, match="fingerprint"):
        open_verifier(pinned, before)


def test_a_worker_of_prepare_opens_the_same_commit(server: Hub) -> None:
    assert opened().pinned(VerifierConfig(source=REPO)).revision == COMMITS[0]


def test_a_commit_that_is_not_there_is_one_sentence(server: Hub) -> None:
    with pytest.raises(ConfigError, match=r"correct verifier\.revision"):
        opened(revision=COMMITS[1])


@pytest.mark.parametrize("source", ["my--model", "a..b", "models/foo"])
def test_a_mistyped_path_is_told_as_no_folder_and_no_repository(
    server: Hub, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no such folder and no such repository") as caught:
        opened(source)
    assert "\n" not in str(caught.value)


def test_ranges_come_from_the_storage_without_the_token(
    folder: Path, server: Hub, storage: Storage
) -> None:
    assert opened().facts().elsewhere() == opened(str(folder)).facts()
    assert storage.ranges > 0
    assert not any(name.endswith(".safetensors") for name in server.sent if server.sent[name])


def test_a_host_whose_name_begins_like_the_hub_s_is_another() -> None:
    assert hub._origin("https://huggingface.co.example/x") != hub._origin("https://huggingface.co")
    assert hub._origin("https://huggingface.co/owner/x") == hub._origin("https://huggingface.co")
    assert hub._origin("http://huggingface.co/owner/x") != hub._origin("https://huggingface.co")


def test_a_whole_file_in_answer_to_a_range_is_refused(server: Hub, storage: Storage) -> None:
    storage.whole = True
    with pytest.raises(EnvironmentMisconfigured, match="the whole of it"):
        opened().facts()


def test_an_answer_that_is_too_short_is_refused(server: Hub, storage: Storage) -> None:
    storage.short = 1
    with pytest.raises(ServiceUnavailable, match="wanted the 8 bytes from byte 0, found 7 bytes"):
        opened().facts()


def test_an_address_that_is_refused_again_is_a_matter_of_permission(server: Hub) -> None:
    server.expired = 1_000_000
    with pytest.raises(PermissionRefused, match="status 403"):
        opened().facts()


def test_an_address_that_has_expired_is_asked_for_anew(folder: Path, server: Hub) -> None:
    server.expired = 1
    assert opened().facts().elsewhere() == opened(str(folder)).facts()


def test_a_weight_file_that_the_repository_lacks(folder: Path, server: Hub, tmp_path: Path) -> None:
    cut = Path(shutil.copytree(folder, tmp_path / "cut"))
    missing = sorted(cut.glob("model-*.safetensors"))[-1]
    missing.unlink()
    server.commits[COMMITS[1]] = cut
    with pytest.raises(VerifierInvalid, match=f"owner/tiny/{missing.name}: wanted this file"):
        opened().facts()


def test_a_hub_id_without_the_hub_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ServiceUnavailable) as caught:
        opened("owner/some-model")
    told = str(caught.value)
    assert "owner/some-model: wanted a local folder of that name, or the hub" in told
    assert "\n" not in told


def test_a_misspelt_folder_is_no_fault_of_the_hub_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("models/mine").mkdir(parents=True)
    with pytest.raises(ConfigError) as caught:
        opened("models/mien")
    assert "found no such folder in models, and no answer from the hub" in str(caught.value)


def test_a_hub_id_in_the_cache_needs_no_hub(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repo, commit = tmp_path / "models--owner--tiny", COMMITS[0]
    shutil.copytree(folder, repo / "blobs")
    (repo / "snapshots" / commit).mkdir(parents=True)
    for path in (repo / "blobs").iterdir():
        (repo / "snapshots" / commit / path.name).symlink_to(path)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    verifier = opened()
    here = opened(str(folder))
    assert verifier.facts() == msgspec.structs.replace(here.facts(), commit=commit)
    assert verifier.tokenizer_facts() == here.tokenizer_facts()
    assert verifier.local_folder(tmp_path) == repo / "snapshots" / commit


def test_a_verifier_that_the_pod_may_not_hold_is_refused_before_a_weight_is_downloaded(
    folder: Path, server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    verifier = opened()
    weights = sum(path.stat().st_size for path in folder.glob("model-*.safetensors"))
    monkeypatch.setenv(SCRATCH_BYTES, str(weights - 1))
    with pytest.raises(EnvironmentMisconfigured, match=f"room for {weights} bytes of owner/tiny"):
        verifier.local_folder(tmp_path)
    assert not any(name.endswith(".safetensors") for name in server.sent)
    monkeypatch.setenv(SCRATCH_BYTES, str(weights))
    assert verifier.local_folder(tmp_path).name == COMMITS[0]
    monkeypatch.setenv(SCRATCH_BYTES, "1")
    assert verifier.local_folder(tmp_path).name == COMMITS[0], "nothing is left to download"
