"""What a run starts from, by sizes alone: its files of conversations and its verifier."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path
from typing import Any

from eagle3.config import HUB_ID
from eagle3.errors import ConfigError
from eagle3.store import open_store


def files_named(url: str) -> list[tuple[str, int]]:
    """(url, bytes) of a file of `prepare.data`, or of all its pattern's, in prepare's order.

    Raises ConfigError where there is none.
    """
    folder, _, name = url.rpartition("/")
    store = open_store(folder or ("/" if url.startswith("/") else "."))
    if any(mark in name for mark in "*?["):
        plain = (info for info in store.list() if "/" not in info.path)
        found = {info.path: info.bytes for info in plain if fnmatch.fnmatch(info.path, name)}
    else:
        try:
            found = {name: store.size(name)}
        except FileNotFoundError:
            found = {}
    if not found:
        raise ConfigError(
            "prepare.data", wanted="files that are there", found=url, remedy="correct the path"
        )
    return [(f"{store.url}/{path}", size) for path, size in found.items()]


def figures_at(source: str) -> dict[str, Any] | None:
    """The plain text config of a verifier, with its layers, width and vocabulary as numbers.

    None for one of the hub, which a plan does not ask. Raises ConfigError.
    """
    if HUB_ID.fullmatch(source) and not Path(source).exists():
        return None
    try:
        raw = json.loads(open_store(source).read_bytes("config.json"))
        text: dict[str, Any] = raw.get("text_config", raw)
        sizes = ("num_hidden_layers", "hidden_size", "vocab_size")
        return {**text, **{name: int(text[name]) for name in sizes}}
    except (
        FileNotFoundError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise ConfigError(
            f"{source}/config.json",
            wanted="the verifier's config.json, with its layers, hidden and vocabulary size",
            found=f"{type(error).__name__}: {error}",
            remedy="correct verifier.source",
        ) from error
