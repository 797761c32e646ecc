"""What a process of a run is told: its configuration and its store."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from eagle3.config import RunConfig, load_config
from eagle3.errors import ConfigError
from eagle3.store import Store, open_store


class Parser(argparse.ArgumentParser):
    """A parser whose complaint is an error of ours, so that it reads and exits like any other."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            "arguments",
            wanted="those that --help lists",
            found=message,
            remedy="correct the command",
        )


def arguments(name: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """`--config FILE`, and `--store URL` or EAGLE3_STORE where the file names no store."""
    parser = Parser(prog=f"python -m jobs.{name}")
    parser.add_argument("--config", type=Path, required=True, help="the run's YAML file")
    parser.add_argument("--store", help="the run's prefix, any fsspec URL; overrides the file's")
    if name == "gate":
        parser.add_argument("--stage", required=True, help="the stage whose inputs are gated")
    if name == "importing":
        parser.add_argument("--source", required=True, help="a folder of version 1")
    return parser.parse_args(argv)


def load_run(found: argparse.Namespace) -> tuple[RunConfig, Store]:
    """The configuration and the run's store that a process was given."""
    config = load_config(found.config)
    return config, run_store(config, found.store)


def run_store(config: RunConfig, named: str | None) -> Store:
    """The run's store, by an argument, the environment or the configuration. Raises ConfigError."""
    url = named or os.environ.get("EAGLE3_STORE") or config.store
    if not url:
        raise ConfigError(
            "store",
            wanted="a prefix in object storage, such as s3://bucket/run",
            found="none",
            remedy="give --store, or write it in the configuration",
        )
    store = open_store(url)
    if store.scheme == "memory":
        raise ConfigError(
            "store",
            wanted="a prefix that outlives this process, such as file:// or s3://",
            found=store.url,
            remedy="name another",
        )
    return store
