"""A verifier's tokenizer: the class that its files declare, proven before it is used.

transformers rebuilds some published tokenizers as another class, which loses spaces or splits
control tokens, without a word. So a tokenizer is accepted only when it encodes as its own
`tokenizer.json` does, gives texts back, and keeps every special token in one piece.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from eagle3.errors import ConfigError, VerifierInvalid
from eagle3.manifest import TokenizerFacts

CHAT_TEMPLATE_NAME = "chat_template.jinja"
GENERATION_CONFIG_NAME = "generation_config.json"

_VOCABULARY_FILES = frozenset({
    "added_tokens.json", "merges.txt", "special_tokens_map.json", "spiece.model",
    "tiktoken.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "vocab.json", "vocab.txt",
})  # fmt: skip
# Texts that byte-level and word-piece vocabularies both give back: no outer spaces, composed
# letters only. They catch lost spaces, lost line breaks, split digits and lost bytes.
_PROBES = (
    "a b",
    "Hello  world, how are\nyou?  It's 12,345.60 today!",
    "def add(first, second):\n\treturn first + second\n\n# done",
    "naïve café, 日本語, привет, 😀 fin",
)
# What from_pretrained raises for files that are missing or are not what they should be.
_LOADING = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError)


def is_tokenizer_file(path: str) -> bool:
    """Whether a file of the verifier's folder takes part in tokenising, templates included."""
    return is_vocabulary_file(path) or is_template_file(path)


def is_vocabulary_file(path: str) -> bool:
    """Vocabulary, merges, settings, and the code that a tokenizer may bring."""
    top = "/" not in path
    return top and (path in _VOCABULARY_FILES or path.endswith((".tiktoken", ".py")))


def is_template_file(path: str) -> bool:
    """Chat templates that lie beside the settings."""
    return path in (CHAT_TEMPLATE_NAME, "chat_template.json") or (
        path.startswith("additional_chat_templates/") and path.endswith(".jinja")
    )


def open_tokenizer(
    folder: Path, *, vocab_size: int, trust_remote_code: bool
) -> PreTrainedTokenizerBase:
    """Load and prove the tokenizer of a local folder.

    Args:
        folder: holds the tokenizer's files and config.json.
        vocab_size: rows of lm_head; every token id must be below.
        trust_remote_code: whether Python files of the folder may run.

    Raises ConfigError where its code must be trusted first, VerifierInvalid for anything wrong.
    """
    declared = _declared_remote_class(folder)
    raw = _raw_tokenizer(folder / "tokenizer.json")
    if declared and not trust_remote_code and raw is None:
        raise _must_be_trusted(declared, folder)
    try:
        tokenizer = _load(AutoTokenizer, folder, trust_remote_code)
    except VerifierInvalid as error:
        if declared and not trust_remote_code:
            # A tokenizer.json is of no use beside a class whose name transformers does not know.
            raise _must_be_trusted(declared, folder) from error
        raise
    if declared and trust_remote_code and not _is_of(tokenizer, declared):
        raise VerifierInvalid(
            f"{folder}: tokenizer class",
            wanted=declared,
            found=type(tokenizer).__name__,
            remedy="bring the files that tokenizer_config.json names",
        )
    if raw is not None and declared and trust_remote_code:
        _check_remote_class(tokenizer, raw, folder)
    elif raw is not None:
        tokenizer = _equal_to_raw(tokenizer, raw, folder)
    _check_template(tokenizer, folder)
    _check_special_tokens(tokenizer, folder)
    _check_round_trip(tokenizer, folder)
    _check_ids(tokenizer, vocab_size, folder)
    return tokenizer


def _must_be_trusted(declared: str, folder: Path) -> ConfigError:
    return ConfigError(
        "verifier.trust_remote_code",
        wanted=f"true, to run {declared} of {folder}",
        found="false",
        remedy="read that file, then set it",
    )


def facts_of(tokenizer: PreTrainedTokenizerBase, folder: Path) -> TokenizerFacts:
    """Hash over the tokenizer's files and the template in effect, wherever that was written.

    Where a folder has both tokenizer.json and a class of its own, it is part of it which of them
    encodes.
    """
    digest = hashlib.sha256()
    names = sorted(
        str(path.relative_to(folder)) for path in folder.iterdir() if is_vocabulary_file(path.name)
    )
    for name in names:
        content = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        digest.update(f"{name} {content}\n".encode())
    template = json.dumps(tokenizer.chat_template, sort_keys=True)
    digest.update(template.encode())
    declared = _declared_remote_class(folder)
    if declared and "tokenizer.json" in names and _is_of(tokenizer, declared):
        digest.update(f"\n{declared}".encode())
    return TokenizerFacts(fingerprint=digest.hexdigest(), size=len(tokenizer))


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of every special token: the named ones and those that are only marked as special."""
    marked = (i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset({*tokenizer.all_special_ids, *marked})


def stop_ids(tokenizer: PreTrainedTokenizerBase, generation_config: dict[str, Any]) -> set[int]:
    """Ids that end an answer: those of generation_config.json and the tokenizer's own."""
    stops = generation_config.get("eos_token_id")
    ids = {*(stops if isinstance(stops, list) else [stops]), tokenizer.eos_token_id} - {None}
    wrong = [i for i in ids if not isinstance(i, int)]
    if wrong:
        raise VerifierInvalid(
            f"{GENERATION_CONFIG_NAME}: eos_token_id",
            wanted="a number or a list of numbers",
            found=repr(wrong[0]),
            remedy="correct it",
        )
    return ids


