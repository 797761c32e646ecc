"""Data sets of the hub as sources, by the real client, from a server that answers as the hub."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

from eagle3.conversations import open_sources
from eagle3.errors import ConfigError, ServiceUnavailable

ROWS = b"".join(b'{"prompt": "%d", "response": "x"}\n' % number for number in range(500))
FILES = {"data/train-0.jsonl": ROWS, "data/train-1.jsonl": ROWS[:330], "README.md": b"# chats\n"}
REPO = "/api/datasets/owner/chats"


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *args: Any) -> None: ...

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith(f"{REPO}/tree/"):
            below = path.removeprefix(f"{REPO}/tree/").partition("/")[2]
            return self._send(200, json.dumps(entries(below)).encode())
        if path.startswith(f"{REPO}/paths-info/"):
            return self._send(200, json.dumps(entries("data")).encode())
        if path.startswith(REPO):
            return self._send(200, json.dumps({"id": "owner/chats", "sha": "a" * 40}).encode())
        name = path.partition("/resolve/")[2].partition("/")[2]
        if name not in FILES:
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        start, end = self.headers["Range"].removeprefix("bytes=").split("-")
        return self._send(206, FILES[name][int(start) : int(end) + 1])

    def _send(self, code: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def entries(below: str) -> list[dict[str, Any]]:
    """What the hub lists in a folder, folders included."""
    start = f"{below}/" if below else ""
    files = [name for name in FILES if name.startswith(start)]
    found: list[dict[str, Any]] = [
        {"type": "file", "path": name, "size": len(FILES[name]), "oid": "0" * 40} for name in files
    ]
    return found + ([] if below else [{"type": "directory", "path": "data", "oid": "0" * 40}])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hub as this process's client sees it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    reach(monkeypatch, server.server_address[1])
    yield
    server.shutdown()
    thread.join()
    server.server_close()


def reach(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    url = f"http://127.0.0.1:{port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def test_files_of_a_data_set_are_read_as_any_other(hub: None) -> None:
    first, second = open_sources(["hf://datasets/owner/chats/data/*.jsonl"])
    facts, num_rows = first.measure()
    assert (facts.url, facts.bytes) == ("hf://datasets/owner/chats/data/train-0.jsonl", len(ROWS))
    assert (facts.sha256, num_rows) == (hashlib.sha256(ROWS).hexdigest(), 500)
    assert [row.record()["prompt"] for row in second.rows()] == [str(at) for at in range(10)]


def test_a_data_set_that_is_not_there_is_a_fault_of_the_configuration(hub: None) -> None:
    with pytest.raises(ConfigError, match="a file of conversations"):
        open_sources(["hf://datasets/owner/chats/data/absent.jsonl"])
    with pytest.raises(ConfigError, match="a data set of the hub that HF_TOKEN may read"):
        open_sources(["hf://datasets/owner/other/a.jsonl"])


def test_a_hub_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reach(monkeypatch, 9)
    with pytest.raises(ServiceUnavailable, match="an answer from the hub"):
        open_sources(["hf://datasets/owner/chats/a.jsonl"])
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ServiceUnavailable, match="offline mode is enabled"):
        open_sources(["hf://datasets/owner/chats/a.jsonl"])
