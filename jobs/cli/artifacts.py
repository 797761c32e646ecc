"""The commands about artefacts, wherever they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping

COMMANDS: Mapping[str, Callable[..., int]] = {}
"""Name of a command -> its function."""