def read_settings(path: Path) -> dict[str, Any]:
    """A small JSON file; empty where there is none. Raises VerifierInvalid for no object."""
    if not path.exists():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise VerifierInvalid(
            str(path), wanted="a JSON object", found=error, remedy="download the file again"
        ) from error
    if not isinstance(settings, dict):
        found = type(settings).__name__
        raise VerifierInvalid(
            str(path), wanted="a JSON object", found=found, remedy="download the file again"
        )
    return settings


def write_effective_template(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the template in effect as a file of its own, which every reader prefers."""
    if isinstance(tokenizer.chat_template, str):
        (folder / CHAT_TEMPLATE_NAME).write_text(tokenizer.chat_template, encoding="utf-8")


def _load(kind: Any, folder: Path, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    try:
        tokenizer = kind.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except _LOADING as error:
        raise VerifierInvalid(
            f"{folder}: tokenizer",
            wanted="one that transformers can load",
            found=" ".join(f"{type(error).__name__}: {error}".split())[:300],
            remedy="bring every tokenizer file that was published with the model",
        ) from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def _raw_tokenizer(path: Path) -> Tokenizer | None:
    """tokenizer.json as the tokenizers library reads it; None where there is none."""
    if not path.exists():
        return None
    # It raises a bare Exception, which a future holds without anything broad being caught.
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(Tokenizer.from_file, str(path))
    if (error := reading.exception()) is not None:
        raise VerifierInvalid(
            str(path),
            wanted="a tokenizer that this release of tokenizers can read",
            found=" ".join(str(error).split())[:300],
            remedy="download the file again, or save it with an older release",
        ) from error
    return reading.result()


def _declared_remote_class(folder: Path) -> str | None:
    """The class that tokenizer_config.json asks for in the folder's own Python files, if any."""
    declared = read_settings(folder / "tokenizer_config.json").get("auto_map") or {}
    classes = declared.get("AutoTokenizer") if isinstance(declared, dict) else declared
    names = [classes] if isinstance(classes, str) else [name for name in classes or () if name]
    return names[0] if names else None


def _is_of(tokenizer: PreTrainedTokenizerBase, declared: str) -> bool:
    return type(tokenizer).__name__ == declared.split(".")[-1]


def _check_remote_class(tokenizer: PreTrainedTokenizerBase, raw: Tokenizer, folder: Path) -> None:
    """A class of the folder's own encodes as the tokenizer.json beside it: servers take either."""
    differs = _encodes_as(tokenizer, raw)
    if differs is not None:
        raise VerifierInvalid(
            f"{folder}: tokenizer",
            wanted=f"{type(tokenizer).__name__} to give the ids of tokenizer.json for {differs!r}",
            found="others",
            remedy="remove the one that was not published with these weights",
        )


def _equal_to_raw(
    tokenizer: PreTrainedTokenizerBase, raw: Tokenizer, folder: Path
) -> PreTrainedTokenizerBase:
    """The tokenizer when it encodes as tokenizer.json does; else the plain class that does."""
    if _encodes_as(tokenizer, raw) is None:
        return tokenizer
    plain = _load(PreTrainedTokenizerFast, folder, trust_remote_code=False)
    differs = _encodes_as(plain, raw)
    if differs is not None:
        raise VerifierInvalid(
            f"{folder}: tokenizer",
            wanted=f"the ids of its own tokenizer.json for {differs!r}",
            found=f"others from {type(tokenizer).__name__} and {type(plain).__name__}",
            remedy="save the tokenizer again with the transformers release that made it",
        )
    return plain


def _encodes_as(tokenizer: PreTrainedTokenizerBase, raw: Tokenizer) -> str | None:
    """The first probe whose ids differ, or None."""
    for probe in _PROBES:
        if tokenizer.encode(probe, add_special_tokens=False) != list(
            raw.encode(probe, add_special_tokens=False).ids
        ):
            return probe
    return None


def _check_template(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    if not tokenizer.chat_template:
        raise VerifierInvalid(
            f"{folder}: chat template",
            wanted="one, since conversations are rendered by it",
            found="none",
            remedy=f"write {CHAT_TEMPLATE_NAME} beside the tokenizer",
        )


def _check_special_tokens(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Every special token is one id when it is met in a text."""
    for token, wanted in zip(*_special_tokens(tokenizer), strict=True):
        found = tokenizer.encode(token, add_special_tokens=False)
        if found != [wanted]:
            raise VerifierInvalid(
                f"{folder}: special token {token}",
                wanted=f"the one id {wanted}",
                found=found,
                remedy="load the tokenizer by the class it was published with",
            )


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], list[int]]:
    ids = sorted(special_ids(tokenizer))
    return [str(token) for token in tokenizer.convert_ids_to_tokens(ids)], ids


def _check_round_trip(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    for probe in _PROBES:
        ids = tokenizer.encode(probe, add_special_tokens=False)
        found = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if found != probe:
            raise VerifierInvalid(
                f"{folder}: tokenizer",
                wanted=f"{probe!r} back from its own ids",
                found=repr(found),
                remedy="load the tokenizer by the class it was published with",
            )


def _check_ids(tokenizer: PreTrainedTokenizerBase, vocab_size: int, folder: Path) -> None:
    """`len()` of a sparse vocabulary is not its largest id plus one, so every id is looked at."""
    ids: Iterable[int] = tokenizer.get_vocab().values()
    largest = max(ids)
    if largest >= vocab_size:
        raise VerifierInvalid(
            f"{folder}: token ids",
            wanted=f"ids below {vocab_size}, the rows of lm_head",
            found=largest,
            remedy="bring the tokenizer that was published with these weights",
        )
