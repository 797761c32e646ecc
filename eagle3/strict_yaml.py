"""YAML as a person means it: a key given twice is an error, and 1e-4 is a number.

PyYAML follows YAML 1.1, which takes the last of two equal keys without a word and reads `1e-4`
(no dot) as text.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

_WORDS = {
    "array": "a list",
    "object": "a mapping",
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "nothing",
}


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        seen: set[str] = set()
        for key in keys:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value!r} a second time", problem_mark=key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def loads(text: str) -> object:
    """The plain values of one YAML document. Raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)


def problem(error: Exception) -> str:
    """What is wrong, and in which line, without the excerpt that PyYAML adds."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"{error.problem} in line {error.problem_mark.line + 1}"
    return " ".join(str(error).split())


def in_words(message: str) -> str:
    """What msgspec says of a value, in the words of YAML."""
    for name, word in _WORDS.items():
        message = message.replace(f"`{name}`", word)
    return message[:1].lower() + message[1:]
